"""The command ``evenstep bench``: its flags, and what it writes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep import cli, flags, options
from evenstep import world as worlds
from evenstep.config import TrainConfig, check_batch_size
from evenstep.errors import ConfigError, MachineError
from evenstep.files import json_text
from evenstep.flat import from_flat

if TYPE_CHECKING:
    from evenstep.bench.results import Report

PROG = "evenstep bench"
STEPS, DROP = 30, 5


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure plain PyTorch, DataParallel, plain DDP and evenstep side by side, on your machine and model.

    Takes the flags of evenstep train as well (evenstep train --help): --model, --data, --batch-size,
    --precision, --nproc, --threads ... Needs a machine on which nothing else runs.
    """

    steps: int = STEPS
    """Steps of each training."""
    drop_steps: int = DROP
    """How many of the first steps do not count: they are slower."""
    rounds: int = 3
    """How often everything is trained, in turn."""
    output: str | None = None
    """A directory for bench.json and the picture bench.svg."""
    json: bool = False
    """Print one JSON object as the last line of stdout, in place of the table."""
    quiet: bool = False
    """Print only the result and errors."""

    def __post_init__(self) -> None:
        if self.drop_steps < 1:
            raise ConfigError(
                f"drop_steps is {self.drop_steps}; it must be 1 or more, because the first step also sets up "
                f"what the others use (--drop-steps {DROP})."
            )
        if self.steps <= self.drop_steps:
            raise ConfigError(
                f"steps is {self.steps}, and the first {self.drop_steps} do not count: none is left. Use "
                f"--steps {self.drop_steps + 1} or more, or a smaller --drop-steps."
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; it must be 1 or more (--rounds 3).")


REFUSED = {
    "resume": "each training begins anew",
    "run_dir": "no run is written; --output DIR takes the results",
    "smoke_test": "--steps 4 --drop-steps 1 --rounds 1 is the shortest comparison",
    "mode": "both modes of evenstep are measured",
    "ema_decay": "torch's own loops here have no moving average",
    "nnodes": "it measures one machine",
    "rdzv_endpoint": "it measures one machine",
    "rdzv_id": "it measures one machine",
}
# The same in all rows, and nothing that takes time: the learning rate's course, and the end of the training.
_SETTLED: dict[str, Any] = {
    **{"steps": None, "epochs": 1, "lr_schedule": "constant", "warmup_epochs": 0.0, "ema_decay": None},
    **{"lanes_on_oom": False, "mode": "exact", "run_dir": None, "nnodes": 1, "rdzv_endpoint": None},
    "rdzv_id": None,
}

# What each row decides itself.
_PER_ROW = frozenset({"nproc", "lanes", "threads", "mode", "run_dir", "resume", "max_restarts", "nproc_min"})


def bench(argv: Sequence[str]) -> int:
    """Run ``evenstep bench`` and return its exit code."""
    asked, config = parse(argv)
    if worlds.placement() is not None:
        raise ConfigError(
            f"{PROG} starts its processes itself, in other numbers for each row, but this one was started by "
            f"torchrun or the like. Start it as `{PROG}`, without a launcher."
        )
    output = None if asked.output is None else _directory(asked.output)
    cli.begin()
    config = cli.prepared(config)

    from evenstep.bench.plan import rows
    from evenstep.bench.results import table
    from evenstep.bench.runs import Bench, run
    from evenstep.devices import choose
    from evenstep.launcher import LaunchOptions, _nproc

    process = config.process
    chosen = choose(process.device, process.gpus, process.gpu_memory_fraction)
    nproc = _nproc(LaunchOptions(nproc=process.nproc, lanes=process.lanes), len(chosen.gpus))
    check_batch_size(config.optim.batch_size, process.lanes or nproc)
    threads = process.threads or max(1, worlds.num_cores() // nproc)
    report = run(
        Bench(
            rows=rows(nproc, threads, process.lanes, len(chosen.gpus)),
            config=config,
            options=options.launch_options(config, leave_out=_PER_ROW),
            steps=asked.steps,
            drop=asked.drop_steps,
            rounds=asked.rounds,
            gpus=chosen.gpus[:nproc],
            tell=lambda text: None if asked.quiet else _tell(text),
        )
    )
    if output is not None:
        write(report, output)
    sys.stdout.write((json_text(report.as_dict()) if asked.json else table(report)) + "\n")
    sys.stdout.flush()
    return 0


def parse(argv: Sequence[str]) -> tuple[BenchOptions, TrainConfig]:
    """Return the options of bench and the config of the training.

    Raises:
        ConfigError: a flag or a value is wrong.
        SystemExit: the help was printed (0), or a value does not fit its flag (2).
    """
    if flags.wants_help(argv):
        flags.read_flags(BenchOptions, argv, PROG, BenchOptions())
    own_keys = {field.name for field in dataclasses.fields(BenchOptions)}
    keys = {**flags.keys_of(options.TrainFlags), **flags.keys_of(BenchOptions)}
    found = flags.scan_flags(argv, keys, PROG)
    for key, why in REFUSED.items():
        if key in found:
            raise ConfigError(f"{PROG}: --{key.replace('_', '-')} has no meaning here: {why}. Leave it out.")
    own: list[str] = []
    rest: list[str] = []
    for key, value in found.items():
        flag = f"--{key.replace('_', '-')}"
        words = [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, value]
        if key in own_keys:
            own += words
        if key not in own_keys or key == "quiet":
            rest += words
    asked = flags.read_flags(BenchOptions, own, PROG, BenchOptions())
    return asked, from_flat(_SETTLED, options.parse(rest, "bench").config)


def write(report: Report, directory: Path) -> None:
    """Write bench.json and bench.svg into a directory.

    Raises:
        MachineError: they cannot be written.
    """
    from evenstep.bench.chart import chart

    try:
        (directory / "bench.json").write_text(json_text(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        (directory / "bench.svg").write_text(chart(report), encoding="utf-8")
    except OSError as error:
        raise MachineError(_unwritable(directory, error)) from None


def _directory(path: str) -> Path:
    """Make the directory now: who finds out after the measurement has lost it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(_unwritable(Path(path), error)) from None
    return Path(path)


def _unwritable(directory: Path, error: OSError) -> str:
    return f"{PROG}: cannot write to {directory}: {error.strerror}. Give another directory with --output."


def _tell(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
