"""Do all processes read the same data? Each takes its own part of them, so otherwise samples are lost."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep.contents import feed
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
        feed(digest, item, _typed)
    return digest.hexdigest()


def _typed(value: Any) -> bytes:
    """Return the bytes for a value of another kind: its type, and of Pillow's images what is in them.

    The ``tobytes`` of other types may be of addresses, which differ.
    """
    name = type(value).__qualname__.encode()
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(value, pillow.Image):
        return name
    return name + f"{value.mode}{value.size}".encode() + bytes(value.tobytes())


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
