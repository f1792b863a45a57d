"""Iterable datasets that can be cut into shards: each lane reads its own one, so reading is shared out.

Nobody knows how long a shard is. So the ranks tell each other in every step how many samples they have and
whether any are left, and the epoch ends for all of them when the last shard has ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from evenstep import seeding
from evenstep.data.batch import Batch, LaneBatch
from evenstep.data.fetch import Reading, loaded, take
from evenstep.errors import ConfigError, DataError
from evenstep.world import World, share


def has_shards(dataset: Any) -> bool:
    """Whether ``dataset`` is iterable and has a method ``shard(index, count)`` with these two parameters.

    The names are looked at because other libraries have a ``shard`` with other parameters.
    """
    shard = getattr(dataset, "shard", None)
    if not isinstance(dataset, IterableDataset) or not callable(shard):
        return False
    return list(inspect.signature(shard).parameters)[:2] == ["index", "count"]


class Piece(NamedTuple):
    """What the lanes of this process read for one step; a tuple, because DataLoader pins those.

    Attributes:
        ids: the samples' numbers, for each own lane; sample i of the shard of lane l is ``i * lanes + l``.
        data: the collated samples, for each own lane; None for a lane that has none.
        left: whether any own lane has more.
    """

    ids: list[tuple[int, ...]]
    data: list[Any]
    left: bool


class ShardedStream(IterableDataset[Piece]):
    """What this process reads of one epoch, step by step, until its own shards have ended.

    Args:
        dataset: the user's dataset.
        batch_size: samples in a full global batch.
        world: ranks and lanes.
        reading: how items are read.
        epoch: the epoch.
        skip: steps to drop at the start (resuming); their items are read.
    """

    def __init__(
        self, dataset: Any, batch_size: int, world: World, reading: Reading, *, epoch: int, skip: int
    ) -> None:
        self.dataset, self.reading, self.epoch, self.skip = dataset, reading, epoch, skip
        self.lanes, self.own = world.lanes, world.own_lanes
        self.sizes = [len(share(lane, world.lanes, batch_size)) for lane in world.own_lanes]

    def __iter__(self) -> Iterator[Piece]:
        shards = [seeded_items(self.dataset, lane, self.lanes, self.reading, self.epoch) for lane in self.own]
        for shard, size in zip(shards, self.sizes, strict=True):
            for _ in take(shard, self.skip * size):
                pass
        pending = [list(take(shard, 1)) for shard in shards]
        while any(pending):
            rows = [
                ahead + list(take(shard, size - 1)) if ahead else []
                for ahead, shard, size in zip(pending, shards, self.sizes, strict=True)
            ]
            pending = [list(take(shard, 1)) if row else [] for row, shard in zip(rows, shards, strict=True)]
            ids = [tuple(number for number, _ in row) for row in rows]
            data = [self.reading.collate([item for _, item in row]) if row else None for row in rows]
            yield Piece(ids, data, any(pending))


def seeded_items(
    dataset: Any, lane: int, lanes: int, reading: Reading, epoch: int
) -> Iterator[tuple[int, Any]]:
    """Yield (number, item) of one shard; before each item the random states are seeded from its number."""
    seeding.seed_sample(reading.seed, epoch, lane)
    shard: Iterable[Any] = dataset.shard(lane, lanes)
    iterator = iter(shard)
    number = lane
    while True:
        seeding.seed_sample(reading.seed, epoch, number)
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield number, item
        number += lanes


def sharded_epoch(stream: ShardedStream, world: World, step: int) -> Generator[Batch, None, None]:
    """Yield this process's part of the batches of one epoch. Collective: every rank must take each batch.

    Args:
        stream: what this process reads; starts where the epoch stands.
        world: ranks and lanes.
        step: the optimizer step of the first batch.

    Raises:
        ConfigError: the shards ended before the place where the epoch stands.
        DataError: all shards are empty.
    """
    if hasattr(stream.dataset, "set_epoch"):
        stream.dataset.set_epoch(stream.epoch)
    pieces: Any = loaded(stream, None, stream.reading)
    nothing = Piece([()] * len(stream.own), [None] * len(stream.own), False)
    stand_in: Any = None
    number = stream.skip
    try:
        while True:
            piece = next(pieces, nothing)
            size, left = _agreed(sum(map(len, piece.ids)), piece.left, world)
            if size == 0:
                _raise_empty(stream)
            if not piece.ids[-1] and stand_in is None:
                stand_in = _stand_in(stream)
            lanes = tuple(
                LaneBatch(lane, len(ids), data if ids else stand_in, ids)
                for lane, ids, data in zip(stream.own, piece.ids, piece.data, strict=True)
            )
            yield Batch(step, stream.epoch, number, size, left == 0, lanes)
            if left == 0:
                return
            step, number = step + 1, number + 1
    finally:
        pieces.close()


def _agreed(size: int, left: bool, world: World) -> tuple[int, int]:
    """Return the samples of all ranks, and on how many ranks more are left. Collective."""
    if world.world_size == 1:
        return size, int(left)
    both = torch.tensor([size, int(left)], device=world.device)
    dist.all_reduce(both)
    total, ranks = both.tolist()
    return total, ranks


def _stand_in(stream: ShardedStream) -> Any:
    """Return the first samples, at most two, of the first shard that has any: the same on every rank."""
    with seeding.preserved_rng():
        for lane in range(stream.lanes):
            items = seeded_items(stream.dataset, lane, stream.lanes, stream.reading, stream.epoch)
            if first := [item for _, item in take(items, 2)]:
                return stream.reading.collate(first)
    raise AssertionError("a batch has samples, so a shard has")


def _raise_empty(stream: ShardedStream) -> NoReturn:
    name = type(stream.dataset).__name__
    if stream.skip:
        raise ConfigError(
            f"the shards of the dataset ({name}) ended before step {stream.skip} of epoch {stream.epoch}, "
            "where the run stands. It was begun with other data, batch size or lanes; give the same "
            "--data, --batch-size and --lanes again."
        )
    raise DataError(
        f"all {stream.lanes} shards of the dataset ({name}) are empty in epoch {stream.epoch}, so there is "
        "nothing to read. Check --data, and that shard(index, count) counts from 0."
    )
