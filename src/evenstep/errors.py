"""Everything evenstep raises on purpose, with the exit code that the command gives for it.

A message has three parts: what is wrong (with the actual and the expected value), why it matters, and what
to do (with the literal flag).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EvenstepError(Exception):
    """The root of all errors that evenstep raises on purpose."""

    exit_code = 1


class ConfigError(EvenstepError):
    """An option, a config key or an argument is wrong (exit code 2)."""

    exit_code = 2


class MachineError(EvenstepError):
    """The machine cannot do what was asked: no GPU, a taken port, an unwritable directory (exit code 3)."""

    exit_code = 3


class MemoryExhaustedError(MachineError):
    """Memory ran out on a GPU or in the machine; the message says who holds it (exit code 3)."""


class DataError(EvenstepError):
    """The data are damaged or cannot be had; the message names the file (exit code 3)."""

    exit_code = 3


class CheckpointError(EvenstepError):
    """A checkpoint is missing, damaged or does not fit (exit code 4)."""

    exit_code = 4


class DivergedError(EvenstepError):
    """The loss or the gradient is not a finite number any more (exit code 5)."""

    exit_code = 5


class DriftError(EvenstepError):
    """The processes hold different weights, which must never be (exit code 5)."""

    exit_code = 5


class StoppedError(EvenstepError):
    """The run was asked to stop, saved its state and can be resumed (exit code 75)."""

    exit_code = 75

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of the traceback, which would be launch's own."""
        return [f"{type(self).__name__}: {self}"]


class WorkerError(EvenstepError):
    """A worker failed; carries the report of the first failure.

    Attributes:
        exit_code: the worker's own exit code, or 1, or 128+N after a death by signal N.
        rank: the rank that failed first, or None if it is not known.
    """

    def __init__(self, message: str, *, exit_code: int = 1, rank: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of the traceback: the report, which has the user's line."""
        return [f"{type(self).__name__}: {self}"]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest choice, or an empty string if nothing is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
