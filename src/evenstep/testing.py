"""Helpers for tests of code that runs on several processes; public, for your own tests too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenstep.launcher import launch


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
