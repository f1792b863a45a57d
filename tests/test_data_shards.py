"""Iterable datasets that lanes shard: every sample once, and the same bits on every world size."""

import itertools
import random
import types

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from evenstep import Loader, TrainState, cross_entropy, train_step
from evenstep.data.shards import has_shards
from evenstep.errors import ConfigError, DataError
from evenstep.testing import run_ranks
from evenstep.world import World
from worlds import digest

SIZES = (10, 7, 0, 3)


class Sharded(IterableDataset):
    """Shards of given sizes; sample number ``100 * shard + i`` and a random number."""

    def __init__(self, sizes=SIZES):
        self.sizes, self.epoch, self.opened = sizes, None, []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        raise AssertionError("nobody reads the whole stream")

    def shard(self, index, count):
        assert count == len(self.sizes)
        self.opened.append(index)
        for i in range(self.sizes[index]):
            yield 100 * index + i, random.random() + self.epoch


def start(step=0, epoch=0, epoch_step=0):
    return types.SimpleNamespace(step=step, epoch=epoch, epoch_step=epoch_step)


def flat(batch):
    lanes = [
        (part.lane, part.ids, *(v.tolist() for v in part.data)) if part.size else (part.lane, (), [], [])
        for part in batch.lanes
    ]
    return batch.step, batch.epoch, batch.epoch_step, batch.size, batch.last_in_epoch, lanes


def read(world, position, options, sizes=SIZES):
    loader_options = {key: value for key, value in options.items() if key == "workers"}
    limits = {key: value for key, value in options.items() if key in ("epochs", "steps")}
    with Loader(Sharded(sizes), 8, **loader_options) as loader:
        return [flat(batch) for batch in loader.batches(position, **limits)]


def joined(ranks):
    """The batches of all ranks put together, lanes in order."""
    for batches in zip(*ranks, strict=True):
        heads = [batch[:-1] for batch in batches]
        assert all(head == heads[0] for head in heads), heads
        yield *heads[0], list(itertools.chain.from_iterable(batch[-1] for batch in batches))


@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_once_and_the_same_on_every_world_size(workers):
    options = {"epochs": 2, "workers": workers}
    found = [list(joined(run_ranks(read, n, start(), options, lanes=4))) for n in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    # Two samples a lane and step; the shards end after 5, 4, 0 and 2 steps.
    assert [batch[3] for batch in found[0]] == [6, 6 - 1, 4, 3, 2] * 2
    assert [batch[4] for batch in found[0]] == [False, False, False, False, True] * 2
    for epoch in (0, 1):
        samples = sorted(n for b in found[0] if b[1] == epoch for lane in b[-1] for n in lane[2])
        assert samples == [*range(10), *range(100, 107), *range(300, 303)]
    numbers = [number for b in found[0] for lane in b[-1] for number in lane[3]]
    assert len(set(numbers)) == 40  # each sample has random numbers of its own


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_inside_an_epoch(world_size, workers):
    options = {"epochs": 2, "workers": workers}
    whole = list(joined(run_ranks(read, world_size, start(), options, lanes=4)))
    for step in (1, 4):
        rest = list(joined(run_ranks(read, world_size, start(step, 0, step), options, lanes=4)))
        assert rest == whole[step:]
    stopped = list(joined(run_ranks(read, world_size, start(), {**options, "steps": 3}, lanes=4)))
    assert stopped == whole[:3]


def test_a_process_reads_only_the_shards_of_its_lanes():
    def opened(world):
        dataset = Sharded((5, 5, 5, 5))
        list(Loader(dataset, 4).batches(start(), epochs=1))
        return dataset.opened

    assert run_ranks(opened, 2, lanes=4) == [[0, 1], [2, 3]]


class Vectors(Sharded):
    def shard(self, index, count):
        for i in range(self.sizes[index]):
            yield torch.randn(6), (i + index) % 3


def trained(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 3))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches = Loader(Vectors(), 8).batches(state, epochs=2)
    losses = [float(train_step(state, batch, cross_entropy()).loss) for batch in batches]
    state.lanes.close()
    return digest(state), losses, state.step


def test_training_has_the_same_bits_on_every_world_size():
    found = [value for n in (1, 2, 3, 4) for value in run_ranks(trained, n, lanes=4)]
    assert all(value == found[0] for value in found[1:]), found
    assert found[0][2] == 10


@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_shards_and_a_wrong_place_are_explained_on_every_rank(world_size):
    with pytest.raises(DataError, match=r"all 2 shards .*\(Sharded\) are empty in epoch 0"):
        run_ranks(read, world_size, start(), {"epochs": 1}, (0, 0), lanes=2)
    with pytest.raises(ConfigError, match=r"ended before step 9 of epoch 0.*--batch-size and --lanes"):
        run_ranks(read, world_size, start(9, 0, 9), {"epochs": 1}, (10, 7), lanes=2)


def test_a_shard_method_with_other_parameters_is_left_alone():
    class Other(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def shard(self, num_shards, index):
            raise AssertionError("never called")

    assert has_shards(Sharded())
    assert not has_shards(Other())
    assert len(list(Loader(Other(), 2, world=World()).batches(start(), epochs=1))) == 2
