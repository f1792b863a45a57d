"""A directory in the shared memory of this machine, one for each launch: snapshots and heartbeats live there.

What is written there survives the process that wrote it, and costs a copy in memory and no disk. Each launch
has a directory of its own, which only this user can enter. The launching process removes it at the end; if it
is killed, those that outlive it do, or the next launch of the same user (owners.py).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenstep import owners
from evenstep.owners import is_alive

__all__ = [
    "LEFT_EXIT",
    "SHARED_MEMORY",
    "Owned",
    "fallback",
    "is_alive",
    "is_usable",
    "of_torchrun",
    "remove_leftovers",
    "semaphores",
    "sockets",
]

SHARED_MEMORY = Path("/dev/shm")

LEFT_EXIT = 77
"""The exit code of a process that has saved its state here and left because another one died."""


class Owned:
    """A directory that this process owns, until :meth:`close` removes it.

    Args:
        run_dir: the run's directory, whose folder ``snapshots`` stands in where there is no shared memory.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        remove_leftovers()
        usable = is_usable(SHARED_MEMORY)
        self._directory = owners.Directory(SHARED_MEMORY if usable else Path(tempfile.gettempdir()))
        self.path = self._directory.path
        self._run_dir = run_dir

    def close(self) -> None:
        """Remove the directory, and what the workers of this launch put into the run's directory instead."""
        if self._run_dir is not None:
            shutil.rmtree(fallback(self.path, self._run_dir), ignore_errors=True)
            with contextlib.suppress(OSError):
                fallback(self.path, self._run_dir).parent.rmdir()
        self._directory.close()


def of_torchrun(run_id: str, agent_pid: int, port: str) -> Path:
    """Return the directory of a run that torchrun launches; made if it is not there.

    Nobody but torchrun outlives a restart of the workers there, so its pid and not a lock says whether the
    directory is in use. It stays until another launch on this machine finds torchrun gone.

    Args:
        run_id: torchrun's id of the run; the same for all runs that give none.
        agent_pid: the process id of torchrun's agent, the parent of all workers of this machine; 0 where
            the parent is outside this container. Such a directory is never taken for a leftover.
        port: where the run's processes meet.
    """
    safe = "".join(c if c.isalnum() else "_" for c in run_id)[:40]
    path = SHARED_MEMORY if is_usable(SHARED_MEMORY) else Path(tempfile.gettempdir())
    # Without a parent to be told by, two runs of one container still differ in the port where they meet.
    key = str(agent_pid) if agent_pid > 0 else f"{owners.container()}-{port}"
    path = path / f"{owners.PREFIX}{os.getuid()}-{safe}-{key}"
    if not path.exists():
        remove_leftovers()  # before it is made: other ranks may be in it right after
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    owners.name(path, agent_pid)
    return path


@contextlib.contextmanager
def semaphores(path: Path) -> Iterator[None]:
    """Name multiprocessing's semaphores after a launch's directory, inside a ``with`` block.

    torch's agent makes some for its workers. They are files in shared memory, and stay there if this process
    and multiprocessing's resource tracker are killed together; by their name they can be removed with the
    directory.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{path.name}"
    try:
        yield
    finally:
        config["semprefix"] = "/mp"  # its default; launches may overlap in any order


@contextlib.contextmanager
def sockets() -> Iterator[None]:
    """Have multiprocessing make its sockets in a directory of ours, inside a ``with`` block.

    Its own directory says nothing of who owns it, so nobody could remove it when this process is killed. Ours
    lives as long as this process; if multiprocessing has a directory already, that one stays.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        yield
        return
    directory, pid = owners.Directory(), os.getpid()
    config["tempdir"] = str(directory.path)
    try:
        yield
    finally:
        config["tempdir"] = None
        if len(list(directory.path.iterdir())) == 1:  # the file that names the owner: no socket was needed
            directory.close()
        else:
            atexit.register(lambda: directory.close() if os.getpid() == pid else None)


def fallback(path: Path, run_dir: str | Path) -> Path:
    """Return where snapshots go that do not fit into the directory ``path`` in shared memory."""
    return Path(run_dir) / "snapshots" / path.name


def is_usable(parent: Path) -> bool:
    """Return whether this process can make directories there."""
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def remove_leftovers() -> None:
    """Remove this user's directories whose owners have died, in shared memory and among temporary files."""
    for parent in {SHARED_MEMORY, Path(tempfile.gettempdir()), owners.temporary()}:
        for path in owners.abandoned(parent) if is_usable(parent) else ():
            for semaphore in parent.glob(f"sem.{path.name}-*"):  # see semaphores()
                with contextlib.suppress(OSError):
                    semaphore.unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
