"""Properties that hold for all lanes, world sizes, batch sizes, data sizes and seeds."""

import functools
import types
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from evenstep import Loader, TrainState, train_step
from evenstep.data.chunks import eval_chunks
from evenstep.lanes import naive_gradients
from evenstep.testing import run_ranks
from evenstep.tree import cover, fold, merges_after_lane
from evenstep.world import World, share
from worlds import ranks

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def worlds(draw, most=12):
    """(lanes, world_size) with a lane for each process."""
    lanes = draw(st.integers(1, most))
    return lanes, draw(st.integers(1, lanes))


class Numbers:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


def epoch(world, n, batch_size, **options):
    start = types.SimpleNamespace(step=0, epoch=0, epoch_step=0)
    loader = Loader(Numbers(n), batch_size, world=world, collate_fn=list, **options)
    return list(loader.batches(start, epochs=1))


@given(worlds(), st.integers(0, 30), st.integers(1, 60), st.integers(0, 2**40), st.booleans())
@relaxed
def test_an_epoch_has_every_sample_once(sizes, more, n, seed, shuffle):
    lanes, world_size = sizes
    batch_size = lanes + more
    by_rank = [epoch(w, n, batch_size, shuffle=shuffle) for w in ranks(world_size, lanes, seed=seed)]
    seen = Counter(i for batches in by_rank for b in batches for part in b.lanes for i in part.ids)
    assert seen == Counter(range(n))
    one = epoch(World(lanes=lanes, seed=seed), n, batch_size, shuffle=shuffle)
    for step, batches in enumerate(zip(*by_rank, strict=True)):
        together = [part for batch in batches for part in batch.lanes]
        assert [part.lane for part in together] == list(range(lanes))
        assert together == list(one[step].lanes)
        assert {batch.size for batch in batches} == {sum(part.size for part in together)}
        assert all(part.data == list(part.ids) for part in together if part.size)
        assert [batch.last_in_epoch for batch in batches] == [step == len(one) - 1] * world_size


@given(worlds(), st.integers(1, 60), st.integers(1, 40))
@relaxed
def test_an_evaluation_has_every_sample_once_and_the_same_chunks(sizes, n, chunk_size):
    lanes, world_size = sizes

    def chunks(world):
        return list(eval_chunks(Numbers(n), chunk_size=chunk_size, world=world, collate_fn=list))

    together = [chunk for world in ranks(world_size, lanes) for chunk in chunks(world)]
    assert together == chunks(World(lanes=lanes))
    assert [i for _, _, data in together for i in data] == list(range(n))


@given(worlds(40))
@relaxed
def test_the_order_of_sums_is_the_trees_whoever_owns_the_lanes(sizes):
    """Sums as texts: what is added to what, and in which order, can be read."""
    lanes, world_size = sizes

    def add(a, b):
        return f"({a} {b})"

    nodes = {}
    for world in ranks(world_size, lanes):
        stack = []
        for lane, merges in zip(world.own_lanes, merges_after_lane(world.own_lanes, lanes), strict=True):
            stack.append(str(lane))
            for _ in range(merges):
                right = stack.pop()
                stack.append(add(stack.pop(), right))
        nodes |= dict(zip(cover(world.own_lanes, lanes), stack, strict=True))
    assert fold(nodes, lanes, add) == balanced(range(lanes), add)


def balanced(lanes, add):
    """The definition of the tree, from its description."""
    if len(lanes) == 1:
        return str(lanes[0])
    half = len(lanes) // 2
    return add(balanced(lanes[:half], add), balanced(lanes[half:], add))


@given(st.integers(1, 50), st.integers(0, 1000))
@relaxed
def test_shares_are_whole_in_order_and_even(parts, n):
    shares = [share(index, parts, n) for index in range(parts)]
    assert [i for one in shares for i in one] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def squared(model, data):
    return nn.functional.mse_loss(model(data[0]), data[1])


def weighted(model, data, weight):
    return squared(model, data) * weight


def gradients(world, cases):
    """For each case whether the gradient is the naive twin's, and the gradient's bytes."""
    found = []
    for n, width, seed in cases:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2))
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
        data = TensorDataset(torch.randn(n, 5), torch.randn(n, 2))
        batch = next(Loader(data, max(n, world.lanes), seed=seed).batches(state))

        losses = [
            functools.partial(weighted, model, part.data, part.size / batch.size) if part.size else None
            for part in batch.lanes
        ]
        expected = naive_gradients(model, world, losses)
        train_step(state, batch, squared)
        state.lanes.close()
        found.append(
            [
                all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True)),
                b"".join(p.grad.numpy().tobytes() for p in model.parameters()),
            ]
        )
    return found


@pytest.mark.parametrize("draw", range(2))
def test_the_gradient_is_the_naive_twins_for_random_worlds(draw):
    generator = np.random.default_rng(draw)
    lanes = int(generator.integers(3, 12))
    # Fewer samples than lanes, too, and gradients small and large enough for either way of the sum.
    cases = [(int(generator.integers(1, 40)), int(width), draw) for width in (3, 40, 40_000)]
    one = run_ranks(gradients, 1, cases, lanes=lanes)[0]
    assert all(equal for equal, _ in one)
    for found in run_ranks(gradients, int(generator.integers(2, min(lanes, 4) + 1)), cases, lanes=lanes):
        assert found == one
