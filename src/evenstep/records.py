"""The small files of a run directory: config.toml, where its values come from, and metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from evenstep import report
from evenstep.config import TrainConfig
from evenstep.errors import MachineError
from evenstep.files import write_whole
from evenstep.flat import from_flat, write_toml
from evenstep.world import World


def save_config(config: TrainConfig, run_dir: Path, world: World | None = None) -> None:
    """Write ``config.toml`` into the run directory, whole or not at all.

    Args:
        config: the options. Where the directory is and how it was opened stay out of the file, so that
            ``--config`` can start another run from it.
        run_dir: the run's directory.
        world: where it is known, its lanes and, in exact mode, threads go in: a resumed run keeps them.
    """
    fixed: dict[str, Any] = {"run_dir": None, "resume": False}
    if world is not None:
        fixed["lanes"] = world.lanes
        if world.mode == "exact":  # in fast mode they follow the number of processes
            fixed["threads"] = world.threads
    # The disk is slow, and after a restart the file is there already.
    on_disk = world is None or not world.restart
    with _write_errors(run_dir):
        write_whole(run_dir / "config.toml", write_toml(from_flat(fixed, config)), on_disk=on_disk)


def save_sources(sources: Mapping[str, str], run_dir: Path) -> None:
    """Write where each option's value comes from; those of a resumed run keep the source they had."""
    path = run_dir / report.SOURCES
    kept = {}
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
    known = {k: kept.get(k, source) if source == "run directory" else source for k, source in sources.items()}
    with _write_errors(run_dir):
        write_whole(path, json.dumps(known, indent=1) + "\n", on_disk=True)


@contextlib.contextmanager
def _write_errors(run_dir: Path) -> Iterator[None]:
    """Turn the errors of writing the files that a run begins with into a MachineError."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot write into the run directory {run_dir}: {error}. Checkpoints, logs and metrics go "
            "there. Free some space or correct the permissions, or choose another place with --run-dir."
        ) from error


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, which reads as one run however often it was resumed.

    Opening it drops lines of steps that will be reported again, and a line that a crash cut off.

    Args:
        path: the file.
        start_step: the steps that are committed; those after it will be done again.
        repeats: how many of the committed steps will be reported again.
    """

    def __init__(self, path: Path, start_step: int, repeats: int = 0) -> None:
        kept = []
        # A byte that a damaged disk has changed spoils its own line, not the run.
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(line)
                # A start is not done again.
                if start_step and found["step"] <= start_step - repeats * (found["kind"] != "start"):
                    kept.append(line + "\n")
        self._failed = False
        with _write_errors(path.parent):
            write_whole(path, "".join(kept))
            self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line, at once. Numbers that JSON cannot hold (NaN, infinity) become null.

        If it cannot be written, a warning says so, once, and the run goes on.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._failed:
                logger.warning("metrics are missing from here on in {}: {}", self._file.name, error)
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what could not be written has been told of
            self._file.close()


def start_line(world: World, *, step: int, epoch: int, **facts: Any) -> dict[str, Any]:
    """Return the line of metrics.jsonl that stands for a start, a restart after a failure, or a resume."""
    return {
        "kind": "start",
        "step": step,
        "epoch": epoch,
        "time": round(time.time(), 3),
        "restart": world.restart,
        "world_size": world.world_size,
        "lanes": world.lanes,
        "mode": world.mode,
        "device": world.device.partition(":")[0],
        **facts,
        "wall_s": 0.0,
    }
