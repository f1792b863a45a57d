"""The outside world held still: a stopped clock, and entropy that is the same each time."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_CLOCKS: tuple[tuple[str, Any], ...] = (
    ("time", 1.5e9),
    ("time_ns", 1_500_000_000_000_000_000),
    ("perf_counter", 1.0),
    ("perf_counter_ns", 1_000_000_000),
    ("process_time", 1.0),
)


@contextlib.contextmanager
def stopped_clock(homes: list[Any]) -> Iterator[None]:
    """Make the functions of ``time`` return the same moment, there and where they were imported from it.

    ``time.monotonic`` goes on, since timeouts hang on it; so does ``datetime``, which cannot be replaced.

    Args:
        homes: modules that may have done ``from time import time``.
    """
    with contextlib.ExitStack() as stack:
        for name, value in _CLOCKS:
            stack.enter_context(_replaced(time, name, lambda value=value: value, homes))
        yield


@contextlib.contextmanager
def fixed_entropy(homes: list[Any]) -> Iterator[None]:
    """Make the system's entropy the same in each block: os.urandom, SystemRandom, secrets, numpy's seeds.

    Args:
        homes: modules that may have done ``from os import urandom``.
    """
    source = random.Random(0)
    system = random.SystemRandom
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(os, "urandom", source.randbytes, homes))
        stack.enter_context(_replaced(secrets, "randbits", source.getrandbits, homes))
        for name in ("random", "getrandbits"):
            stack.enter_context(unittest.mock.patch.object(system, name, _method(getattr(source, name))))
        bits: Any = np.random.bit_generator
        if hasattr(bits, "randbits"):
            stack.enter_context(unittest.mock.patch.object(bits, "randbits", source.getrandbits))
        source.seed(0)  # what was imported on the way here may have drawn from it
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(*args)


@contextlib.contextmanager
def _replaced(module: Any, name: str, new: Any, homes: list[Any]) -> Iterator[None]:
    old = getattr(module, name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(module, name, new))
        for home in homes:
            for key, value in list(vars(home).items()):
                if value is old:
                    stack.enter_context(unittest.mock.patch.object(home, key, new))
        yield


def home_of(*things: Any) -> list[Any]:
    """Return the modules in which some classes or functions are defined."""
    names = {getattr(thing, "__module__", None) for thing in things}
    return [sys.modules[name] for name in names if name in sys.modules]
