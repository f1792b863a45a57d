"""Decoded images as arrays, and the directory that keeps them.

A data set is decoded once per machine, into ``<cache_dir>/<name>-<key>/`` with ``train-images.npy``,
``train-labels.npy``, ``test-images.npy``, ``test-labels.npy`` and ``meta.json``. All processes map these
files, so the images are in memory once. Opening them imports neither torch nor Pillow.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenstep import world
from evenstep.errors import DataError, MachineError
from evenstep.files import flush

if TYPE_CHECKING:
    import torch

FORMAT = 2
"""Goes up when the files or the way of decoding change; a cache of another format is not used."""
SPLITS = ("train", "test")
_CHUNK = 1024


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Images of one size and their labels, as whole arrays.

    It is also an ordinary map-style dataset: ``arrays[i]`` is a float32 tensor (C, H, W) in 0..1 and an int.

    Attributes:
        images: uint8 (N, H, W, C); usually a read-only memory map, shared by all processes of a machine.
        labels: int64 (N,).
        classes: the names of the classes, in the order of the labels; may be empty.
        mean: per channel of the training split, in 0..1.
        std: per channel of the training split, in 0..1.
        fingerprint: sha256 of images and labels as hex digits; empty if it was not computed.

    Raises:
        DataError: shapes or dtypes are not as said above.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.uint8:
            raise DataError(
                f"images have shape {self.images.shape} and dtype {self.images.dtype}; expected four "
                "dimensions (N, H, W, C) and uint8. Give images as whole numbers 0 to 255."
            )
        if self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels have shape {self.labels.shape}, but there are {len(self.images)} images; each image "
                f"needs one label: expected shape ({len(self.images)},)."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from evenstep.data.augment import to_tensor

        return to_tensor(np.array(self.images[index])[None])[0], int(self.labels[index])

    def __reduce__(self) -> tuple[Any, ...]:
        # np.memmap pickles its content; a process that is handed a dataset must map the file instead.
        images: Any = self.images
        # A part of a map has the whole map as its base, and its file name is of no use.
        if isinstance(images, np.memmap) and isinstance(images.base, mmap.mmap) and images.filename:
            images = Path(images.filename)
        return _restored, (images, self.labels, self.classes, self.mean, self.std, self.fingerprint)

    def gather(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of some samples: uint8 images (n, H, W, C) and int64 labels (n,).

        Args:
            indices: whole numbers (n,), from 0 to N - 1.
        """
        rows = np.asarray(indices, dtype=np.int64)
        # np.asarray: a plain array, so that indexing skips the bookkeeping of np.memmap.
        return np.asarray(self.images)[rows], np.asarray(self.labels)[rows].astype(np.int64, copy=False)


def _restored(images: Any, *others: Any) -> ImageArrays:
    return ImageArrays(np.load(images, mmap_mode="r") if isinstance(images, Path) else images, *others)


@dataclass(frozen=True, eq=False)
class Rows:
    """One split as it comes out of a decoder.

    Attributes:
        images: uint8 (M, H, W, C), in any order; may be a memory map.
        rows: int64 (N,): which of ``images`` belong to the split, in their order.
        labels: int64 (N,).
    """

    images: np.ndarray
    rows: np.ndarray
    labels: np.ndarray

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the images in their order, some at a time."""
        for start in range(0, len(self.rows), _CHUNK):
            yield np.asarray(self.images[self.rows[start : start + _CHUNK]])


@dataclass(frozen=True, eq=False)
class Decoded:
    """A whole data set as it comes out of a decoder, and what the user must be told of it, if anything."""

    classes: tuple[str, ...]
    train: Rows
    test: Rows
    note: str | None = None


def statistics(chunks: Iterable[np.ndarray]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (mean, std) per channel in 0..1 of uint8 images (n, H, W, C), given some at a time.

    They are computed from counts of the 256 values, so they do not depend on the order of the images.
    """
    counts: np.ndarray | None = None
    for chunk in chunks:
        new = np.stack(
            [np.bincount(channel, minlength=256) for channel in chunk.reshape(-1, chunk.shape[-1]).T]
        )
        counts = new if counts is None else counts + new
    if counts is None:
        return (), ()
    values, total = np.arange(256) / 255, counts.sum(axis=1)
    mean = (counts * values).sum(axis=1) / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(axis=1) / total
    # A channel with one value has no spread to divide by.
    std = np.sqrt(np.where(variance > 0, variance, 1.0))
    return tuple(mean.tolist()), tuple(std.tolist())


