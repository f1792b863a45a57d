"""Where the time of each rank goes: waiting for data, computing, waiting for the other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from evenstep.world import World

T = TypeVar("T")
_MATTERS = 0.05
_LONG_FIRST_STEP_S = 1.0


@dataclass(frozen=True)
class Times:
    """The time of every rank since this start of the run.

    Attributes:
        steps: how many steps it was spent on.
        data_s: for each rank, seconds that the loop waited for the Loader.
        step_s: for each rank, seconds in ``train_step``. On a GPU the host runs ahead of the device, so what
            the device does late counts where the host next waits for it.
        wait_s: for each rank, seconds of ``step_s`` in which backward was done and the sums of the other
            ranks were not; estimated from the steps that torch DDP samples. None where it is not known.
        first_s: for each rank, seconds of ``step_s`` in the first step, in which ``--compile`` compiles.
    """

    steps: int
    data_s: list[float]
    step_s: list[float]
    wait_s: list[float | None]
    first_s: list[float] = field(default_factory=list)


def slowest(times: Times) -> str | None:
    """Return in a line whom others waited for, and how long data and first step took; None if it was little.

    Sending the sums takes time as well. That is what the slowest rank waits, too, so it does not count.

    Args:
        times: the time of every rank.
    """
    total_s = sum(times.data_s) + sum(times.step_s)
    if not total_s:
        return None
    parts = []
    known = [wait for wait in times.wait_s if wait is not None]
    if len(known) == len(times.wait_s) > 1:
        least = min(known)
        waited = (sum(known) - len(known) * least) / total_s * len(known) / (len(known) - 1)
        if waited >= _MATTERS:
            rank = known.index(least)
            whom = "the others" if len(known) > 2 else "the other"
            parts.append(f"rank {rank} was the slowest: {whom} waited {waited:.0%} of the time for it")
    data = sum(times.data_s) / total_s
    if parts or data >= _MATTERS:
        parts.append(f"waiting for data took {data:.0%} of the time")
    first_s = max(times.first_s, default=0.0)
    if first_s >= _LONG_FIRST_STEP_S and times.steps > 1:
        share = first_s * len(times.step_s) / total_s
        parts.append(
            f"the first step took {first_s:.1f} s, {share:.0%} of the time (it sets up buffers, and compiles "
            "with --compile)"
        )
    return "; ".join(parts).replace("%", " %") or None


class Stopwatch:
    """Adds up the time of this rank; two readings of the clock for each of its parts."""

    def __init__(self) -> None:
        self.steps = 0
        self.data_s = 0.0
        self.step_s = 0.0
        self.first_s = 0.0

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches``; the time until each is there counts as time for data."""
        iterator = iter(batches)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.data_s += time.perf_counter() - begun
            yield batch

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the time of this block as one step."""
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        if not self.steps:
            self.first_s = seconds
        self.step_s += seconds
        self.steps += 1

    def everybody(self, world: World, wait_per_step_s: float | None) -> Times:
        """Return the times of all ranks. Collective: every rank must call.

        Args:
            world: this process.
            wait_per_step_s: what this rank waits for the others in a step, from ``Lanes.wait_per_step_s``.
        """
        wait_s = None if wait_per_step_s is None else min(wait_per_step_s * self.steps, self.step_s)
        own = (self.data_s, self.step_s, wait_s, self.first_s)
        ranks: list[Any] = [own]
        if world.world_size > 1:
            ranks = [None] * world.world_size
            dist.all_gather_object(ranks, own)
        return Times(self.steps, *([rank[part] for rank in ranks] for part in range(4)))
