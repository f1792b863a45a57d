"""``report.html``: a run, or several side by side, as one page that opens offline and loads nothing.

The page is a fixed script and style (``page/``, with the plotting library uPlot) around one JSON object,
which :func:`collect` gathers from the files of a run directory. So it can be made again at any time, from a
run that is going on too, and ``evenstep watch`` serves the same object to the same page. No torch here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep import files
from evenstep.config import TrainConfig
from evenstep.errors import ConfigError, EvenstepError, MachineError
from evenstep.flat import field_groups, from_flat, read_toml, to_flat

REPORT = "report.html"
SOURCES = "sources.json"
RESULT = "result.json"
EVALUATION = "evaluation.json"
METRICS = "metrics.jsonl"
MAX_POINTS = 1500
"""Points a curve; of more steps the means of neighbours are shown."""


def collect(run_dir: str | Path) -> dict[str, Any]:
    """Return all that the page shows of one run, as values that JSON can hold.

    Files that are not there yet, or were cut off by a crash, are left out.

    Raises:
        ConfigError: ``run_dir`` is not the directory of a run.
    """
    path = Path(run_dir)
    check_run(path)
    lines = list(_lines(path / METRICS))
    starts, timed = _on_one_clock(lines)
    newest: Mapping[str, Any] = starts[-1] if starts else {}
    last = timed[-1] if timed else {}
    result = _json(path / RESULT)
    checkpoints = _checkpoints(path)
    return {
        "name": path.resolve().name,
        "path": str(path),
        "finished": bool(result),
        "step": last.get("step", 0),
        "epoch": last.get("epoch", 0),
        "updated": _mtime(path / METRICS),
        "facts": {k: newest[k] for k in ("data", "num_parameters", "total_steps") if k in newest},
        "starts": starts,
        "train": _columns(timed, "train"),
        "eval": _columns(timed, "eval"),
        "times": _times(lines),
        "evaluation": _json(path / EVALUATION) or None,
        "config": _config(path, checkpoints),
        "numerics": result.get("numerics") or _newest(checkpoints, "numerics"),
        "result": {key: value for key, value in result.items() if key != "numerics"},
        "checkpoints": [{k: v for k, v in c.items() if k != "meta"} for c in checkpoints],
    }


def check_run(run_dir: Path) -> None:
    """Raise ConfigError unless a directory is that of a run."""
    if not any((run_dir / name).exists() for name in ("config.toml", METRICS, "checkpoints")):
        what = "has neither config.toml nor metrics.jsonl" if run_dir.is_dir() else "is not a directory"
        raise ConfigError(
            f"{run_dir} {what}, so it is not a run and there is nothing to show. Give the directory that "
            "evenstep train named (runs/DATE-TIME-MODEL, or its --run-dir)."
        )


def render(runs: Sequence[Mapping[str, Any]], *, live: bool = False) -> str:
    """Return the page.

    Args:
        runs: what :func:`collect` gave, one for the report of a run, several for a comparison.
        live: whether the page asks its server for news (``evenstep watch``).
    """
    data = {"runs": list(runs), "live": live, "version": importlib.metadata.version("evenstep")}
    parts = {
        "TITLE": "evenstep: " + ", ".join(str(run["name"]) for run in runs),
        "CONNECT": "'self'" if live else "'none'",
        "STYLE": _asset("uplot.css") + _asset("report.css"),
        "LIBRARY": _asset("uplot.js"),
        "SCRIPT": _asset("report.js"),
        "DATA": to_json(data),
    }
    parts["TITLE"] = parts["TITLE"].replace("&", "&amp;").replace("<", "&lt;")
    pieces = _asset("report.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def to_json(data: Any) -> str:
    """Return JSON that can stand inside a script element whatever strings are in it."""
    return json.dumps(files.finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run directory, whole or not at all, and return its path.

    Raises:
        ConfigError: it is not the directory of a run.
        MachineError: the file cannot be written.
    """
    return write_page([run_dir], Path(run_dir) / REPORT)


def write_page(run_dirs: Sequence[str | Path], output: Path) -> Path:
    """Write the page of one run, or the comparison of several, to ``output``; errors as :func:`write`."""
    text = render([collect(run_dir) for run_dir in run_dirs])
    write_whole(output, text)
    return output


