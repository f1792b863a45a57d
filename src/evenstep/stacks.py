"""The Python stack of another process, while it runs or hangs: asked for with a signal, without its help.

The handler of the signal is faulthandler's, in C: it writes the stacks of all threads into a file of the
process, whatever its main thread does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from evenstep import failure
from evenstep.failure import Frame

SIGNAL = signal.SIGUSR2
"""Asks a process for its stacks. SIGUSR1 has a meaning already: stop and save (Slurm sends it)."""

_ANSWER_S = 2.0
_STILL_S = 0.02
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def stack_file(directory: str | Path, rank: int, restart: int) -> Path:
    """Return the file into which a process writes its stacks."""
    return Path(directory) / f"stacks-{restart}-{rank}.txt"


@contextlib.contextmanager
def answering(directory: str | Path, rank: int, restart: int) -> Iterator[None]:
    """Answer the question for this process's stacks inside a ``with`` block.

    Does nothing where there is no such signal. A handler that main sets for it replaces ours.
    """
    with open(stack_file(directory, rank, restart), "a", encoding="utf8") as file:
        file.write(f"main {threading.main_thread().ident or 0:#x}\n")
        file.flush()
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        try:
            yield
        finally:
            # Ignored rather than back to the default, which would end the process: a question may be on
            # its way to it.
            faulthandler.unregister(SIGNAL)
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(SIGNAL, signal.SIG_IGN)


def ask(pid: int, path: Path) -> tuple[tuple[Frame, ...], str]:
    """Ask a process for the stack of its main thread.

    Args:
        pid: the process, or a child that it has forked.
        path: the file that the process writes into.

    Returns:
        The frames, the innermost first; and if there are none, why.
    """
    state = state_of(pid)
    if state in ("T", "t"):
        return (), "the process is stopped (SIGSTOP; `kill -CONT` lets it go on)"
    if not path.exists() or not _catches(pid):
        return (), "it does not answer for its stack"
    before = path.stat().st_size
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return (), "the process has ended"
    end = time.monotonic() + _ANSWER_S
    size = before
    while time.monotonic() < end:
        time.sleep(_STILL_S)
        last, size = size, path.stat().st_size
        if size > before and size == last:
            break
    with open(path, encoding="utf8", errors="replace") as file:
        header = file.readline()
        file.seek(before)
        frames = parse(file, int(header.split()[1], 16))
    if frames:
        return frames, ""
    if state == "D":
        return (), "the process waits in the kernel, for a disk or a network file system"
    return (), "it did not answer for its stack"


def parse(lines: IO[str] | Sequence[str], main: int) -> tuple[Frame, ...]:
    """Return the frames of a thread from what faulthandler wrote, the innermost first.

    Args:
        lines: the lines of one answer.
        main: the thread's number.
    """
    frames: list[Frame] = []
    is_main = False
    for line in lines:
        if thread := _THREAD.match(line.rstrip()):
            is_main = int(thread[1], 16) == main
        elif is_main and (found := _FRAME.match(line.rstrip())):
            frames.append(Frame(found[1], int(found[2]), found[3], "", failure.is_user(found[1])))
            if found[3] == "entry" and failure.is_own(found[1]):
                break  # further out there is only how the process was started
    return tuple(frames)


def state_of(pid: int) -> str:
    """Return the letter of a process's state; Z for none, ? where it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z" if os.path.exists("/proc/self/stat") else "?"
    except OSError:
        return "Z"


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for the signal: without one it would end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return not os.path.exists("/proc/self/status")
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, where /proc tells."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
