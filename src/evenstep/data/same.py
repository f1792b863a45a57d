"""Do all processes read the same data? Each takes its own part of them, so otherwise samples are lost."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenstep.data.cache import ImageArrays
from evenstep.errors import ConfigError
from evenstep.world import World

FIRST_ITEMS = 8
"""So many items at the beginning of a stream tell whether it is the same on all processes."""


def content_digest(items: Sequence[Any]) -> str:
    """Return a sha256 of the first items of a stream, in hex digits.

    It is made of the bits of tensors, arrays and images, of numbers and texts, and of what is in sequences
    and mappings. Of anything else only the type counts.
    """
    digest = hashlib.sha256()
    for item in items[:FIRST_ITEMS]:
        _feed(digest, item)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype}{value.shape}".encode())
        _feed_array(digest, value)
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(f"{value!r};".encode(errors="surrogatepass"))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _feed(digest, key)
            _feed(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}(".encode())
        for inner in value:
            _feed(digest, inner)
    else:
        digest.update(type(value).__qualname__.encode())
        # Only of Pillow's images: the tobytes of other types may be of addresses, which differ.
        pillow = sys.modules.get("PIL.Image")
        if pillow is not None and isinstance(value, pillow.Image):
            digest.update(f"{value.mode}{value.size}".encode() + value.tobytes())


def _feed_array(digest: Any, value: np.ndarray | np.generic) -> None:
    """Feed the values of an array; its bytes only where these are nothing but values."""
    fields = value.dtype.fields
    if fields is not None:  # between fields there may be bytes that nobody has set
        array = np.asarray(value)
        for name in fields:
            _feed(digest, array[name])
    elif value.dtype.hasobject:  # the bytes are addresses
        _feed(digest, value.ravel().tolist())
    elif value.dtype.type in (np.longdouble, np.clongdouble):  # 10 bytes of 16 are set
        _feed(digest, [repr(number) for number in value.ravel()])
    else:
        digest.update(value.tobytes())


def described(dataset: Any) -> str:
    """Return what tells a map-style dataset apart: how many samples it has, and the fingerprint of images."""
    fingerprint = dataset.fingerprint if isinstance(dataset, ImageArrays) else ""
    return f"{len(dataset):,} samples" + (f" (sha256 {fingerprint[:16]})" if fingerprint else "")


def check_same_data(dataset: Any, found: str, world: World) -> None:
    """Raise ConfigError if the processes do not read the same data. Collective: every rank must call.

    Args:
        dataset: this process's.
        found: what tells it apart.
        world: this process.

    Raises:
        ConfigError: on every rank; names two ranks that differ.
    """
    if world.world_size == 1:
        return
    everybody: list[Any] = [None] * world.world_size
    dist.all_gather_object(everybody, found)
    check_equal(dataset, everybody)


def check_equal(dataset: Any, everybody: Sequence[str]) -> None:
    """Raise ConfigError if the ranks have found different data.

    Args:
        dataset: this process's.
        everybody: what each rank has found.

    Raises:
        ConfigError: they are not all the same.
    """
    rank = next((rank for rank, found in enumerate(everybody) if found != everybody[0]), None)
    if rank is None:
        return
    name = type(dataset).__name__
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"the stream of the dataset ({name}) has other samples on rank {rank} than on rank 0. evenstep "
            "shares the samples out itself, so a stream that takes its own part by rank would be cut twice, "
            "and samples would be lost. Let __iter__ give all samples, the same on every rank; or give the "
            "dataset a method shard(index, count), with which each process reads its own part only. Random "
            "numbers in it must come from random, numpy.random or torch, which are seeded before each sample."
        )
    raise ConfigError(
        f"the dataset ({name}) has {everybody[0]} on rank 0 and {everybody[rank]} on rank {rank}. evenstep "
        "shares the samples out itself, so it must be the whole dataset on every rank, and the same. Make it "
        "without world.rank and without a file that one of them does not see."
    )
