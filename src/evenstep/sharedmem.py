"""A directory in the shared memory of this machine, one for each launch: snapshots and heartbeats live there.

What is written there survives the process that wrote it, and costs a copy in memory and no disk. Each launch
has a directory of its own, which only this user can enter. The launching process removes it at the end; one
whose owner was killed is removed by the next launch of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "evenstep-"
_OWNER = "owner"

LEFT_EXIT = 77
"""The exit code of a process that has saved its state here and left because another one died."""


class Owned:
    """A directory that this process owns; a context manager that removes it.

    Args:
        run_dir: the run's directory, whose folder ``snapshots`` stands in where there is no shared memory.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        remove_leftovers()
        parent = SHARED_MEMORY if is_usable(SHARED_MEMORY) else Path(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._run_dir = run_dir
        self._owner = _claim(self.path)

    def close(self) -> None:
        """Remove the directory, and what the workers of this launch put into the run's directory instead."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._run_dir is not None:
            shutil.rmtree(fallback(self.path, self._run_dir), ignore_errors=True)
            with contextlib.suppress(OSError):
                fallback(self.path, self._run_dir).parent.rmdir()
        with contextlib.suppress(OSError):
            os.close(self._owner)
        self._owner = -1


def of_torchrun(run_id: str, agent_pid: int) -> Path:
    """Return the directory of a run that torchrun launches; made if it is not there.

    Nobody but torchrun outlives a restart of the workers there, so its pid and not a lock says whether the
    directory is in use. It stays until another launch on this machine finds torchrun gone.

    Args:
        run_id: torchrun's id of the run; the same for all runs that give none.
        agent_pid: the process id of torchrun's agent, the parent of all workers of this machine.
    """
    safe = "".join(c if c.isalnum() else "_" for c in run_id)[:40]
    path = SHARED_MEMORY if is_usable(SHARED_MEMORY) else Path(tempfile.gettempdir())
    path = path / f"{PREFIX}{os.getuid()}-{safe}-{agent_pid}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        remove_leftovers()
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    (path / _OWNER).write_text(f"{agent_pid}\n")
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


def fallback(path: Path, run_dir: str | Path) -> Path:
    """Return where snapshots go that do not fit into the directory ``path`` in shared memory."""
    return Path(run_dir) / "snapshots" / path.name


def is_usable(parent: Path) -> bool:
    """Return whether this process can make directories there."""
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def remove_leftovers() -> None:
    """Remove this user's directories whose owners have died.

    Their locks are free then, and the process that is named in them is gone. The lock alone would not do:
    under torchrun nobody holds it during a restart; the process alone would not do: another container may
    share the memory, and has process ids of its own.
    """
    if not is_usable(SHARED_MEMORY):
        return
    for path in SHARED_MEMORY.glob(PREFIX + "*"):
        try:
            if path.stat().st_uid == os.getuid() and _is_abandoned(path):
                for semaphore in SHARED_MEMORY.glob(f"sem.{path.name}-*"):  # see semaphores()
                    semaphore.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # removed by another one at the same time
            continue


def _claim(path: Path) -> int:
    """Write down who owns the directory, and hold its lock until the returned descriptor is closed."""
    owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    os.write(owner, f"{os.getpid()}\n".encode())
    return owner


def _is_abandoned(path: Path) -> bool:
    try:
        owner = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # it is being made, or not ours
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = os.read(owner, 32).decode().strip()
        return text.isdigit() and not is_alive(int(text))
    except BlockingIOError:
        return False
    finally:
        os.close(owner)


def is_alive(pid: int) -> bool:
    """Return whether a process lives; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return False
    except OSError:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
