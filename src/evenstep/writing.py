"""The files of a checkpoint: gathering their content and writing them whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from evenstep.errors import MachineError
from evenstep.files import flush
from evenstep.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    TRAINING,
    file_entry,
    read_manifest,
    seal,
    temporary_name,
    verify,
    writer_of,
)
from evenstep.sharedmem import is_alive
from evenstep.storable import plain_values, plain_weights


@dataclass(frozen=True)
class Content:
    """What a checkpoint will hold, in types that can be stored.

    Attributes:
        step: optimizer steps committed so far.
        tensors: the weights, contiguous and on the CPU, shared ones once.
        aliases: for each other key of a shared weight, the key that it is stored under.
        training: everything else.
        meta: what the run says of itself.
        score: how good the model is, or None.
        copied: events on GPUs; the tensors are complete when all of them have passed.
    """

    step: int
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    training: dict[str, Any]
    meta: dict[str, Any]
    score: float | None
    copied: tuple[torch.cuda.Event, ...] = ()


def gather(
    *,
    step: int,
    model: Mapping[str, Tensor],
    training: dict[str, Any],
    meta: dict[str, Any],
    score: float | None = None,
    copy: bool = False,
) -> Content:
    """Return what ``checkpoint.save`` is given in the form in which it is stored.

    Args:
        step: as for ``checkpoint.save``.
        model: as for ``checkpoint.save``.
        training: as for ``checkpoint.save``.
        meta: as for ``checkpoint.save``.
        score: as for ``checkpoint.save``.
        copy: copy every tensor, so that training may go on at once; otherwise the content is to be written
            before any tensor changes.

    Raises:
        ConfigError: something cannot be stored; the message names its place.
    """
    copied_from: set[torch.device] | None = set() if copy else None
    tensors, aliases = plain_weights(model, copied_from=copied_from)
    plain_training = plain_values(training, "training", copied_from=copied_from)
    plain_meta = plain_values(meta, "meta", json_only=True)
    events = [_event(device) for device in copied_from or () if device.type == "cuda"]
    score = None if score is None or math.isnan(score) else float(score)
    return Content(step, tensors, aliases, plain_training, plain_meta, score, tuple(events))


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def path_of(run_dir: str | Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}"


def write_files(run_dir: str | Path, content: Content) -> Path:
    """Write a checkpoint into the run directory and return its own directory.

    Raises:
        MachineError: the files cannot be written; the older checkpoints are as they were.
    """
    target = path_of(run_dir, content.step)
    parent = target.parent
    temporary = parent / temporary_name(content.step)
    with _write_errors(target):
        for event in content.copied:
            event.synchronize()
        if not parent.is_dir():
            parent.mkdir(parents=True)
            flush(parent.parent)
        _clean(parent)
        try:
            temporary.mkdir()
            # The metadata are those of safetensors.torch.save_model, so its load_model restores the aliases.
            metadata = {"format": "pt", **content.aliases}
            safetensors.torch.save_file(content.tensors, temporary / MODEL, metadata)
            with open(temporary / TRAINING, "wb") as file:
                torch.save(content.training, file)
            manifest: dict[str, Any] = {
                "format_version": FORMAT_VERSION,
                "step": content.step,
                "score": content.score,
                "meta": content.meta,
                "files": {name: file_entry(temporary / name) for name in (MODEL, TRAINING)},
                "aliases": content.aliases,
            }
            manifest["sha256"] = seal(manifest)
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            for name in (MODEL, TRAINING, MANIFEST):
                flush(temporary / name)
            flush(temporary)
            _put_in_place(temporary, target, manifest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _put_in_place(temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
    """Give a finished directory its name, in place of one that may be there."""
    parent = target.parent
    if target.exists():
        same = not verify(target) and (old := read_manifest(target))["files"] == manifest["files"]
        if same:
            if manifest["score"] is None and old["score"] is not None:
                return  # saved once more, by another TrainState of the run, say: the score still counts
            os.replace(temporary / MANIFEST, target / MANIFEST)
            flush(target)
            return
        # A directory cannot be replaced in one go. Between the two renames the old one still counts,
        # under its other name.
        aside = target.with_name(target.name + ".replaced")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(temporary, target)
    flush(parent)


@contextlib.contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Turn the errors of writing files into a MachineError."""
    try:
        yield
    # A failed write is an OSError in Python, a SafetensorError in safetensors, a RuntimeError in torch.
    except (OSError, SafetensorError, RuntimeError) as error:
        there = next(p for p in (target, *target.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free
        raise MachineError(
            f"cannot write the checkpoint {target}: {error} ({free:,} bytes are free there). The older "
            "checkpoints are untouched. Free some space or correct the permissions and go on with --resume; "
            "--keep 1 needs the least space, --run-dir chooses another place."
        ) from error


def _clean(parent: Path) -> None:
    """Remove what writers that died have left."""
    threads = {thread.native_id for thread in threading.enumerate() if thread.is_alive()}
    others = threads - {threading.get_native_id()}
    for path in parent.iterdir():
        writer = writer_of(path.name)
        if writer is None:
            continue
        pid, thread = writer
        if thread not in others if pid == os.getpid() else not is_alive(pid):
            shutil.rmtree(path, ignore_errors=True)
