"""Checkpoints: atomic on disk, checked by SHA-256, and read without running any code from them.

A checkpoint is a directory ``RUN_DIR/checkpoints/step-00000390`` with three files:

- ``model.safetensors``: the weights under the model's own keys. Weights that several keys share (tied
  weights) are stored once; the other keys are in the file's metadata, as ``safetensors.torch.save_model``
  does it, and in the manifest under ``aliases``.
- ``training.pt``: everything else that must survive (optimizer, counters, ...), for ``torch.load`` with
  ``weights_only=True``.
- ``manifest.json``: the version of this format, the step, what the run says of itself, and the size and
  SHA-256 of the two other files.

It is written into a directory with a temporary name, each file is flushed to the disk, and the directory is
then renamed. So a checkpoint is there whole or not at all, wherever the writer dies.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from loguru import logger
from torch import Tensor, nn

from evenstep.errors import CheckpointError, ConfigError
from evenstep.manifest import (
    MANIFEST,
    MODEL,
    TRAINING,
    advice,
    check_sizes,
    directories,
    read_manifest,
    step_of,
    temporary_name,
    verify,
)
from evenstep.writing import Content, gather, path_of, write_files

__all__ = [
    "MANIFEST",
    "MODEL",
    "TRAINING",
    "Checkpoint",
    "CheckpointInfo",
    "average_of",
    "directories",
    "latest",
    "load",
    "load_into",
    "ls",
    "path_of",
    "prune",
    "save",
    "step_of",
    "unwrapped",
    "verify",
    "write",
]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        path: its directory.
        step: optimizer steps that were committed before it was taken.
        meta: what the run said of itself.
        model: the weights by key, shared ones under each of their keys.
        training: everything else.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    model: dict[str, Tensor]
    training: dict[str, Any]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk, as :func:`ls` lists it.

    Attributes:
        path: its directory.
        step: its step, from the name.
        num_bytes: size of its files.
        score: the score it was saved with, or None.
        meta: what the run said of itself; empty if the manifest cannot be read.
        problem: what is wrong with it as far as the manifest and the file sizes show; None if nothing.
    """

    path: Path
    step: int
    num_bytes: int
    score: float | None
    meta: dict[str, Any]
    problem: str | None


def save(
    run_dir: str | Path,
    *,
    step: int,
    model: Mapping[str, Tensor],
    training: dict[str, Any],
    meta: dict[str, Any],
    score: float | None = None,
    keep: int = 3,
) -> Path:
    """Write a checkpoint, then remove those that are not to be kept. Only rank 0 calls this.

    If the process dies or the disk is full at any point, the older checkpoints are as they were. A checkpoint
    of the same step is replaced; if its weights and training state are the same, only its manifest is.

    Args:
        run_dir: the run's directory; made if it is not there.
        step: optimizer steps committed so far.
        model: the weights, from ``unwrapped(model).state_dict()``; on any device, in any memory format.
        training: nested dicts, lists and tuples of tensors, numbers, strings, bytes, None, torch dtypes and
            devices. Mappings of other types become dicts, numbers of NumPy become Python's.
        meta: what can be written as JSON: epoch, epoch_step, lanes, numerics, config, metrics, versions.
            Tuples come back as lists.
        score: how good the model is (more is better), such as the test accuracy.
        keep: how many of the newest checkpoints to keep, besides the one with the best score.

    Returns:
        The directory of the checkpoint.

    Raises:
        ConfigError: something in ``model``, ``training`` or ``meta`` cannot be stored; the message names
            its place.
        MachineError: the files cannot be written.
    """
    _check_keep(keep)
    content = gather(step=step, model=model, training=training, meta=meta, score=score)
    return write(run_dir, content, keep=keep)


def write(run_dir: str | Path, content: Content, *, keep: int = 3) -> Path:
    """Write a checkpoint from its gathered content; otherwise as :func:`save`."""
    _check_keep(keep)
    path = write_files(run_dir, content)
    prune(run_dir, keep=keep)
    return path


def prune(run_dir: str | Path, *, keep: int) -> None:
    """Keep the newest ``keep`` good checkpoints and the one with the best score; remove the others.

    Only rank 0 calls this; :func:`save` does it by itself. A damaged checkpoint is removed once a newer good
    one is there. Of equal scores the newest is the best. A checkpoint that cannot be removed is left, with a
    warning in the log.
    """
    _check_keep(keep)
    infos = [(path, _info(path)) for path in directories(run_dir)]
    good = [(path, info) for path, info in infos if info.problem is None]
    if not good:
        return
    newest_step = good[0][1].step
    steps = list(dict.fromkeys(info.step for _, info in good))
    kept_steps = set(steps[:keep])
    scored = [(info.score, info.step) for _, info in good if info.score is not None]
    if scored:
        kept_steps.add(max(scored)[1])
    kept: dict[int, Path] = {}
    for path, info in good:  # the plain name comes before NAME.replaced
        if info.step in kept_steps:
            kept.setdefault(info.step, path)
    for path, info in infos:
        if path in kept.values() or info.step > newest_step:
            continue
        # Renamed first, so that a half-removed directory never looks like a checkpoint.
        doomed = path.parent / temporary_name(info.step)
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint {}: {}", path, error)


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ConfigError(f"keep is {keep}; at least one checkpoint must stay. Use --keep 1 or more.")


