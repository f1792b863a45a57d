"""How glibc's malloc treats large blocks in a worker.

A training step frees and asks again for the same few hundred megabytes. By default glibc gives blocks above a
threshold back to the kernel at once, and every new one is filled with zeros page by page: up to 400,000 page
faults in 50 steps of a small network. Kept by the process, they cost nothing.
"""

from __future__ import annotations

import ctypes
import sys

# The parameters' numbers in glibc's malloc.h, and the values that keep pages.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_KEPT_BYTES = 1 << 30
_PAD_BYTES = 16 << 20


def keep_pages() -> bool:
    """Let this process keep the memory it frees, for its next allocations.

    Returns:
        Whether the C library is one that can be told so (glibc); elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    values = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _PAD_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in values)
