"""Which checkpoint a run goes on from: the newest one that is whole, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger

from evenstep import checkpoint
from evenstep.errors import CheckpointError
from evenstep.world import World


def newest_whole(run_dir: str | Path, world: World, *, since: float = 0.0) -> Path | None:
    """Return the newest checkpoint whose bytes are as they were written. Collective: every rank must call.

    A newer one that is damaged is skipped with a warning that names the file. Every rank reads the files, and
    all take the newest that is whole for each: with a run directory on each machine they may differ.

    Args:
        run_dir: the run's directory.
        world: this process.
        since: leave out those that were written before, as ``time.time()``: they are another run's.

    Returns:
        Its directory; None if the run has none on any machine.

    Raises:
        CheckpointError: it has some, and none is whole; or they are not on all machines.
    """
    at_most: int | None = None
    problems: list[str] = []
    while True:
        path = _newest_here(run_dir, world, since, at_most, problems)
        step = -1 if path is None else checkpoint.step_of(path)
        steps = gathered(torch.tensor([step, len(problems)]), world).tolist()
        damaged = [rank for rank, (_, number) in enumerate(steps) if number]
        if damaged and all(found < 0 for found, _ in steps):
            raise CheckpointError(
                f"no checkpoint of the run directory {run_dir} is whole, so there is nothing to go on from:\n"
                + ("\n".join(problems) or f"those on rank {damaged[0]}'s machine are damaged; see its log")
            )
        if len({found for found, _ in steps}) == 1:
            return path
        at_most, rank = min((found, rank) for rank, (found, _) in enumerate(steps))
        if at_most < 0:
            raise CheckpointError(
                f"the checkpoint of step {max(steps)[0]} is not, or not whole, in the run directory "
                f"{run_dir} of rank {rank}'s machine. Every machine reads it: copy it to all of them, or put "
                "the run directory on a file system that they share, and start again with --resume."
            )


def _newest_here(
    run_dir: str | Path, world: World, since: float, at_most: int | None, problems: list[str]
) -> Path | None:
    """Return this process's newest whole one, and add what is wrong with newer ones to ``problems``."""
    for path in checkpoint.directories(run_dir):
        if at_most is not None and checkpoint.step_of(path) > at_most:
            continue
        if path.stat().st_mtime < since:
            continue
        found = checkpoint.verify(path)
        if not found:
            return path
        problems += found
        for problem in found:
            logger.bind(file_only=not world.is_first).warning("skipping a damaged checkpoint: {}", problem)
    return None


def gathered(mine: torch.Tensor, world: World) -> torch.Tensor:
    """Return everybody's whole numbers, one row a rank. Collective."""
    mine = mine.to(world.device)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    if world.world_size > 1:
        dist.all_gather(rows, mine)
    else:
        rows = [mine]
    return torch.stack(rows).cpu()
