"""Directories of a launch outside its run directory: who owns them, and their removal when the owner is dead.

A process that is killed cannot remove what it has made. So each directory holds a file ``owner``, which names
its process and which that process keeps locked. A later launch of the same user removes the directory if the
lock is free, and the process that is named is not there any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from evenstep.errors import MachineError

PREFIX = "evenstep-"
_OWNER = "owner"
_LOCKED, _UNLOCKED = "locked", "unlocked"
_MAX_PARENT = 70  # a socket's path may have 107 characters on Linux, 103 elsewhere
_UNKNOWN = "-"


class Directory:
    """A new directory that only this user can enter, and that this process owns until :meth:`close`.

    Args:
        parent: where it is made; by default the directory for temporary files, or ``/tmp`` if the path of a
            Unix socket in the new directory would be too long.

    Raises:
        MachineError: the directory cannot be made, or not be written.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = temporary() if parent is None else parent
        self._lock = -1
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                self._hold()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise MachineError(
                f"cannot make a directory in {parent}: {error.strerror}. A launch keeps small files there "
                "while it runs. Free some space, or set TMPDIR to another directory."
            ) from None

    def _hold(self) -> None:
        self._lock = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        how = _LOCKED
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            how = _UNLOCKED
        os.write(self._lock, _record(os.getpid(), how).encode())

    def close(self) -> None:
        """Remove the directory. Does nothing the second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def temporary() -> Path:
    """Return the directory for temporary files, or ``/tmp`` where a socket's path in it would be too long."""
    parent = tempfile.gettempdir()
    return Path(parent if len(parent) <= _MAX_PARENT else "/tmp")


def name(path: Path, pid: int) -> None:
    """Write into a directory that another process owns, which holds no lock."""
    (path / _OWNER).write_text(_record(pid, _UNLOCKED))


def abandoned(parent: Path) -> list[Path]:
    """Return the directories in ``parent`` that this user's launches have left when they were killed."""
    found = []
    for path in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # removed by another one at the same time, or not for us to read
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and _is_abandoned(path):
                found.append(path)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process lives; one that has ended and waits for its parent does not.

    A process id of 0, the parent's where that is in another container, tells nothing: it counts as living.
    """
    if pid <= 0:
        return True
    with contextlib.suppress(OSError, IndexError):  # /proc may hide other users' processes (hidepid)
        return _stat(pid)[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def container() -> str:
    """Return the number of this process's space of process ids; containers have one each."""
    return "".join(c for c in _namespace() if c.isdigit())


def _is_abandoned(path: Path) -> bool:
    """Whether the owner is dead beyond doubt.

    The lock alone would not do: under torchrun nobody holds it during a restart. The process alone would not
    do: another container may share the directory and has process ids of its own, and a number may have been
    given to another process since. What was written before the machine has started anew, or on another
    machine, is nothing that can be judged here.
    """
    try:
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # it is being made, or not ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = os.read(lock, 256).decode(errors="replace").split()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    if len(record) != 5 or not record[0].isdigit():
        return False
    pid, started, how, boot, namespace = record
    if boot != _boot():
        return False
    if namespace != _namespace():
        return how == _LOCKED  # the kernel frees a lock when its process ends, wherever that was
    if not is_alive(int(pid)):
        return True
    # A living process that /proc hides, now or when this was written, may well be the owner.
    return _UNKNOWN not in (started, now := _started(int(pid))) and now != started


def _record(pid: int, how: str) -> str:
    return f"{pid} {_started(pid)} {how} {_boot()} {_namespace()}\n"


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process after its name: the state first."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _started(pid: int) -> str:
    """Return when a process began, in the kernel's ticks since the start of the machine."""
    try:
        return _stat(pid)[19]
    except (OSError, IndexError):
        return _UNKNOWN


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return _UNKNOWN


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return _UNKNOWN
