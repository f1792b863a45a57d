"""Snapshots: the whole state of a process in the memory of its machine, for those who start in its place.

One file holds all TrainStates of a process between two commits. It is named by the number of steps that they
have committed together; all processes do the same steps in the same order, so of two files the one with the
higher number is further on. Of two with the same number, which two machines have written, the weights are the
same; but what a loop's body changes, and whether it has done all with the last batch, may differ, as their
processes were in other places of it. All go on from one of them then. Reading one runs no code from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from evenstep.checkpoint import Checkpoint
from evenstep.contents import feed

_GLOB = "snapshot-*.pt"
_LOCK = "saving"


@dataclass(frozen=True)
class Snapshot:
    """A snapshot in memory.

    Attributes:
        total: steps that its states had committed together.
        rank: the rank that saved it.
        states: the TrainStates in the order in which they were made; None for one that was gone by then.
    """

    total: int
    rank: int
    states: list[Checkpoint | None]

    def digest(self) -> int:
        """Return a number in 64 bits, with sign, that is the same for the same states, whoever saved them."""
        sha = hashlib.sha256()
        for state in self.states:
            parts = None if state is None else [state.step, state.meta, state.model, state.training]
            feed(sha, parts, lambda value: repr(value).encode())
        return int.from_bytes(sha.digest()[:8], "little", signed=True)


def save(
    directories: Sequence[Path], states: Sequence[dict[str, Any] | None], *, total: int, rank: int
) -> Path | None:
    """Write a snapshot into the first directory that has room for it.

    Survivors that come one after the other write one file between them: nobody writes one that is there.

    Args:
        directories: where it may go: shared memory, then the run's directory.
        states: for each TrainState ``model``, ``training``, ``meta`` and ``step``, as plain values.
        total: steps that they have committed together.
        rank: this process.

    Returns:
        The file, or None if it could not be written anywhere; the log says why.
    """
    problem: object = "there is no place for it"
    for directory in directories:
        target = directory / f"snapshot-{total:012d}.pt"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _only_writer(directory):
                if not target.exists():
                    _write(target, {"rank": rank, "total": total, "states": list(states)})
            if directory != directories[0]:
                logger.warning("the snapshot went to {}: {}", directory, problem)
            return target
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            problem = f"{directory} cannot take it ({error})"
    logger.error("no snapshot of step {} could be written: {}", total, problem)
    return None


def _write(target: Path, content: dict[str, Any]) -> None:
    num_bytes = sum(t.numel() * t.element_size() for t in _tensors(content))
    free = shutil.disk_usage(target.parent).free
    if num_bytes > free:
        raise OSError(f"it needs {num_bytes:,} bytes, and {free:,} are free")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    for older in target.parent.glob(_GLOB):
        if older.name < target.name:
            older.unlink(missing_ok=True)


def newest(directories: Sequence[Path]) -> Path | None:
    """Return the most advanced snapshot of this machine, or None."""
    found = [path for directory in directories for path in directory.glob(_GLOB)]
    return max(found, key=lambda path: path.name, default=None)


def total_of(path: Path) -> int:
    """Return how many steps were committed when a snapshot was taken, from its name."""
    return int(path.stem.partition("-")[2])


def read(source: Path | bytes) -> Snapshot:
    """Read a snapshot, from its file or from the bytes of it."""
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    content = torch.load(file, map_location="cpu", weights_only=True)
    path = source if isinstance(source, Path) else Path("snapshot")
    states = [
        None
        if state is None
        else Checkpoint(path, state["step"], state["meta"], state["model"], state["training"])
        for state in content["states"]
    ]
    return Snapshot(content["total"], content["rank"], states)


@contextlib.contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel frees it if the writer dies
        yield
    finally:
        os.close(descriptor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
