"""The command ``evenstep verify``: its flags, and what it prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evenstep import cli, flags, options
from evenstep import world as worlds
from evenstep.config import TrainConfig, check_batch_size
from evenstep.errors import ConfigError
from evenstep.files import json_text
from evenstep.flat import from_flat

PROG = "evenstep verify"
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Train a few steps on several numbers of processes and compare all bits: parameters, buffers, optimizer.

    Takes all flags of evenstep train as well (evenstep train --help): --model, --data, --batch-size ... The
    exit code is 0 if all runs are the same, 6 if not.
    """

    nproc: str = "1,2"
    """Numbers of processes, compared with the first (1,2,3,4)."""
    lanes: int | None = None
    """Logical workers of all runs. Default: the largest of --nproc."""
    steps: int = STEPS
    """Steps to compare."""
    main: str | None = None
    """A loop of your own, module:main, called as main(world), in place of --model and --data."""
    hash_seeds: str = "1,2"
    """Values of PYTHONHASHSEED for runs in fresh interpreters, which show what follows the order of a set;
    none: no such runs."""
    against: Literal["single"] | None = None
    """single: compare the losses with the plain one-process PyTorch loop, too."""
    tolerance: float = 1e-4
    """Largest relative difference of a loss from the plain loop's."""
    json: bool = False
    """Print one JSON object as the last line of stdout, in place of the table."""
    quiet: bool = False
    """Print only the result and errors."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps}; there must be 1 or more to compare (--steps {STEPS}).")
        if self.tolerance < 0:
            raise ConfigError(f"tolerance is {self.tolerance}; it must be 0 or more (--tolerance 1e-4).")
        if self.against is None and self.tolerance != 1e-4:
            raise ConfigError("--tolerance is for --against single; add it, or leave --tolerance out.")


# Flags of train that verify does not pass on as they are.
_OWN = frozenset({"nproc", "lanes", "steps", "main", "hash_seeds", "against", "tolerance"})
_BOTH = frozenset({"json", "quiet"})
REFUSED = ("resume", "run_dir", "smoke_test")


def verify(argv: Sequence[str]) -> int:
    """Run ``evenstep verify`` and return its exit code: 0 if all runs are the same, 6 if not."""
    asked, config, sizes, seeds = parse(argv)
    if worlds.placement() is not None:
        raise ConfigError(
            "evenstep verify starts its processes itself, on several numbers of processes in turn, but this "
            "process was started by torchrun or the like. Start it as `evenstep verify`, without a launcher."
        )
    cli.begin()
    lanes = asked.lanes or max(sizes)
    main: Any
    args: tuple[Any, ...] = ()
    if asked.main is None:
        check_batch_size(config.optim.batch_size, lanes)
        config = cli.prepared(config)
        from evenstep.jobs import steps_job

        main, args = steps_job, (config,)
    else:
        from evenstep.objects import import_object

        main = import_object(asked.main, what="main", flag="--main")
        if not callable(main):
            raise ConfigError(
                f"--main {asked.main} is {type(main).__name__}, which cannot be called. Give a function that "
                "takes the world, as for evenstep.launch: --main mymodule:main."
            )

    from evenstep.verify.runs import EXIT_CODE, Verification, table

    report = Verification(
        main=main,
        args=args,
        world_sizes=sizes,
        lanes=lanes,
        steps=asked.steps,
        hash_seeds=seeds,
        tolerance=asked.tolerance if asked.against == "single" else None,
        options=options.launch_options(config, leave_out=("nproc", "lanes", "run_dir", "resume")),
        tell=lambda text: None if asked.quiet else _tell(text),
    ).run()
    text = json_text(report.as_dict()) if asked.json else table(report)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0 if report.is_same else EXIT_CODE


def parse(argv: Sequence[str]) -> tuple[VerifyOptions, TrainConfig, list[int], list[int]]:
    """Return the options of verify, the config of the training, the world sizes and the hash seeds.

    Raises:
        ConfigError: a flag or a value is wrong.
        SystemExit: the help was printed (0), or a value does not fit its flag (2).
    """
    if flags.wants_help(argv):
        flags.read_flags(VerifyOptions, argv, PROG, VerifyOptions())
    train_keys = flags.keys_of(options.TrainFlags)
    own_keys = flags.keys_of(VerifyOptions)
    found = flags.scan_flags(argv, {**train_keys, **own_keys}, PROG)
    for key in REFUSED:
        if key in found:
            raise ConfigError(
                f"{PROG}: --{key.replace('_', '-')} has no meaning here: verify always begins at step 0, and "
                "writes no files. Leave it out."
            )
    own, rest = _split(found)
    if "main" in found:
        _check_main(found, own_keys)
    asked = flags.read_flags(VerifyOptions, own, PROG, VerifyOptions())
    sizes = _numbers("nproc", asked.nproc, least=1)
    seeds = [] if asked.hash_seeds == "none" else _numbers("hash_seeds", asked.hash_seeds, least=0)
    lanes = asked.lanes or max(sizes)
    if max(sizes) > lanes:
        raise ConfigError(
            f"nproc {max(sizes)} is above lanes {lanes}: each process needs a lane of its own. Use --lanes "
            f"{max(sizes)} or more, or leave --lanes out."
        )
    config = options.parse(rest, "verify").config
    # Its own command line has --nproc and --lanes in another sense; a --config file may have them, too.
    return asked, from_flat({"nproc": 1, "lanes": None, "steps": None, "run_dir": None}, config), sizes, seeds


def _check_main(found: Mapping[str, str | bool], own_keys: Mapping[str, bool]) -> None:
    """Raise ConfigError if a flag is given that a loop of the user's own does not look at."""
    known = {*own_keys, "config", *options.launch_options(TrainConfig())}
    for key in found:
        if key not in known:
            raise ConfigError(
                f"--{key.replace('_', '-')} does nothing with --main: a loop of your own has its own model, "
                "data and optimizer. Leave it out, or write it into the loop."
            )


def _split(found: Mapping[str, str | bool]) -> tuple[list[str], list[str]]:
    """Return the words for verify's own flags and those for train's."""
    own: list[str] = []
    rest: list[str] = []
    for key, value in found.items():
        flag = f"--{key.replace('_', '-')}"
        words = [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, value]
        if key in _OWN or key in _BOTH:
            own += words
        if key not in _OWN:
            rest += words
    return own, rest


def _numbers(name: str, text: str, *, least: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts) or len(set(parts)) < len(parts):
        flag = name.replace("_", "-")
        raise ConfigError(
            f"{PROG}: --{flag} is {text!r}; expected whole numbers from {least} on, each once, with commas "
            f"between them (--{flag} 1,2)."
        )
    return [int(part) for part in parts]


def _tell(text: str) -> None:
    sys.stderr.write(f"verify: {text}\n")
    sys.stderr.flush()