def content_fingerprint(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the sha256 of uint8 images and int64 labels in hex digits."""
    digest = hashlib.sha256(f"{images.shape}".encode())
    for start in range(0, len(images), _CHUNK):
        digest.update(np.ascontiguousarray(images[start : start + _CHUNK]).tobytes())
    digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()


def default_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/evenstep, or ~/.cache/evenstep."""
    base = world.variable("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evenstep"


def cached(
    name: str, key: str, cache_dir: str | os.PathLike[str] | None, decode: Callable[[Path], Decoded]
) -> Path:
    """Return the directory with the decoded images, after decoding them if they are not there.

    Of several processes that call it at once, one decodes and the others wait. What is damaged is built anew
    with a warning. The directory appears whole or not at all.

    Args:
        name: a word for the directory's name.
        key: at least 16 characters that name the source's state.
        cache_dir: where to keep it; None for :func:`default_cache_dir`.
        decode: reads the source; it gets a directory for temporary files.

    Raises:
        MachineError: the cache cannot be written.
        DataError: from ``decode``.
    """
    from filelock import FileLock

    base = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    directory = base / f"{name}-{key[:16]}"
    # Without the lock, because a cache that is there may be on a read-only disk.
    if directory.is_dir() and damage(directory) is None:
        return directory
    try:
        base.mkdir(parents=True, exist_ok=True)
        with FileLock(base / f"{directory.name}.lock"):
            found = damage(directory) if directory.is_dir() else "missing"
            if found is not None:
                _build(directory, found, decode)
    except OSError as error:
        raise MachineError(
            f"cannot write the cache of decoded images in {base}: {error.strerror or error}. Each process "
            "would have to decode all images itself. Make it writable, or choose another place with "
            "--cache-dir."
        ) from error
    return directory


def _build(directory: Path, found: str, decode: Callable[[Path], Decoded]) -> None:
    if found != "missing":
        from loguru import logger

        logger.warning("the cache {} is damaged ({}); decoding the images again", directory, found)
        shutil.rmtree(directory)
    for left_over in directory.parent.glob(f"{directory.name}.tmp-*"):  # of a process that was killed
        shutil.rmtree(left_over)
    work = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    work.mkdir()
    try:
        _write(work, decode(work))
        os.rename(work, directory)
        flush(directory.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(work: Path, decoded: Decoded) -> None:
    mean, std = statistics(decoded.train.chunks())
    fingerprints = {}
    for split, rows in zip(SPLITS, (decoded.train, decoded.test), strict=True):
        path = work / f"{split}-images.npy"
        shape = (len(rows.rows), *rows.images.shape[1:])
        # Not through a map: on a full disk, writing to one kills the process (SIGBUS).
        with path.open("wb") as target:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(target, header)
            for chunk in rows.chunks():
                target.write(np.ascontiguousarray(chunk).data)
        np.save(work / f"{split}-labels.npy", rows.labels.astype(np.int64))
        fingerprints[split] = content_fingerprint(np.load(path, mmap_mode="r"), rows.labels)
    for scratch in work.glob("scratch*"):
        scratch.unlink()
    files = sorted(work.glob("*.npy"))
    meta = {
        "format": FORMAT,
        "classes": decoded.classes,
        "mean": mean,
        "std": std,
        "fingerprints": fingerprints,
        "note": decoded.note,
        "bytes": {file.name: file.stat().st_size for file in files},
    }
    (work / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    for file in [*files, work / "meta.json", work]:
        flush(file)


def _meta(directory: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    return meta


def note(directory: Path) -> str | None:
    """Return what the user must be told of the images in a cache directory; None if there is nothing."""
    found = _meta(directory).get("note")
    return found if isinstance(found, str) else None


def damage(directory: Path) -> str | None:
    """Return what is wrong with a cache directory, or None if its files have the sizes they should have."""
    try:
        expected = _meta(directory)["bytes"]
        for split in SPLITS:
            for kind in ("images", "labels"):
                name = f"{split}-{kind}.npy"
                actual = (directory / name).stat().st_size
                if actual != expected[name]:
                    return f"{name} has {actual:,} bytes, not {expected[name]:,}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"meta.json cannot be read: {error}"
    return None


def open_arrays(directory: Path) -> tuple[ImageArrays, ImageArrays]:
    """Return (train, test) of a cache directory, memory-mapped read-only."""
    meta = _meta(directory)
    train, test = (
        ImageArrays(
            images=np.load(directory / f"{split}-images.npy", mmap_mode="r"),
            labels=np.load(directory / f"{split}-labels.npy"),
            classes=tuple(meta["classes"]),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
            fingerprint=meta["fingerprints"][split],
        )
        for split in SPLITS
    )
    return train, test
