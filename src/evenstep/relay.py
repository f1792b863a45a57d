"""What workers print, shown where this process prints.

Workers inherit the file descriptors 1 and 2. In a notebook, and under ``contextlib.redirect_stdout``,
``sys.stdout`` leads elsewhere. Then the workers print into a named pipe in the run's private directory, and a
thread of this process passes on what comes out of it, as it comes: also what C code and child processes of
the workers write.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

_NUMBERS = {"stdout": 1, "stderr": 2}
# A process that main has started and left behind may hold the pipe for ever.
_LINGER_S = 1.0


def led_elsewhere() -> dict[str, Any]:
    """Return those of ``sys.stdout`` and ``sys.stderr``, by name, that do not write to descriptor 1 or 2."""
    streams = {name: getattr(sys, name) for name in _NUMBERS}
    return {
        name: stream
        for name, stream in streams.items()
        if stream is not None and not _writes_to(stream, _NUMBERS[name])
    }


def _writes_to(stream: Any, number: int) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.fstat(number))
    except (AttributeError, OSError, ValueError):  # it has no descriptor at all
        return False


class Relay:
    """The launching process's end.

    Args:
        directory: the private directory of the run.

    Attributes:
        names: ``stdout`` and ``stderr``, as far as they lead elsewhere: for these there is a pipe.
    """

    def __init__(self, directory: str) -> None:
        self._writers: list[int] = []
        self._threads: list[threading.Thread] = []
        streams = led_elsewhere()
        self.names = tuple(streams)
        for name, stream in streams.items():
            path = os.path.join(directory, name)
            os.mkfifo(path, 0o600)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            # Ours; without it the pipe would be at its end whenever no worker lives, as between two starts.
            self._writers.append(os.open(path, os.O_WRONLY))
            os.set_blocking(reader, True)
            # In the context of this call, by which a notebook knows the cell where it shows what is written.
            run = contextvars.copy_context().run
            thread = threading.Thread(
                target=run, args=(_pass_on, reader, stream), name=f"evenstep-{name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait until all is shown that the workers, which have ended, have printed."""
        while self._writers:
            os.close(self._writers.pop())
        for thread in self._threads:
            thread.join(_LINGER_S)


def attach(directory: str, names: Iterable[str]) -> None:
    """Have this process, a worker, print into the pipes.

    Args:
        directory: the private directory of the run.
        names: those of a :class:`Relay`.
    """
    for name in names:
        old: Any = getattr(sys, name)
        if old is None:
            continue
        old.flush()
        with contextlib.suppress(OSError):  # the launching process has just died, and so will this one
            # Without O_NONBLOCK it would wait for a reader.
            pipe = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(pipe, True)
            os.dup2(pipe, _NUMBERS[name])
            os.close(pipe)
            # By lines, as in a terminal: otherwise they would come when 8 kB are full. Whole ones, also with
            # PYTHONUNBUFFERED, so that two workers do not write into each other's.
            new = open(_NUMBERS[name], "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, new)


def _pass_on(reader: int, stream: Any) -> None:
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with open(reader, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            # Whatever the stream raises, there is nobody to tell; with nobody reading, the workers would end.
            with contextlib.suppress(Exception):
                stream.write(decode(data))
                stream.flush()
