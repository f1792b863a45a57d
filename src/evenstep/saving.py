"""Saving in the background: training waits for a copy of the state, and a thread writes it to the disk."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from evenstep import checkpoint
from evenstep.errors import MachineError
from evenstep.world import World
from evenstep.writing import Content, gather


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk.

    Attributes:
        step: its step.
        epoch: finished epochs at that step.
        path: its directory.
    """

    step: int
    epoch: int
    path: Path


class Saver:
    """Writes the checkpoints of a run, one at a time, in the order in which they were taken.

    A save that comes while the one before is still being written waits for it first. So there is never more
    than one copy of the state, and no checkpoint is left out.

    A checkpoint that cannot be written is logged at once, and training goes on: the disk may be freed in
    time, and to stop would lose all steps since the last good checkpoint. The next save after it is written
    while training waits; if that fails, too, it raises.

    The thread is no daemon: the interpreter does not exit before it has finished.

    Args:
        world: this process; it knows of the saver while something is being written.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: deque[Saved] = deque()

    def save(self, run_dir: str | Path, *, keep: int, wait: bool = False, **values: Any) -> None:
        """Save a checkpoint.

        Args:
            run_dir: the run's directory.
            keep: as for ``checkpoint.save``.
            wait: return when it is on the disk; nothing is copied then.
            values: step, model, training, meta and score, as for ``checkpoint.save``; meta has an epoch.

        Raises:
            MachineError: it cannot be written and ``wait`` is set, or it and the one before cannot.
            ConfigError: something in it cannot be stored.
        """
        wait = self._joined() is not None or wait
        content = gather(**values, copy=not wait)
        if wait:
            self._write(run_dir, content, keep)
            return
        self._world.pending.add(self)
        # The thread alone holds the copy, so that its memory is free as soon as it is written.
        self._thread = threading.Thread(
            target=self._write_in_background, args=(run_dir, content, keep), name="evenstep-checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            MachineError: the last checkpoint could not be written. It is raised once.
        """
        error = self._joined()
        if error is not None:
            raise error

    def take_saved(self) -> list[Saved]:
        """Return the checkpoints that have got onto the disk since the last call."""
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def _joined(self) -> BaseException | None:
        """Wait for the thread; return its error and forget it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._world.pending.discard(self)
        error, self._error = self._error, None
        return error

    def _write(self, run_dir: str | Path, content: Content, keep: int) -> None:
        path = checkpoint.write(run_dir, content, keep=keep)
        self._saved.append(Saved(content.step, int(content.meta["epoch"]), path))

    def _write_in_background(self, run_dir: str | Path, content: Content, keep: int) -> None:
        try:
            self._write(run_dir, content, keep)
        except BaseException as error:  # raised again in the training thread
            if not isinstance(error, MachineError):
                logger.bind(file_only=True).exception("a checkpoint cannot be written")
            logger.error("{} If the run goes on, its next checkpoint tries again.", error)
            # Without the frames, which would keep the copy of the state in memory.
            error.__cause__ = error.__context__ = None
            self._error = error.with_traceback(None)
