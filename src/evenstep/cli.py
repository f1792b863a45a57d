"""The command ``evenstep``: the command word, what each command does, and the exit codes.

Nothing here imports torch before a command needs it: ``evenstep --help`` is there at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep import options
from evenstep import world as worlds
from evenstep.config import DataConfig, TrainConfig
from evenstep.errors import ConfigError, EvenstepError, MemoryExhaustedError, did_you_mean
from evenstep.files import json_text
from evenstep.flags import wants_help
from evenstep.flat import from_flat, to_flat, write_toml
from evenstep.rundir import open_run_dir, rank_0_is_here
from evenstep.runlock import held

HELP = """\
usage: evenstep COMMAND [FLAGS]

Data-parallel PyTorch training that gives the same bits on any number of processes.

commands:
  init         begin a project of your own: model, data, loss, metrics (evenstep init DIR)
  train        train and evaluate a model (evenstep train --help)
  run          run a script of your own that calls evenstep.launch, with a faster start (evenstep run SCRIPT)
  eval         evaluate a checkpoint again (evenstep eval --help)
  config show  show every option, its value and where the value comes from
  doctor       say what would slow down or end a long run here, and the fix (evenstep doctor --help)
  checkpoint   list, verify or export the checkpoints of a run (evenstep checkpoint --help)
  verify       find out whether your training has the same bits on any number of processes, and if not, why
  bench        measure plain PyTorch, DataParallel, plain DDP and evenstep side by side on this machine
  report       write the report of a run again, or compare several (evenstep report RUN [RUN...])
  watch        follow a run in the browser (evenstep watch RUN)
  completion   let the shell complete commands and flags (evenstep completion --help)

  --help       show this text
  --version    show the version

exit codes: 0 ok; 1 a worker failed; 2 wrong flag or config; 3 the machine or the data; 4 checkpoint missing
or bad; 5 diverged, or ranks hold different weights; 6 verify found a difference; 75 stopped and saved, run it
again with --resume; 128+N killed by signal N
"""

COMMANDS = (
    *("init", "train", "run", "eval", "config", "checkpoint", "doctor", "verify", "bench", "report", "watch"),
    "completion",
)


Runner = Callable[..., int]
"""``run(work, *args)`` returns what ``work(*args)`` does: an exit code. Here, or in another process."""


def _here(work: Callable[..., int], *args: Any) -> int:
    return work(*args)


def main(argv: Sequence[str] | None = None, *, run: Runner = _here) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the words after ``evenstep``; by default those of this process.
        run: runs what needs torch; the installed command does that in another process (apart.py).
    """
    return _guarded(_dispatch, list(sys.argv[1:] if argv is None else argv), run)


