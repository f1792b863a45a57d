"""The commands ``evenstep report`` and ``evenstep watch``. Neither imports torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from evenstep import report
from evenstep.errors import ConfigError
from evenstep.flags import scan_flags
from evenstep.watch import Watcher

Runs = Annotated[tuple[str, ...], tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write the report of a run, or a page that compares several."""

    runs: Runs
    """Directories of runs."""
    output: str | None = None
    """The file. Default: report.html in the run directory; for several runs, in the current directory."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Show the report of a run, or of several, in a browser and keep it up to date, on this machine only."""

    runs: Runs
    """Directories of runs."""
    port: int = 0
    """Port on 127.0.0.1. 0: any free one."""


Options = TypeVar("Options", ReportOptions, WatchOptions)


def write_report(argv: Sequence[str]) -> int:
    """Run ``evenstep report RUN [RUN...] [--output FILE]``."""
    asked = _parse(ReportOptions, argv, "evenstep report", ("output",))
    if asked.output is not None:
        path = Path(asked.output)
    else:
        path = (Path(asked.runs[0]) if len(asked.runs) == 1 else Path()) / report.REPORT
    _say(str(report.write_page(asked.runs, path)))
    return 0


def watch(argv: Sequence[str]) -> int:
    """Run ``evenstep watch RUN [RUN...] [--port N]`` until Ctrl-C."""
    asked = _parse(WatchOptions, argv, "evenstep watch", ("port",))
    with Watcher(asked.runs, asked.port) as server:
        _say(f"{server.url}  (Ctrl-C ends it; the run goes on)")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            _say("")
    return 0


def _parse(options: type[Options], argv: Sequence[str], prog: str, keys: Sequence[str]) -> Options:
    """Return the options of a command line; errors as ``evenstep.options.parse``."""
    words: list[str] = []
    runs: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        is_value = before.startswith("--") and "=" not in before
        (words if word.startswith("-") or is_value else runs).append(word)
    if "-h" not in words and "--help" not in words:
        scan_flags(words, dict.fromkeys(keys, False), prog)
        if not runs:
            raise ConfigError(
                f"{prog} needs the directory of a run, and got none. Use `{prog} RUN`, with the directory "
                "that evenstep train named (runs/DATE-TIME-MODEL, or its --run-dir)."
            )
    return tyro.cli(options, args=[*runs, *words], prog=prog)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
