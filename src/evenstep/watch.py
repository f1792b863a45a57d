"""``evenstep watch``: the report of a run as a page that follows it, on this machine only.

The server of Python's standard library is enough: one page and one JSON object, for one person. The page asks
for the object once a second, and gets an empty answer (304) while nothing has changed.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep import report
from evenstep.errors import MachineError

HOST = "127.0.0.1"


class Watcher(http.server.ThreadingHTTPServer):
    """Serves the page of some runs on the loopback interface. A context manager, which closes the socket.

    Args:
        run_dirs: the runs.
        port: the port; 0 for any free one.

    Raises:
        ConfigError: one of them is not a run.
        MachineError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[str | Path], port: int = 0) -> None:
        self.run_dirs = [Path(run_dir) for run_dir in run_dirs]
        for run_dir in self.run_dirs:
            report.check_run(run_dir)
        self._lock = threading.Lock()
        self._tag = ""
        self._runs: list[dict[str, Any]] = []
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise MachineError(
                f"cannot listen on port {port} of {HOST}: {reason}. Choose another with --port N, or leave "
                "--port out for a free one."
            ) from None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def runs(self) -> tuple[str, list[dict[str, Any]]]:
        """Return a tag and what the page shows now; with an unchanged tag the files are not read again."""
        with self._lock:
            tag = ",".join(_tag(run_dir) for run_dir in self.run_dirs)
            if tag != self._tag:
                self._runs = [report.collect(run_dir) for run_dir in self.run_dirs]
                self._tag = tag
            return f'"{self._tag}"', self._runs


def _tag(run_dir: Path) -> str:
    names = (report.METRICS, report.RESULT, report.EVALUATION, report.SOURCES, "config.toml", "checkpoints")
    parts = []
    for name in names:
        try:
            state = (run_dir / name).stat()
        except OSError:
            continue
        parts.append(f"{state.st_mtime_ns:x}.{state.st_size:x}")
    return "-".join(parts)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Watcher

    def do_GET(self) -> None:
        # A page of elsewhere whose name was made to point here has its own name as the host.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            self._answer(403, "text/plain", "This page is for this machine only.\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._answer(404, "text/plain", "There is / and /data.json.\n")
            return
        tag, runs = self.server.runs()
        if path == "/":
            self._answer(200, "text/html", report.render(runs, live=True))
        elif self.headers.get("If-None-Match") == tag:
            self._answer(304, "application/json", "", tag)
        else:
            self._answer(200, "application/json", report.to_json({"runs": runs}), tag)

    def _answer(self, code: int, kind: str, text: str, tag: str | None = None) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line a second is no news."""
