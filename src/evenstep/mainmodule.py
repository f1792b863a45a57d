"""The module ``__main__`` of the launching process, which the workers must not import."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from collections.abc import Iterator

_SPEC_LOCK = threading.Lock()


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Keep the workers from importing this process's ``__main__`` while they are started.

    multiprocessing has each child run the parent's main script again under another name. That fails for
    standard input and notebooks, and for a script that calls launch without a guard it would launch from
    within each worker. Here nothing needs it: main travels by value. multiprocessing leaves a main module
    alone whose spec is named ``*.__main__`` (as with ``python -m package``), so it gets such a spec for the
    time being.
    """
    main = sys.modules["__main__"]
    with _SPEC_LOCK:
        spec = getattr(main, "__spec__", None)
        if not isinstance(spec, _HiddenSpec):
            spec = main.__spec__ = _HiddenSpec(spec)
        spec.uses += 1
    try:
        yield
    finally:
        with _SPEC_LOCK:
            spec.uses -= 1
            if spec.uses == 0:
                main.__spec__ = spec.original


class _HiddenSpec(importlib.machinery.ModuleSpec):
    def __init__(self, original: importlib.machinery.ModuleSpec | None) -> None:
        super().__init__("evenstep.__main__", None)
        self.original = original
        self.uses = 0
