"""Huge pages for the memory of the fork server, so that a fork of it, and the end of one, takes little time.

A fork copies the page table, and the end of a process takes it apart again: 90,000 pages of 4 KiB once torch
is imported, about 20 ms each on two slow cores. The same memory in pages of 2 MiB is 160 entries, and 3 ms.
What a worker then changes is copied in pages of 4 KiB, as before.

The workers that live already keep the old pages, so until they end the machine holds the fork server's memory
twice (about 320 MB more). It is not done where that would be much of what is free.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path

AFTER_S = 20.0
"""From the first fork on: it takes a second or more of one core, which a short run need not pay."""
_SLICE_S = 0.01
_PAUSE_S = 0.03
_MADV_COLLAPSE = 25
_HUGE = 1 << 21
_TIMES = 8
"""How many times as much memory must be free as will be held twice."""
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 ")
_CGROUP = Path("/sys/fs/cgroup")


def collapse_when_idle() -> None:
    """Have the memory of this process collapsed some seconds after its first fork, once.

    A timer's signal does it, a hundredth of a second at a time: a thread would make forking dangerous, and a
    fork that is asked for meanwhile waits no longer than that. Does nothing where there is no such call.
    """
    if sys.platform != "linux":
        return
    owner = os.getpid()
    left: list[int] | None = None
    is_armed = False

    def work(*_: object) -> None:
        nonlocal left
        if left is None:
            left = ranges()
            if not is_room_for(len(left) * _HUGE):
                left = []
        end = time.monotonic() + _SLICE_S
        while left and time.monotonic() < end:
            collapse(left.pop())
        if left:
            signal.setitimer(signal.ITIMER_REAL, _PAUSE_S)

    def forked() -> None:
        nonlocal is_armed
        if os.getpid() == owner and not is_armed:
            is_armed = True
            signal.setitimer(signal.ITIMER_REAL, AFTER_S)

    def in_child() -> None:
        if os.getppid() == owner:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    signal.signal(signal.SIGALRM, work)
    # At the end Python takes its handlers off, and the signal would end the process.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
    os.register_at_fork(after_in_parent=forked, after_in_child=in_child)


def ranges() -> list[int]:
    """Return the addresses of all 2 MiB of this process's private anonymous memory that could be one page."""
    found: list[int] = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        for match in filter(None, map(_LINE.match, file)):
            low, high = int(match[1], 16), int(match[2], 16)
            found += range(-(-low // _HUGE) * _HUGE, high // _HUGE * _HUGE, _HUGE)
    return found


def collapse(address: int) -> bool:
    """Put 2 MiB of memory into one page; False if the kernel (before Linux 6.1) or the machine cannot."""
    madvise = ctypes.CDLL(None).madvise
    result: int = madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)
    return result == 0


def is_room_for(num_bytes: int) -> bool:
    """Return whether many times as much memory is free, on the machine and in this control group."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = min(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        limit = _CGROUP / "memory.max"
        if limit.exists() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
            free = min(free, int(text) - int((_CGROUP / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return False
    return free >= _TIMES * num_bytes
