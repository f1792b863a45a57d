"""The manifest of a checkpoint: which files it has, and whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from evenstep.errors import CheckpointError

FORMAT_VERSION = 1
MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
_KEYS = {"format_version", "step", "score", "meta", "files", "aliases", "sha256"}
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_TEMPORARY = re.compile(r"\.tmp-step-\d+-(\d+)(?:-(\d+))?")


def temporary_name(step: int) -> str:
    """Return the name of a directory that is not a checkpoint yet, or not any more; it tells the writer."""
    return f".tmp-step-{step:08d}-{os.getpid()}-{threading.get_native_id()}"


def writer_of(name: str) -> tuple[int, int | None] | None:
    """Return (process, thread) that made a directory with a temporary name, or None for other names."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]) if match[2] else None)


def file_entry(path: Path) -> dict[str, Any]:
    """Return what the manifest says of a file: its size in bytes and its SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents, as hexadecimal digits."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def seal(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's own content, which it holds under ``sha256``."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def advice(path: Path) -> str:
    """Return what to do about a damaged checkpoint, for the messages."""
    return f"Remove {path} and go on from an older checkpoint with --resume."


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint in ``path``, checked for everything that the code relies on.

    Raises:
        CheckpointError: there is no such directory or manifest, or the manifest is damaged or of another
            format.
    """
    if not path.is_dir():
        others = ", ".join(sorted(p.name for p in path.parent.glob("step-*"))[-5:]) or "none"
        raise CheckpointError(
            f"there is no checkpoint {path}; {path.parent} has: {others}. Correct the path or --run-dir."
        )
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, so {path} is not whole. {advice(path)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. {advice(path)}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format_version {version!r}; this evenstep reads {FORMAT_VERSION}. Use the "
            "evenstep that wrote it."
        )
    try:
        entries = {name: (type(e["bytes"]), type(e["sha256"])) for name, e in manifest["files"].items()}
        kinds = [type(manifest[key]) for key in ("step", "meta", "aliases")]
        whole = (
            entries == {MODEL: (int, str), TRAINING: (int, str)}
            and kinds == [int, dict, dict]
            and isinstance(manifest["score"], (float, type(None)))
        )
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{file} lacks some of format_version, step, score, meta, files, aliases. {advice(path)}"
        )
    # Those of earlier versions have no such key. Other keys are none that evenstep has ever written.
    if manifest.keys() - _KEYS or manifest.get("sha256", seal(manifest)) != seal(manifest):
        raise CheckpointError(
            f"{file} is damaged: it is not what was written, as its own SHA-256 shows. {advice(path)}"
        )
    return manifest  # type: ignore[no-any-return]  # a dict, as checked above


def check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError if a file of the checkpoint in ``path`` is missing or has another size."""
    for name, entry in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} is missing: {error.strerror}. {advice(path)}") from None
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{path / name} has {size:,} bytes, but {entry['bytes']:,} were written. {advice(path)}"
            )


def verify(path: str | Path) -> list[str]:
    """Return what is wrong with a checkpoint, one line per problem; an empty list if it is whole.

    Reads all its files and compares their SHA-256.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, entry in manifest["files"].items():
        try:
            found = sha256_of(path / name)
        except OSError as error:
            problems.append(f"{path / name} cannot be read: {error.strerror}. {advice(path)}")
            continue
        if found != entry["sha256"]:
            problems.append(
                f"{path / name} is damaged: its SHA-256 is {found}, but {entry['sha256']} was written. "
                f"{advice(path)}"
            )
    return problems


def directories(run_dir: str | Path) -> list[Path]:
    """Return the directories named as checkpoints, newest first; NAME.replaced after NAME."""
    parent = Path(run_dir) / "checkpoints"
    if not parent.is_dir():
        return []
    named = [(match, path) for path in parent.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, key=lambda pair: (-int(pair[0][1]), pair[0][2] or ""))]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, from the name of its directory; -1 if it is not named as one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def weights_id(path: Path) -> int:
    """Return a whole number below 2**60 that two checkpoints share only if their weights are the same.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    return int(read_manifest(path)["files"][MODEL]["sha256"][:15], 16)
