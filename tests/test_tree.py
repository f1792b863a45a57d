import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.tree import cover, fold, merges_after_lane
from evenstep.world import share
from trees import text_of


def test_the_tree_over_six_lanes():
    assert text_of((0, 6)) == "((0+(1+2))+(3+(4+5)))"


@pytest.mark.parametrize(
    ("own", "lanes", "nodes"),
    [
        (range(0, 8), 8, ((0, 8),)),
        (range(2, 4), 8, ((2, 4),)),
        (range(2, 5), 8, ((2, 4), (4, 5))),
        (range(1, 7), 8, ((1, 2), (2, 4), (4, 6), (6, 7))),
        (range(0, 0), 8, ()),
    ],
)
def test_cover(own, lanes, nodes):
    assert cover(own, lanes) == nodes


@given(st.integers(1, 70), st.data())
def test_any_world_adds_in_the_order_of_the_tree(lanes, data):
    world_size = data.draw(st.integers(1, lanes))
    nodes = {}
    for rank in range(world_size):
        own = share(rank, world_size, lanes)
        stack, highest = [], 0
        for lane, num_merges in zip(own, merges_after_lane(own, lanes), strict=True):
            stack.append(str(lane))
            highest = max(highest, len(stack))
            for _ in range(num_merges):
                right = stack.pop()
                stack.append(f"({stack.pop()}+{right})")
        names = cover(own, lanes)
        assert len(stack) == len(names)
        assert highest <= len(names) + math.ceil(math.log2(lanes) if lanes > 1 else 0) + 1
        nodes.update(zip(names, stack, strict=True))
    assert fold(nodes, lanes, lambda a, b: f"({a}+{b})") == text_of((0, lanes))


@given(st.integers(1, 300), st.data())
def test_a_cover_is_short(lanes, data):
    world_size = data.draw(st.integers(1, lanes))
    own = share(data.draw(st.integers(0, world_size - 1)), world_size, lanes)
    nodes = cover(own, lanes)
    assert [lane for lo, hi in nodes for lane in range(lo, hi)] == list(own)
    assert len(nodes) <= max(1, 2 * math.ceil(math.log2(lanes)) if lanes > 1 else 1)


def test_a_hole_in_the_cover_is_an_error():
    with pytest.raises(KeyError):
        fold({(0, 2): 1.0}, 4, lambda a, b: a + b)
