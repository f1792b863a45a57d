"""Experiment trackers (``--track``): the numbers of metrics.jsonl to wandb, mlflow or trackio as well.

Each through its own library, which must be installed. Only rank 0 calls this, so there is one run for a job
however many ranks it has; after a restart or with ``--resume`` the same run goes on, by the name and id that
``track.json`` in the run directory keeps. Where the numbers go (server, login, offline) is the library's own
configuration.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.errors import MachineError

PROJECT = "evenstep"
FILE = "track.json"

Log = Callable[[Mapping[str, float], int], object]


@dataclass(frozen=True)
class Tracker:
    """An open run of a tracker.

    Attributes:
        log: ``log(values, step)`` sends numbers by name.
        close: ends the run.
    """

    log: Log
    close: Callable[[], object]


def open_tracker(name: str, run_dir: Path, config: Mapping[str, Any], *, resumed: bool) -> Tracker:
    """Open a run of the tracker ``name``: ``wandb``, ``mlflow`` or ``trackio``.

    Args:
        name: the tracker.
        run_dir: the run directory; its name is the run's name.
        config: the options, which the tracker shows beside the numbers.
        resumed: whether the run goes on, so that the tracker's run does, too.

    Raises:
        MachineError: its library is not installed, or cannot open the run.
    """
    openers = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    file = run_dir / FILE
    saved = json.loads(file.read_text(encoding="utf-8")) if resumed and file.exists() else {}
    try:
        identity, tracker = openers[name](run_dir, dict(config), saved.get(name))
    except ImportError as error:
        raise MachineError(
            f"--track {name} needs the package {name}, which is not installed ({error}). The numbers would "
            f"be missing there without notice. Install it (pip install {name}), or leave the flag out: "
            "metrics.jsonl and report.html have the same numbers."
        ) from None
    except Exception as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise MachineError(
            f"--track {name}: the library cannot open a run: {type(error).__name__}: {said}. The numbers "
            "would be missing there. Put right what it says (a login, a server), or leave the flag out."
        ) from error
    file.write_text(json.dumps(saved | {name: identity}), encoding="utf-8")
    return tracker


def _wandb(run_dir: Path, config: dict[str, Any], identity: str | None) -> tuple[str, Tracker]:
    import wandb

    identity = identity or uuid.uuid4().hex
    run = wandb.init(
        project=PROJECT, name=_name(run_dir), id=identity, resume="allow", dir=str(run_dir), config=config
    )
    return identity, Tracker(lambda values, step: run.log(dict(values), step=step), run.finish)


def _mlflow(run_dir: Path, config: dict[str, Any], identity: str | None) -> tuple[str, Tracker]:
    import mlflow

    mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=identity, run_name=None if identity else _name(run_dir))
    if identity is None:  # mlflow refuses to change the value of a parameter
        mlflow.log_params(config)
    return str(run.info.run_id), Tracker(
        lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run
    )


def _trackio(run_dir: Path, config: dict[str, Any], identity: str | None) -> tuple[str, Tracker]:
    import trackio

    identity = identity or f"{_name(run_dir)}-{uuid.uuid4().hex[:8]}"
    trackio.init(project=PROJECT, name=identity, resume="allow", config=config)
    return identity, Tracker(lambda values, step: trackio.log(dict(values), step=step), trackio.finish)


def _name(run_dir: Path) -> str:
    return run_dir.resolve().name
