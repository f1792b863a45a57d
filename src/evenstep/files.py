"""Files written whole or not at all, and onto the disk itself; values as JSON that every reader takes."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """Return a value of mappings, lists and numbers with None for NaN and infinity, which JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON; what is no finite number is null.

    ``json.dumps`` writes ``NaN``, which is no JSON: jq, JavaScript and others refuse it.
    """
    return json.dumps(finite(value), indent=indent, allow_nan=False)


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
