"""Log files: one per process of a run, written by loguru. Importing this installs nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from evenstep.errors import ConfigError

FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <8} | {who} | {name}:{line} | {message}"
CONSOLE_FORMAT = "[{who}] {level}: {message}"
_LAUNCHER = "evenstep.launcher"


def path_of(run_dir: str | Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def moment(name: str, *, launching: bool = False) -> None:
    """Write into the log file, at level DEBUG, that this process has come so far.

    ``benchmarks/recovery.py --trace`` makes a time line of these. Where the level is higher it costs about a
    microsecond.

    Args:
        name: what it has come to.
        launching: this is the launching process, where Loguru's handlers are the user's: it goes to
            :func:`launcher`'s file. Otherwise to that of this worker, with its CPU time.
    """
    if launching:
        logging.getLogger(_LAUNCHER).debug("moment: %s", name)
    else:
        logger.opt(depth=1).debug("moment: {} ({:.1f} ms of CPU time)", name, time.process_time() * 1e3)


def check_rotation(rotation: str) -> None:
    """Raise ConfigError if loguru does not understand ``rotation``, before any process is started."""
    try:
        logger.remove(logger.add(os.devnull, rotation=rotation, delay=True))
    except ValueError as error:
        raise ConfigError(
            f"log_rotation is {rotation!r}, which no log file can follow ({error}). Give a time of day, a "
            "size or an age, for example --log-rotation 12:00, '10 MB' or '1 week'."
        ) from None


@contextlib.contextmanager
def setup(
    run_dir: str | Path | None,
    rank: int,
    *,
    level: str = "INFO",
    rotation: str = "12:00",
    diagnose: bool = False,
    console: bool = True,
    exclusive: bool = False,
) -> Iterator[None]:
    """Send what loguru is told to the log file of this process inside a ``with`` block.

    Each process has a file of its own, in UTF-8, opened for appending, so lines of several processes never
    mix and need no queue.

    Args:
        run_dir: the run's directory; None for no file.
        rank: this process's rank.
        level: the least severe level that goes into the file.
        rotation: when the file is rotated, in loguru's notation: ``12:00``, ``10 MB``, ``1 week``.
        diagnose: write the values of variables into tracebacks; they may hold secrets.
        console: also print warnings and errors on stderr, as ``[rank 1] WARNING: ...``, except what is
            logged with ``logger.bind(file_only=True)``.
        exclusive: remove the handlers that are there, among them loguru's own on stderr. For a process that
            is ours from start to end.
    """
    who = f"rank {rank}"
    if exclusive:
        logger.remove()
    numbers: list[int] = []
    try:
        if run_dir is not None:
            numbers.append(
                logger.add(
                    path_of(run_dir, rank),
                    format=FORMAT.replace("{who}", who),
                    level=level,
                    rotation=rotation,
                    encoding="utf8",
                    backtrace=True,
                    diagnose=diagnose,
                )
            )
        if console:
            numbers.append(
                logger.add(
                    sys.stderr,
                    format=CONSOLE_FORMAT.replace("{who}", who),
                    level="WARNING",
                    filter=lambda record: not record["extra"].get("file_only"),
                    colorize=False,
                    backtrace=False,
                    diagnose=False,
                )
            )
        with _unraisable_logged() if exclusive else contextlib.nullcontext():
            yield
    finally:
        for number in numbers:
            with contextlib.suppress(ValueError):  # the user's own logger.remove() took it already
                logger.remove(number)


@contextlib.contextmanager
def _unraisable_logged() -> Iterator[None]:
    """Log the errors that Python only prints, because nobody could catch them, such as one in ``__del__``."""
    before = sys.unraisablehook

    def hook(args: sys.UnraisableHookArgs) -> None:
        text = f"{args.err_msg or 'Exception ignored in'} {args.object!r:.200}"
        exception = (args.exc_type, args.exc_value, args.exc_traceback)
        logger.bind(file_only=True).opt(exception=exception).warning("{}", text)
        before(args)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def launcher(run_dir: str | Path | None) -> Iterator[logging.Logger]:
    """Send what torch's agent says to ``logs/launcher.log`` inside a ``with`` block, and keep it off stderr.

    Args:
        run_dir: the run's directory; None for no file.

    Yields:
        A logger of the standard library for that file. Loguru's handlers in the launching process are the
        user's, so the launcher's own file does without it.
    """
    handler: logging.Handler = logging.NullHandler()
    if run_dir is not None:
        path = Path(run_dir) / "logs" / "launcher.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf8")
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)-8s | %(name)s | %(message)s"))
    names = ("torch.distributed.elastic", "torch.multiprocessing.spawn", _LAUNCHER)
    loggers = [logging.getLogger(name) for name in names]
    before = [each.propagate for each in loggers]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield loggers[-1]
    finally:
        for each, propagate in zip(loggers, before, strict=True):
            each.removeHandler(handler)
            each.propagate = propagate
        handler.close()
