"""Helpers for tests of code that runs on several processes; public, for your own tests too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evenstep.errors import ConfigError, did_you_mean
from evenstep.launcher import launch

POINTS = (
    "before_forward",
    "before_reduce",
    "in_reduce",
    "after_reduce",
    "in_commit",
    "in_save",
    "in_recovery",
)
"""The named points at which a fault can strike."""


@dataclass(frozen=True)
class KillAt:
    """A fault for ``launch(main, fault=...)``; see :func:`kill_at`.

    Attributes:
        ranks: the ranks that it kills.
        step: committed steps when it happens.
        point: one of ``POINTS``.
        restart: in which start of the workers it happens.
    """

    ranks: tuple[int, ...]
    step: int
    point: str
    restart: int = 0

    def __call__(self, rank: int, restart: int, point: str, step: int) -> None:
        """Kill this process if the fault is meant for it. Called at every named point."""
        is_it = step == self.step or self.point == "in_recovery"
        if point == self.point and is_it and rank in self.ranks and restart == self.restart:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at(
    rank: int | tuple[int, ...], step: int, *, point: str = "before_reduce", restart: int = 0
) -> KillAt:
    """Return a fault that kills a rank (SIGKILL) at a named point: ``launch(main, fault=kill_at(1, 5))``.

    Args:
        rank: the rank, or several.
        step: committed steps when it is to happen; with several TrainStates, those of any of them.
        point: ``before_forward``, ``before_reduce`` (before a lane's backward pass), ``in_reduce`` (the
            first gradients are summed), ``after_reduce``, ``in_commit`` (the weights are new, the step
            is not counted yet), ``in_save`` (a checkpoint is being written), ``in_recovery`` (the processes
            agree on what to take up; ``step`` does not matter).
        restart: in which start of the workers it happens; so that it happens once.

    Raises:
        ConfigError: there is no such point.
    """
    if point not in POINTS:
        raise ConfigError(
            f"point is {point!r};{did_you_mean(point, POINTS)} expected one of {', '.join(POINTS)}."
        )
    return KillAt(rank if isinstance(rank, tuple) else (rank,), step, point, restart)


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    lanes: int | None = None,
    timeout_s: float = 60.0,
    **options: Any,
) -> list[Any]:
    """Run ``fn(world, *args)`` on ``n`` processes with one CPU thread each; return every rank's value.

    The first call of a process takes about two seconds, later ones a tenth of that, because the fork server
    stays.

    Args:
        fn: what each process runs; may be a lambda or a closure.
        n: the number of processes.
        args: further arguments for ``fn``.
        lanes: logical workers; by default ``n``.
        timeout_s: seconds after which a collective without an answer fails.
        options: further options of :func:`evenstep.launcher.launch`.

    Returns:
        The values, by rank.

    Raises:
        WorkerError: a rank failed; the text is the report.
    """
    chosen = {"device": "cpu", "threads": 1, **options}
    values: list[Any] = launch(
        fn, *args, nproc=n, lanes=lanes, timeout_s=timeout_s, all_values=True, **chosen
    )
    return values
