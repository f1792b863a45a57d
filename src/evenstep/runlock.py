"""A run directory belongs to one run of ``evenstep train`` at a time. No torch here."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from evenstep import machines
from evenstep import world as worlds
from evenstep.config import TrainConfig
from evenstep.errors import ConfigError, MachineError
from evenstep.rundir import rank_0_is_here

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def held(config: TrainConfig, *, patience_s: float | None = None) -> Iterator[None]:
    """Keep the run directory to this process inside a ``with`` block, where rank 0 is; elsewhere do nothing.

    The kernel frees it when this process dies. Who only reads the directory is not kept from it, nor is
    another launching process of the same run: one that stands in for a machine and meets the others at the
    same endpoint under the same id. Where the file system has no locks, it is not kept.

    Args:
        config: the options, with the run directory settled and made.
        patience_s: how long to wait for another process to end; by default not at all, and some seconds under
            torchrun and the like, which may start a process again before its predecessor is quite gone. With
            several machines a second, in which a process of the same run writes who it is.

    Raises:
        ConfigError: another process has it.
        MachineError: the file cannot be made, or not be locked although there are locks.
    """
    if not rank_0_is_here(config):
        yield
        return
    path = Path(str(config.run.run_dir)) / ".lock"
    meeting = _meeting(config)
    if patience_s is None:
        patience_s = 5.0 if worlds.placement() is not None else 1.0 if meeting else 0.0
    lock = _locked(path, time.monotonic() + patience_s, meeting)
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(lock)


def _meeting(config: TrainConfig) -> str:
    """Return where and under which id the machines of the run meet; nothing for a run of one machine."""
    process = config.process
    if worlds.placement() is not None or process.rdzv_endpoint is None:
        return ""
    where = machines.machines_of(process.nnodes, process.rdzv_endpoint, process.rdzv_id)
    return "" if where is None or where.most == 1 else f"{where.endpoint} {where.run_id}"


def _locked(path: Path, deadline: float, meeting: str) -> int | None:
    """Return the descriptor of a file that this process has locked.

    None where there are no locks, and where a process of the same meeting has it.
    """
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise MachineError(
                f"cannot write {path}: {error.strerror}. Without it two runs could mix their checkpoints. "
                "Correct the permissions, or choose another directory with --run-dir."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, note = os.read(lock, 4096).decode(errors="replace").strip().partition(" ")
            host, _, theirs = note.partition(" ")
            if meeting and meeting == theirs:
                os.close(lock)
                return None
            if time.monotonic() >= deadline:
                os.close(lock)
                raise ConfigError(
                    f"run directory {path.parent} is in use by process {pid or '(unknown)'} on host "
                    f"{host or '(unknown)'}: two runs in it would remove each other's checkpoints and mix "
                    "their metrics. Wait for its end, or choose another --run-dir."
                ) from None
            time.sleep(0.1)
        except OSError as error:
            os.close(lock)
            if error.errno in _NO_LOCKS:
                return None
            raise MachineError(
                f"cannot lock {path}: {error.strerror}. Without it two runs could mix their checkpoints. "
                "Choose another directory with --run-dir."
            ) from None
        else:
            # Its owner removes it at the end, perhaps between the opening and the locking.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
                        os.truncate(lock, 0)
                        os.write(lock, f"{os.getpid()} {socket.gethostname()} {meeting}\n".encode())
                    return lock
        os.close(lock)