def write_whole(path: Path, text: str) -> None:
    """Write a file of the report, whole or not at all.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        files.write_whole(path, text)
    except OSError as error:
        raise MachineError(
            f"cannot write {path}: {error.strerror}. The numbers are safe in {METRICS}. Free some space or "
            "correct the permissions, or write it elsewhere with evenstep report RUN --output FILE."
        ) from None


class Refresher:
    """Writes a run's report again and again, in at most a hundredth of the time.

    A failure is told once and never stops the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / REPORT
        self.error: EvenstepError | None = None
        self._run_dir = run_dir
        self._not_before = 0.0

    def refresh(self, *, at_last: bool = False) -> None:
        """Write the report, unless the last time was too short ago and this is not the last one."""
        begun = time.perf_counter()
        if begun < self._not_before and not at_last:
            return
        try:
            write(self._run_dir)
            self.error = None
        except EvenstepError as error:
            self.error = error
        now = time.perf_counter()
        self._not_before = now + 100 * (now - begun)


def _asset(name: str) -> str:
    return (importlib.resources.files("evenstep") / "page" / name).read_text(encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def _mtime(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):  # cut off by a crash, or still being written
                value = json.loads(line)
                if isinstance(value, dict) and "kind" in value and isinstance(value.get("step"), int):
                    yield value


def _on_one_clock(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the starts, and the other lines with ``t``: seconds of running time since the first start.

    ``wall_s`` begins at 0 with each start. A restart after a failure follows on by the clock, so that the
    time that was lost is seen; between the end of a run and ``--resume`` no time passes.
    """
    starts: list[dict[str, Any]] = []
    others = []
    offset = latest = before = began = 0.0
    for line in lines:
        wall_s = float(line.get("wall_s") or 0.0)
        if line["kind"] == "start" or wall_s < before:
            time_s = float(line.get("time") or 0.0)
            restarted = bool(line.get("restart")) and bool(starts)
            offset = max(latest, offset + time_s - began) if restarted else latest
            began, latest = time_s, offset
            starts.append({**line, "kind": "start", "t": offset, "resumed": bool(starts) and not restarted})
        before, latest = wall_s, max(latest, offset + wall_s)
        if line["kind"] != "start":
            others.append({**line, "t": offset + wall_s})
    return starts, others


def _columns(lines: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[Any]]:
    """Return the numbers of one kind of line, a list for each key, one entry a step, thinned out."""
    by_step = {line["step"]: line for line in lines if line["kind"] == kind}
    rows = [by_step[step] for step in sorted(by_step)]
    keys = [k for k in dict.fromkeys(itertools.chain(*rows)) if k not in ("kind", "wall_s")]
    every = -(-len(rows) // MAX_POINTS) or 1
    groups = [rows[i : i + every] for i in range(0, len(rows), every)]
    return {
        key: [
            group[-1].get(key) if key in ("step", "epoch", "t") else _mean([row.get(key) for row in group])
            for group in groups
        ]
        for key in keys
    }


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    if not numbers:
        return None
    return numbers[0] if len(numbers) == 1 else float(f"{sum(numbers) / len(numbers):.6g}")


def _times(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the time of each rank, of the last start that has any: ranks may change between starts."""
    found = None
    for line in lines:
        if line["kind"] == "time":
            found = {key: line.get(key) for key in ("steps", "data_s", "step_s", "wait_s", "wall_s")}
    return found


def _checkpoints(run_dir: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(run_dir.glob("checkpoints/step-*/manifest.json")):
        manifest = _json(path)
        files = manifest.get("files", {})
        if path.parent.suffix != ".replaced" and "step" in manifest:
            found.append(
                {
                    "name": path.parent.name,
                    "step": manifest["step"],
                    "score": manifest.get("score"),
                    "num_bytes": sum(entry.get("bytes", 0) for entry in files.values()),
                    "sha256": files.get("model.safetensors", {}).get("sha256"),
                    "meta": manifest.get("meta", {}),
                }
            )
    return found


def _newest(checkpoints: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    return dict(checkpoints[-1]["meta"].get(key) or {}) if checkpoints else {}


def _config(run_dir: Path, checkpoints: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return [key, value, source, group] of every option; of a run without config.toml, what is known."""
    sources = _json(run_dir / SOURCES)
    groups = field_groups()
    try:
        values = to_flat(from_flat(read_toml(run_dir / "config.toml")))
    except EvenstepError:
        values = _newest(checkpoints, "config")
    defaults = to_flat(TrainConfig())
    return [
        [key, value, sources.get(key) or ("default" if value == defaults.get(key) else "not recorded"), group]
        for key, group in groups.items()
        for value in [values.get(key)]
        if values and key not in ("run_dir", "resume")
    ]
