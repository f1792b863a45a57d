"""The three ways of adding the tree up have the same bits, whatever the number of processes."""

import pytest
import torch

from evenstep.collectives import (
    GATHER_BELOW_BYTES,
    CommunicationThread,
    Exchange,
    gather_below_bytes,
    reduce_by_gather,
    reduce_nodes,
    reduce_two_phase,
)
from evenstep.testing import run_ranks
from evenstep.tree import fold
from trees import subtree


def lane_values(lanes, n):
    generator = torch.Generator().manual_seed(lanes * 1000 + n)
    return [torch.randn(n, generator=generator) * 10.0 ** float(lane % 5 - 2) for lane in range(lanes)]


def ordered_sum(lanes, n):
    values = {(lane, lane + 1): value for lane, value in enumerate(lane_values(lanes, n))}
    return fold(values, lanes, torch.add)


def sums(world, sizes):
    """Run on each rank: the sum of each size by each way."""
    exchange = Exchange.of(world)
    found = {}
    for n in sizes:
        values = lane_values(world.lanes, n)
        nodes = []
        for lo, hi in exchange.covers[world.rank]:
            nodes.append(subtree([value.clone() for value in values], (lo, hi), torch.add))
        found["gather", n] = reduce_by_gather([node.clone() for node in nodes], exchange)
        two_phase = torch.empty(n)
        reduce_two_phase([node.clone() for node in nodes], exchange, two_phase)
        found["two-phase", n] = two_phase
        own = [node.clone() for node in nodes]
        reduce_nodes(own, exchange, own[-1])
        found["chosen", n] = own[-1]
    return found


@pytest.mark.parametrize(
    ("world_size", "lanes"), [(2, 2), (2, 4), (2, 5), (3, 4), (3, 8), (4, 8), (4, 4), (5, 8)]
)
def test_every_way_has_the_bits_of_the_ordered_sum(world_size, lanes):
    # Smaller than the world, uneven, above the limit of the gather.
    sizes = (1, 2, 3, 7, 64, 1001, 20_000, 600_001)
    for found in run_ranks(sums, world_size, sizes, lanes=lanes):
        for (way, n), value in found.items():
            assert torch.equal(value, ordered_sum(lanes, n)), (way, n)


def test_the_limit_of_the_gather():
    assert max(GATHER_BELOW_BYTES.values()) < 4 * 600_001  # the largest sum above is beyond it
    assert {n: gather_below_bytes(n) for n in GATHER_BELOW_BYTES} == GATHER_BELOW_BYTES
    assert gather_below_bytes(5) == gather_below_bytes(4)
    assert gather_below_bytes(64) == gather_below_bytes(8) // 8
    assert gather_below_bytes(2) == gather_below_bytes(3)  # two processes with three subtrees


def test_another_order_has_other_bits():
    """If this fails, the numbers above are too tame to show anything."""
    values = lane_values(8, 1001)
    assert not torch.equal(sum(values), ordered_sum(8, 1001))


def test_the_pair_is_used_for_two_processes_with_a_subtree_each():
    def is_pair(world):
        return Exchange.of(world).is_pair

    assert run_ranks(is_pair, 2, lanes=4) == [True, True]
    assert run_ranks(is_pair, 2, lanes=5) == [True, True]
    assert run_ranks(is_pair, 3, lanes=4) == [False] * 3


def test_the_thread_hands_an_error_on_and_refuses_what_comes_after_it():
    thread = CommunicationThread(torch.device("cpu"))
    ran = []

    def broken():
        raise RuntimeError("connection lost")

    first = thread.submit(lambda: torch.ones(1))
    second = thread.submit(broken)
    third = thread.submit(lambda: ran.append(1) or torch.ones(1))
    assert first.wait() == torch.ones(1)
    for future in (second, third):
        with pytest.raises(Exception):  # noqa: B017 - torch changes the type and the text
            future.wait()
    assert str(thread.error) == "connection lost"
    assert not ran
    thread.close()
