"""The chunks of an evaluation: which process reads which."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from evenstep.data.batch import MemoryFormat
from evenstep.data.cache import ImageArrays
from evenstep.data.dataset import check_image_options, checked_size, reading_of
from evenstep.data.fetch import (
    Collate,
    Normalize,
    Part,
    Reading,
    Request,
    Stream,
    read_arrays,
    read_items,
    read_stream,
)
from evenstep.data.resident import resident
from evenstep.data.same import described
from evenstep.errors import ConfigError
from evenstep.world import World, share


def eval_chunks(
    dataset: Any,
    *,
    chunk_size: int,
    world: World,
    workers: int = 0,
    normalize: Normalize | None = None,
    collate_fn: Collate | None = None,
    memory_format: MemoryFormat | None = None,
    found: list[str] | None = None,
) -> Iterator[tuple[int, int, Any]]:
    """Yield this process's chunks of a dataset as (chunk, size, data), in order, each sample once.

    Chunk c has the samples ``[c*chunk_size, (c+1)*chunk_size)``; the last may be shorter. Rank r gets
    ``share(r, world_size, num_chunks)``. The number of chunks of an iterable dataset is not known, so there
    every rank reads the whole stream and keeps the chunks c with ``c % world_size == rank``. Random
    transforms are seeded as in epoch 0. A rank may get no chunk.

    Args:
        dataset: as for :class:`Loader`; ``data`` is as there.
        chunk_size: samples in a chunk.
        world: ranks and seed.
        workers: DataLoader worker processes of this process.
        normalize: (mean, std), for ImageArrays only.
        collate_fn: as for :class:`Loader`.
        memory_format: as for :class:`Loader`.
        found: what tells the data apart is put into this list; it must be the same on all ranks.

    Raises:
        ConfigError: an argument cannot be, or does not fit this kind of dataset.
        DataError: the dataset is empty.
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}; a chunk needs at least 1 sample.")
    reading = reading_of(dataset, world, world.seed, workers, collate_fn, memory_format)
    size = checked_size(dataset)
    check_image_options(dataset, augment=None, normalize=normalize)
    if size is None:
        return _stream_chunks(dataset, chunk_size, world, reading, found)
    if found is not None:
        found.append(described(dataset))
    chunks = (
        Part(chunk, len(rows), tuple(rows))
        for chunk in share(world.rank, world.world_size, -(-size // chunk_size))
        for rows in [range(chunk * chunk_size, min((chunk + 1) * chunk_size, size))]
    )
    return _sized_chunks(dataset, list(chunks), reading, normalize)


def _sized_chunks(
    dataset: Any, chunks: list[Part], reading: Reading, normalize: Normalize | None
) -> Iterator[tuple[int, int, Any]]:
    requests = [Request(0, (part,)) for part in chunks]
    if not isinstance(dataset, ImageArrays):
        for part, data in zip(chunks, read_items(dataset, requests, reading), strict=True):
            yield part.number, part.size, data[0]
        return
    on_gpu = resident(dataset, reading.device)
    for part, request in zip(chunks, requests, strict=True):
        data = read_arrays(dataset, request, reading, options=None, normalize=normalize, on_gpu=on_gpu)
        yield part.number, part.size, data[0]


def _stream_chunks(
    dataset: Any, chunk_size: int, world: World, reading: Reading, found: list[str] | None
) -> Iterator[tuple[int, int, Any]]:
    split = functools.partial(_stream_chunk, world=world, chunk_size=chunk_size)
    size = 0
    for answer in read_stream(Stream(dataset, chunk_size, split, reading, epochs=1), reading):
        size += answer.size
        if found is not None and answer.found:
            found.append(answer.found)
        if found is not None and answer.last:
            found.append(f"{size} samples")
        for part, data in zip(answer.parts, answer.data, strict=True):
            yield part.number, part.size, data


# A function of the module, not a closure, because a worker process may have to unpickle it.
def _stream_chunk(number: int, size: int, *, world: World, chunk_size: int) -> tuple[Part, ...]:
    if number % world.world_size != world.rank:
        return ()
    return (Part(number, size, tuple(range(number * chunk_size, number * chunk_size + size))),)