def _guarded(work: Callable[..., int], *args: Any) -> int:
    """Return the exit code of ``work``, also where it raises, and print the error."""
    try:
        return work(*args)
    except EvenstepError as error:
        sys.stderr.write(f"evenstep{_rank_text()}: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough: | head
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # help was shown, or tyro refused a value
        return stop.code if isinstance(stop.code, int) else 1


def _dispatch(words: list[str], run: Runner) -> int:
    if not words:
        sys.stderr.write(HELP)
        return 2
    word, rest = words[0], words[1:]
    if word in ("-h", "--help", "help"):
        return _say(HELP.rstrip())
    if word == "--version":
        import importlib.metadata  # a third of all that would be imported here

        return _say(f"evenstep {importlib.metadata.version('evenstep')}")
    if word == "train":
        return train(rest, run)
    if word == "run":
        from evenstep import script

        return script.run(rest)
    if word == "eval":
        return evaluate(rest, run)
    if word == "config":
        return show_config(rest)
    if word == "doctor":
        return examine(rest)
    if word == "checkpoint":
        from evenstep import inspection

        return inspection.run(rest)
    if word == "verify":
        from evenstep.verify import command

        return command.verify(rest)
    if word == "bench":
        from evenstep.bench import command as benchmark

        return benchmark.bench(rest)
    if word == "init":
        from evenstep import starting

        return starting.run(rest)
    if word == "completion":
        from evenstep import completion

        return completion.run(rest)
    if word in ("report", "watch"):
        from evenstep import pages

        return pages.write_report(rest) if word == "report" else pages.watch(rest)
    raise ConfigError(
        f"unknown command {word!r}.{did_you_mean(word, COMMANDS)} Choose one of {', '.join(COMMANDS)}; "
        "`evenstep --help` says what they do."
    )


def train(argv: Sequence[str], run: Runner = _here) -> int:
    """Run ``evenstep train``. Under torchrun every process runs this, and rank 0 speaks."""
    if wants_help(argv):
        options.parse(argv)
    options.check_flags(argv)  # a mistyped flag is the likeliest error; no fork server for it
    place = begin()
    from evenstep.log import check_rotation

    asked = options.parse(argv)
    config = asked.config if place is None else _placed(asked.config, place)
    check_rotation(config.output.log_rotation)
    config = open_run_dir(config)
    _tell(config, asked.notes)
    try:
        with held(config):
            return _train_in(config, asked.sources, run)
    except EvenstepError:
        with contextlib.suppress(OSError):  # a run that was there before is not empty, and stays
            Path(str(config.run.run_dir)).rmdir()
        raise


def _train_in(config: TrainConfig, sources: Mapping[str, str], run: Runner) -> int:
    """Prepare the data and train in a run directory that this process holds."""
    asked, config = config, prepared(config)
    if config.data.data_dir != asked.data.data_dir:
        sources = {**sources, "data_dir": "default"}

    from evenstep.records import save_config, save_sources

    if rank_0_is_here(config) and not config.run.resume:
        save_config(config, Path(str(config.run.run_dir)))
        save_sources(sources, Path(str(config.run.run_dir)))
    return run(_guarded, _train, config, sources, worlds.process_started())


def _train(config: TrainConfig, sources: Mapping[str, str], started: float) -> int:
    from evenstep.records import save_sources

    result = _trained(config, started)
    if rank_0_is_here(config) and config.run.resume:
        # Not before: a resume that is refused leaves the run as it was.
        save_sources(sources, Path(str(config.run.run_dir)))
    return _result(config, result)


def _trained(config: TrainConfig, started: float) -> Mapping[str, Any] | None:
    """Train; with ``--lanes-on-oom`` again with twice the lanes, as often as memory runs out.

    Returns:
        Rank 0's result; None on a machine where rank 0 is not.
    """
    # torch reads this when it is imported; its sockets would complain of machines without a name.
    quiet = {} if config.process.rdzv_endpoint is None else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with worlds.variables(quiet):
        from evenstep.jobs import train_job
        from evenstep.launcher import launch

    while True:
        try:
            asked = options.launch_options(config, leave_out=("started",))
            result: Mapping[str, Any] | None = launch(train_job, config, started=started, **asked)
            return result
        except MemoryExhaustedError as error:
            from evenstep.memory import retried

            again = retried(config)
            if again is None:
                raise
            _tell(config, (f"{error}", f"--lanes-on-oom: going on with lanes {again.process.lanes}"))
            config = again


def evaluate(argv: Sequence[str], run: Runner = _here) -> int:
    """Run ``evenstep eval``: the numbers of a checkpoint once more, on any number of processes."""
    config, checkpoint = options.eval_config(options.parse_eval(argv))
    place = begin()
    if place is not None:
        config = _placed(config, place)
    _tell(config, (f"evaluating {checkpoint}",))

    return run(_guarded, _evaluate, prepared(config), str(checkpoint), worlds.process_started())


def _evaluate(config: TrainConfig, checkpoint: str, started: float) -> int:
    from evenstep.jobs import eval_job
    from evenstep.launcher import launch

    asked = options.launch_options(config, leave_out=("started",))
    result = launch(eval_job, config, checkpoint, started=started, **asked)
    return _result(config, result)


def show_config(argv: Sequence[str]) -> int:
    """Run ``evenstep config show``: every key, its value, and where the value comes from."""
    if not argv or argv[0] != "show":
        got = f"{argv[0]!r}" if argv else "nothing"
        raise ConfigError(
            f"evenstep config needs the word show, and got {got}. Use `evenstep config show [FLAGS]`, "
            "with the flags of evenstep train; --toml prints a file that --config reads."
        )
    flags = [word for word in argv[1:] if word != "--toml"]
    asked = options.parse(flags, "config show")
    if len(flags) < len(argv) - 1:
        return _say(write_toml(asked.config).rstrip())
    rows = [(key, _value_text(value), asked.sources[key]) for key, value in to_flat(asked.config).items()]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return _say("\n".join(f"{key:<{wide[0]}}  {value:<{wide[1]}}  {source}" for key, value, source in rows))


def examine(argv: Sequence[str]) -> int:
    """Run ``evenstep doctor``: exit code 3 if something will end a run."""
    asked = options.parse_doctor(argv)
    if asked.bandwidth:
        begin()

    from evenstep.doctor.examine import run

    return run(asked)


def begin() -> worlds.Placement | None:
    """Get ready to start workers, and return the place of this process if it is a worker itself."""
    place = worlds.placement()
    if place is None:
        from evenstep.launcher import warm_up

        warm_up()  # before anything heavy: the workers' imports then run beside ours
    # The user's own modules (--model module:callable) are in the directory where the command is run. An
    # installed command, unlike python -m, does not have it in the path; workers get our path.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return place


def prepared(config: TrainConfig) -> TrainConfig:
    """Download and decode the data, and return the config with the source that ``auto`` stands for."""
    from evenstep.data.sources import prepare

    data = config.data
    found = prepare(data.data, data_dir=data.data_dir, cache_dir=data.cache_dir, quiet=config.output.quiet)
    if found.note:
        _tell(config, (found.note,))
    changed = {"data": found.spec}
    if data.data == "auto" and found.spec == "digits":  # beside them a data_dir is refused: it does nothing
        changed["data_dir"] = DataConfig().data_dir
    return from_flat(changed, config)


def _placed(config: TrainConfig, place: worlds.Placement) -> TrainConfig:
    """Return the config with the number of processes that the outer launcher has already started."""
    if config.process.lanes_on_oom:
        raise ConfigError(
            f"--lanes-on-oom starts all processes again, and {place.launcher} has started these. Leave it "
            "out, or let evenstep start the processes."
        )
    lanes = config.process.lanes
    if lanes is not None and place.world_size > lanes:
        raise ConfigError(
            f"{place.launcher} started {place.world_size} processes, which is above lanes {lanes}: each "
            f"process needs a lane of its own. Start {lanes} or fewer, or a new run with "
            f"--lanes {place.world_size}."
        )
    return from_flat({"nproc": place.local_world_size}, config)


def _tell(config: TrainConfig, notes: Sequence[str]) -> None:
    place = worlds.placement()
    if not config.output.quiet and (place is None or place.rank == 0):
        for note in notes:
            sys.stderr.write(note + "\n")


def _result(config: TrainConfig, result: Mapping[str, Any] | None) -> int:
    from evenstep.banner import final_line

    if not rank_0_is_here(config) or result is None:
        return 0
    return _say(json_text(result) if config.output.json else final_line(result))


def _say(text: str) -> int:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return 0


def _value_text(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _rank_text() -> str:
    """Return ``" rank 3"`` for a process of an outer launcher that is not rank 0."""
    with contextlib.suppress(EvenstepError):
        place = worlds.placement()
        if place is not None and place.rank:
            return f" rank {place.rank}"
    return ""
