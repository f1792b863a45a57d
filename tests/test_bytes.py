"""How much the ordered sum sends and keeps, counted at the calls of torch.distributed."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evenstep import Loader, TrainState, cross_entropy, train_step
from evenstep.collectives import Exchange, reduce_by_gather, reduce_nodes, reduce_two_phase
from evenstep.testing import run_ranks
from evenstep.tree import cover, merges_after_lane
from evenstep.world import World

LANES = 8
N = 840 * 640  # divisible by every world size, so no chunk is padded, and beyond the limit of the gather


class Counter:
    """Counts the elements that this rank sends to others, with the usual algorithm of each collective."""

    def __init__(self, monkeypatch, world):
        self.sent = 0
        self.calls = []
        self._rank, self._world_size = world.rank, world.world_size
        for name in ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce"):
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, real):
        def call(out, *args, **options):
            self.calls.append(name)
            others = self._world_size - 1
            if name == "all_to_all_single":
                sizes = options["input_split_sizes"]
                assert sum(sizes) == args[0].numel()
                self.sent += sum(size for rank, size in enumerate(sizes) if rank != self._rank)
            elif name == "all_reduce":  # a ring: reduce-scatter and all-gather
                self.sent += 2 * out.numel() * others / self._world_size
            else:  # in a ring every part passes every rank but the last
                assert out.numel() == args[0].numel() * self._world_size
                self.sent += args[0].numel() * others
            return real(out, *args, **options)

        return call


def counted(world, way):
    exchange = Exchange.of(world)
    nodes = [torch.ones(N) for _ in exchange.covers[world.rank]]
    out = torch.empty(N)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = Counter(monkeypatch, world)
        if way == "gather":
            out = reduce_by_gather(nodes, exchange)
        elif way == "two-phase":
            reduce_two_phase(nodes, exchange, out)
        else:
            reduce_nodes(nodes, exchange, out)
    # A node's value is 1 here, so the sum is the number of nodes.
    assert torch.equal(out, torch.full((N,), float(sum(map(len, exchange.covers)))))
    return counter.sent, counter.calls


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_where_lanes_divide_evenly_a_rank_sends_what_a_ring_all_reduce_sends(world_size):
    for sent, _ in run_ranks(counted, world_size, "chosen", lanes=LANES):
        assert sent == 2 * N * (world_size - 1) / world_size


@pytest.mark.parametrize("world_size", [3, 5, 6, 7])
def test_elsewhere_a_rank_sends_a_chunk_of_each_of_its_subtrees_and_then_its_sum(world_size):
    found = run_ranks(counted, world_size, "chosen", lanes=LANES)
    for rank, (sent, calls) in enumerate(found):
        num_nodes = len(cover(World(world_size=world_size, lanes=LANES).lanes_of(rank), LANES))
        assert sent == (num_nodes + 1) * N * (world_size - 1) / world_size
        assert calls[0] == "all_to_all_single"
        assert len(calls) == 2
    # Of 8 lanes, 6 or 7 processes own one subtree each, and send what a ring all-reduce sends.
    assert max(sent for sent, _ in found) == (2 if world_size > 5 else 3) * N * (world_size - 1) / world_size


def test_the_gather_sends_more_where_there_are_more_than_two():
    (gather, calls), (two_phase, _) = (
        run_ranks(counted, 4, way, lanes=LANES)[0] for way in ("gather", "two-phase")
    )
    assert gather == 3 * N
    assert two_phase == 1.5 * N
    assert len(calls) == 1


def stack_heights(world, batch_size):
    """The most gradient copies that a step kept besides the model's own .grad."""
    model = nn.Linear(3, 3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lanes, most = state.lanes, 0
    real = lanes._push

    def push(stack, values):
        nonlocal most
        if stack is lanes._gradients:
            most = max(most, len(stack) + 1)
        real(stack, values)

    lanes._push = push
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.arange(64) % 3)
    train_step(state, next(Loader(data, batch_size).batches(state)), cross_entropy())
    state.lanes.close()
    return most, len(world.own_lanes)


def stack_height(own, lanes):
    """The height that the numbers of merges lead to."""
    height = most = 0
    for merges in merges_after_lane(own, lanes):
        most = max(most, height + 1)
        height += 1 - merges
    return most


@pytest.mark.parametrize(("world_size", "lanes"), [(1, 32), (2, 32), (3, 32)])
def test_lanes_keep_as_many_copies_as_the_stack_of_merges_is_high(world_size, lanes):
    for rank, (height, own) in enumerate(run_ranks(stack_heights, world_size, 64, lanes=lanes)):
        lanes_of_rank = World(world_size=world_size, lanes=lanes).lanes_of(rank)
        assert own == len(lanes_of_rank)
        if world_size == 1:
            assert height == stack_height(lanes_of_rank, lanes) == 6
        else:  # the last lane's gradient is in DDP's buckets and not on the stack
            assert stack_height(lanes_of_rank, lanes) - 1 <= height <= stack_height(lanes_of_rank, lanes)


def test_the_stack_is_as_high_as_the_logarithm_of_the_lanes():
    for lanes, world_size in itertools.product(range(1, 41), range(1, 41)):
        if world_size > lanes:
            continue
        for rank in range(world_size):
            own = World(world_size=world_size, lanes=lanes).lanes_of(rank)
            height = stack_height(own, lanes)
            assert height <= math.ceil(math.log2(lanes)) + 1
            assert height <= 2 * math.log2(len(own)) + 1
            if len(cover(own, lanes)) == 1:
                assert height <= math.ceil(math.log2(len(own))) + 1
