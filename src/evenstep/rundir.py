"""The directory of a run: choosing it, making it, and finding the checkpoints in it.

Nothing here imports torch, except to agree on a directory under a launcher other than ours.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from evenstep import machines
from evenstep import world as worlds
from evenstep.config import TrainConfig
from evenstep.errors import CheckpointError, ConfigError, MachineError
from evenstep.flat import from_flat
from evenstep.manifest import directories, verify

RUNS = Path("runs")


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = run_dir.glob("checkpoints/step-*/manifest.json")
    return sorted(path.parent for path in found if re.fullmatch(r"step-\d+", path.parent.name))


def newest_whole(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose bytes are as they were written; None if there is none.

    What is wrong with newer ones goes to stderr. Every file is read, once.
    """
    for path in directories(run_dir):
        problems = verify(path)
        if not problems:
            return path
        if not path.is_dir():  # removed meanwhile, by the run that goes on
            continue
        for problem in problems:
            sys.stderr.write(f"evenstep: skipping a damaged checkpoint: {problem}\n")
    return None


def newest_run(runs: Path) -> Path:
    """Return the run with the newest checkpoint.

    Raises:
        CheckpointError: no run has a checkpoint.
    """
    found = [
        ((checkpoint / "manifest.json").stat().st_mtime_ns, run)
        for run in (runs.iterdir() if runs.is_dir() else ())
        for checkpoint in checkpoints(run)[-1:]
    ]
    if not found:
        raise CheckpointError(
            f"--resume: no run in {runs}/ (below {Path.cwd()}) has a checkpoint to go on from. "
            "Name the run with --run-dir DIR, or leave out --resume to start a new one."
        )
    return max(found)[1]


def open_run_dir(
    config: TrainConfig, *, runs: Path = RUNS, now: datetime.datetime | None = None
) -> TrainConfig:
    """Return the config with the run directory settled and made.

    Without ``--run-dir`` it is ``runs/YYYYmmdd-HHMMSS-MODEL``. Under torchrun rank 0 chooses it and the
    other ranks learn it through the launcher's store: every rank must call.

    Raises:
        ConfigError: the directory already has checkpoints and ``--resume`` was not given.
        MachineError: it cannot be written.
    """
    run = config.run
    place = worlds.placement()
    restarted = place is not None and place.restart > 0
    process = config.process
    where = machines.machines_of(process.nnodes, process.rdzv_endpoint, process.rdzv_id)
    if where is not None and place is None and run.run_dir is None:
        raise ConfigError(
            f"nnodes is {process.nnodes}, and no run_dir is given: each machine would choose a run directory "
            "of its own. Give the same --run-dir DIR to all of them, best on a file system that they share."
        )
    if run.run_dir is None:
        stem = f"{now or datetime.datetime.now():%Y%m%d-%H%M%S}-{_model_name(config.model.model)}"
        make = _UniqueDir(runs, stem)
        run_dir = make() if place is None else _agreed_dir(place, make)
    else:
        run_dir = Path(run.run_dir)
    found = checkpoints(run_dir)
    resume = run.resume
    # A machine that comes later finds the run's directory in use.
    if found and not resume and rank_0_is_here(config):
        if not restarted:
            raise ConfigError(
                f"run directory {run_dir} already has a checkpoint of step {_step_of(found[-1]):,}; a new "
                "run would overwrite it. Add --resume to go on from there, or choose another --run-dir."
            )
        resume = True  # the launcher started us again after a failure
    _make_writable(run_dir)
    return from_flat({"run_dir": str(run_dir), "resume": resume}, config)


def rank_0_is_here(config: TrainConfig) -> bool:
    """Return whether this process, or its machine, is the one that writes the run's files and speaks."""
    place, endpoint = worlds.placement(), config.process.rdzv_endpoint
    if place is not None or endpoint is None:
        return place is None or place.rank == 0
    where = machines.machines_of(config.process.nnodes, endpoint)
    return where is None or machines.is_here(where.host)


@dataclass(frozen=True)
class _UniqueDir:
    """Makes ``runs/stem``, or ``runs/stem-2`` and so on if it is there already."""

    runs: Path
    stem: str

    def __call__(self) -> Path:
        for number in range(1, 1000):
            path = self.runs / (self.stem if number == 1 else f"{self.stem}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not self.runs.is_dir():
                    raise _unwritable(path, "a file is in its way") from None
            except OSError as error:
                raise _unwritable(path, error.strerror) from None
            else:
                return path
        raise _unwritable(self.runs / self.stem, "999 runs of this second are there already")


def _agreed_dir(place: worlds.Placement, make: _UniqueDir) -> Path:
    if place.world_size == 1 and place.restart == 0:
        return make()
    if job := worlds.variable("SLURM_JOB_ID"):
        return make.runs / f"slurm-{job}-{make.stem.split('-', 2)[-1]}"
    if worlds.variable("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            f"{place.world_size} processes were started by a launcher that gives them no common name for the "
            "run: each would choose a run directory of its own. Give the same --run-dir DIR to all of them."
        )
    import torch.distributed as dist

    # The store of torchrun's agent lives through restarts, so that a restarted worker finds its run again.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        worlds.variable("MASTER_ADDR") or "localhost",
        int(worlds.variable("MASTER_PORT") or 0),
        is_master=False,
        timeout=datetime.timedelta(seconds=300),
    )
    key = "evenstep/run_dir"
    if place.rank == 0 and not store.check([key]):
        store.set(key, str(make()))
    return Path(store.get(key).decode())


def _make_writable(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(run_dir, error.strerror) from None


def _unwritable(path: Path, reason: str | None) -> MachineError:
    return MachineError(
        f"cannot write the run directory {path}: {reason}. Checkpoints, logs and metrics go there. "
        "Choose another with --run-dir DIR."
    )


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _model_name(spec: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", ".", spec.rpartition(":")[2]) or "model"