def _info(path: Path) -> CheckpointInfo:
    step = step_of(path)
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CheckpointError as error:
        return CheckpointInfo(path, step, _size(path), None, {}, str(error))
    return CheckpointInfo(path, step, _size(path), manifest["score"], manifest["meta"], None)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0


def ls(run_dir: str | Path) -> list[CheckpointInfo]:
    """Return the checkpoints of a run, oldest first; an empty list if there are none."""
    plain = [_info(path) for path in directories(run_dir)]
    good = {info.step for info in plain if info.problem is None and info.path.suffix != ".replaced"}
    return [i for i in reversed(plain) if not (i.path.suffix == ".replaced" and i.step in good)]


def latest(run_dir: str | Path) -> Path | None:
    """Return the newest checkpoint whose manifest can be read and whose files have the right sizes.

    A newer one that is damaged is skipped with a warning in the log. The contents of the files are not
    looked at: :func:`load` does that.
    """
    for path in directories(run_dir):
        problem = _info(path).problem
        if problem is None:
            return path
        logger.warning("skipping a damaged checkpoint: {}", problem)
    return None


def read_meta(path: str | Path) -> dict[str, Any]:
    """Return the ``meta`` that a checkpoint was saved with, from its manifest alone.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    meta: dict[str, Any] = read_manifest(Path(path))["meta"]
    return meta


def load(path: str | Path, *, map_location: str | torch.device = "cpu", verified: bool = False) -> Checkpoint:
    """Read a checkpoint after checking the SHA-256 of its files. Every rank may call this.

    Nothing that is stored in it is run as code.

    Args:
        path: directory of the checkpoint, such as :func:`latest` gives.
        map_location: device for the tensors.
        verified: the SHA-256 has been checked already.

    Raises:
        CheckpointError: it is not there, is damaged, has an unknown format, or holds what a checkpoint must
            not hold.
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = [] if verified else verify(path)
    if problems:
        raise CheckpointError("\n".join(problems))
    try:
        model = safetensors.torch.load_file(path / MODEL, device=str(map_location))
        training = torch.load(path / TRAINING, map_location=map_location, weights_only=True)
        model.update({key: model[kept] for key, kept in manifest["aliases"].items()})
        if not isinstance(training, dict):
            raise TypeError(f"{TRAINING} holds a {type(training).__name__}, not a dict")
    except pickle.UnpicklingError:  # torch's own message advises to read the file without this protection
        raise CheckpointError(
            f"{path / TRAINING} holds objects whose reading would run code, so it was not read. evenstep "
            f"never writes such a file: do not trust it. {advice(path)}"
        ) from None
    except Exception as error:  # whatever a reader makes of files that were tampered with
        raise CheckpointError(
            f"{path} has the SHA-256 that its manifest says, but cannot be read: {error}. It was made by "
            f"something else, or changed on purpose. {advice(path)}"
        ) from error
    return Checkpoint(path, manifest["step"], manifest["meta"], model, training)


def average_of(checkpoint: Checkpoint) -> dict[str, Tensor] | None:
    """Return the moving average of the weights under the model's own keys, or None if the run kept none."""
    average = checkpoint.training.get("averaged")
    if average is None:
        return None
    prefix = "module."  # of torch's AveragedModel
    return {key.removeprefix(prefix): value for key, value in average.items() if key.startswith(prefix)}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own model inside DistributedDataParallel and torch.compile.

    So its state_dict has the model's own keys, without ``module.`` or ``_orig_mod.`` in front.
    """
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def load_into(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the weights of a checkpoint into a model, which is unwrapped first.

    Raises:
        CheckpointError: keys are missing or unexpected, or shapes or dtypes differ; the model is unchanged.
    """
    inner = unwrapped(model)
    own = {key: value for key, value in inner.state_dict().items() if isinstance(value, Tensor)}
    stored = checkpoint.model
    missing = [key for key in own if key not in stored]
    unexpected = [key for key in stored if key not in own]
    differing = [
        f"{key} ({_shape(stored[key])} in the checkpoint, {_shape(own[key])} in the model)"
        for key in own
        if key in stored and _shape(stored[key]) != _shape(own[key])
    ]
    found = [("missing", missing), ("unexpected", unexpected), ("different", differing)]
    problems = [f"{what}: {_few(keys)}" for what, keys in found if keys]
    if problems:
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} does not fit the model {type(inner).__name__}: "
            f"{'; '.join(problems)}. It was made by another model, or with other options of it. Use the "
            "same --model and --data as the run that wrote it."
        )
    inner.load_state_dict(stored)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
