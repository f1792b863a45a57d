"""Lanes of one process that meet on the way: a thread each, of which only one runs at any time.

A lane runs until it arrives at a meeting, and hands over to the next lane. When all have arrived, the calling
thread makes one answer of what they brought, and they go on, again one after the other. So nothing runs at
the same time as anything else, and the order is always that of the lanes; threads serve only to leave a
lane in the middle of its forward or backward pass.

The random states of Python, numpy and torch belong to the process; every lane finds its own again.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evenstep.seeding import random_states, set_random_states


class _Left(BaseException):
    """Ends a lane's thread because another lane has failed; no ``except Exception`` of a model catches it."""


@dataclass(eq=False)
class _Strand:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    brought: Any = None
    is_done: bool = False
    error: BaseException | None = None


class HandOver:
    """Runs tasks that meet. A single task runs in the calling thread, and meets nobody but other processes.

    Args:
        tasks: what to run, in order.
        meet: makes the answer for all of them from what each of them brought, in order.

    Attributes:
        current: the number of the task that runs.
    """

    def __init__(self, tasks: Sequence[Callable[[], None]], meet: Callable[[list[Any]], Any]) -> None:
        self._tasks = tasks
        self._meet = meet
        self._threads = torch.get_num_threads()
        self._back = threading.Semaphore(0)
        self._strands: list[_Strand] = []
        self._answer: Any = None
        self._is_over = False
        self.current = 0

    def run(self) -> None:
        """Run all tasks to their ends; they have to come to the same number of meetings.

        Raises:
            BaseException: what a task or ``meet`` raised. All threads have ended by then.
        """
        if len(self._tasks) == 1:
            self._tasks[0]()
            return
        for number, task in enumerate(self._tasks):
            strand = _Strand()
            # The values of context variables go along, such as loguru's and numpy's.
            run = contextvars.copy_context().run
            strand.thread = threading.Thread(
                target=run, args=(self._work, strand, task), name=f"evenstep-lane-{number}", daemon=True
            )
            self._strands.append(strand)
            strand.thread.start()
        try:
            while True:
                for number, strand in enumerate(self._strands):
                    self.current = number
                    strand.go.release()
                    self._back.acquire()
                    if strand.error is not None:
                        raise strand.error
                num_done = sum(strand.is_done for strand in self._strands)
                if num_done == len(self._strands):
                    return
                if num_done:
                    raise RuntimeError(f"{num_done} of {len(self._strands)} tasks ended before a meeting")
                self._answer = self._meet([strand.brought for strand in self._strands])
        finally:
            self._end()

    def arrive(self, brought: Any) -> Any:
        """Wait for the others, from within the task that runs; return the answer of the meeting."""
        if not self._strands:
            return self._meet([brought])
        if self._is_over:
            raise _Left
        strand = self._strands[self.current]
        strand.brought = brought
        states = random_states()
        self._back.release()
        strand.go.acquire()
        if self._is_over:
            raise _Left
        set_random_states(states)
        return self._answer

    def _work(self, strand: _Strand, task: Callable[[], None]) -> None:
        strand.go.acquire()
        try:
            if not self._is_over:
                # OpenMP keeps the number of threads by thread, and it changes the bits of some kernels.
                torch.set_num_threads(self._threads)
                task()
        except _Left:
            pass
        except BaseException as error:  # raised again by run
            strand.error = error
        finally:
            strand.is_done = True
            self._back.release()

    def _end(self) -> None:
        """End the threads that have not come to their end, because of an error."""
        self._is_over = True
        for strand in self._strands:
            strand.go.release()
            with contextlib.suppress(RuntimeError):  # of a thread that was never started
                if strand.thread is not None:
                    strand.thread.join()
            strand.error = None  # its traceback holds this object
        self._strands = []
