"""Which checkpoint a run goes on from: the newest one that is whole, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
from loguru import logger

from evenstep import checkpoint
from evenstep.agreement import gathered
from evenstep.errors import CheckpointError
from evenstep.manifest import directories, step_of, weights_id
from evenstep.world import World


def newest_whole(run_dir: str | Path, world: World, *, since: float = 0.0) -> Path | None:
    """Return the newest checkpoint whose bytes are as they were written. Collective: every rank must call.

    A newer one that is damaged is skipped with a warning that names the file. Every rank reads the files, and
    all take the newest that is whole for each and has the same weights: with a run directory on each machine
    they may differ. A warning says which newer ones were passed over, and where they are missing.

    Args:
        run_dir: the run's directory.
        world: this process.
        since: leave out those that were written before, as ``time.time()``: they are another run's.

    Returns:
        Its directory; None if the run has none on any machine.

    Raises:
        CheckpointError: it has some, and none is whole; or none is on all machines.
    """
    mine = _Mine(run_dir, world, since)
    passed: list[tuple[int, str]] = []
    at_most: int | None = None
    while True:
        path = mine.newest(at_most)
        step, weights = (-1, 0) if path is None else (step_of(path), weights_id(path))
        rows = gathered(torch.tensor([step, len(mine.problems), weights]), world).tolist()
        steps = [row[0] for row in rows]
        damaged = [rank for rank, row in enumerate(rows) if row[1]]
        if not passed and damaged and max(steps) < 0:
            raise CheckpointError(
                f"no checkpoint of the run directory {run_dir} is whole, so there is nothing to go on from:\n"
                + (
                    "\n".join(mine.problems)
                    or f"those on rank {damaged[0]}'s machine are damaged; see its log"
                )
            )
        if not passed and max(steps) < 0:
            return None
        newest = max(steps)
        lacking = [rank for rank, found in enumerate(steps) if found != newest]
        differing = [rank for rank, row in enumerate(rows) if row[2] != rows[0][2]]
        if newest >= 0 and not lacking and not differing:
            _tell(passed, step, world)
            return path
        if newest >= 0:
            if lacking:
                where = f"not, or not whole, on {_machines(lacking)}"
            else:
                where = f"another one on {_machines(differing)} than on rank 0's"
            passed.append((newest, where))
        if min(steps) < 0:
            step, where = passed[0]
            raise CheckpointError(
                f"the checkpoint of step {step} in the run directory {run_dir} is {where}, and no older one "
                "is whole on all machines. Every machine reads it: copy it to all of them, or put the run "
                "directory on a file system that they share, and start again with --resume."
            )
        at_most = newest - 1


def _machines(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 1} other ranks'" if len(ranks) > 2 else f" and rank {ranks[-1]}'s"
    return f"rank {ranks[0]}'s{more if len(ranks) > 1 else ''} machine"


def _tell(passed: list[tuple[int, str]], step: int, world: World) -> None:
    """Say which newer checkpoints were passed over."""
    if passed:
        each = ", ".join(f"step {newer} is {where}" for newer, where in passed)
        text = "going on from the checkpoint of step {}, the newest that is whole on all machines: {}"
        logger.bind(file_only=not world.is_first).warning(text, step, each)


class _Mine:
    """The checkpoints that this process sees; each is read once, however often it is asked for.

    Attributes:
        problems: what is wrong with those that are damaged.
    """

    def __init__(self, run_dir: str | Path, world: World, since: float) -> None:
        self.problems: list[str] = []
        self._world = world
        self._paths = [path for path in directories(run_dir) if path.stat().st_mtime >= since]
        self._whole: dict[Path, bool] = {}

    def newest(self, at_most: int | None) -> Path | None:
        """Return the newest whole one of this step or before, and warn of those that are not whole."""
        for path in self._paths:
            if (at_most is None or step_of(path) <= at_most) and self._is_whole(path):
                return path
        return None

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole:
            found = checkpoint.verify(path)
            self._whole[path] = not found
            self.problems += found
            for problem in found:
                logger.bind(file_only=not self._world.is_first).warning(
                    "skipping a damaged checkpoint: {}", problem
                )
        return self._whole[path]
