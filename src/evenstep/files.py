"""Files written whole or not at all, and onto the disk itself."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have a file or a directory written to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str, *, on_disk: bool = False) -> None:
    """Write a file under another name first, so that a reader finds the old one or the new one.

    Args:
        path: the file.
        text: its whole content.
        on_disk: also have it on the disk before it takes the name, so that a machine that loses its power
            leaves no empty file.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if on_disk:
            flush(temporary)
        temporary.replace(path)
        if on_disk:
            flush(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
