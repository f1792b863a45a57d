"""The order in which lane values are added: one balanced binary tree over lane numbers.

The tree over ``[lo, hi)`` is a leaf when it holds one lane, else the sum of the trees over ``[lo, mid)``
and ``[mid, hi)`` with ``mid = (lo + hi) // 2``. Floating-point addition is commutative but not associative,
so the bits of a sum depend on the shape of this tree and on nothing else: not on which process holds which
lane.

A process owns contiguous lanes. It can add up the subtrees that lie wholly inside them (its cover); what is
above them needs values of other processes. Everything here is arithmetic on lane numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
"""The subtree over the lanes ``[lo, hi)``."""

T = TypeVar("T")


def middle(node: Node) -> int:
    """Return the lane at which ``node`` is split in two."""
    return (node[0] + node[1]) // 2


def cover(own: range, lanes: int) -> tuple[Node, ...]:
    """Return the fewest subtrees of the tree over ``lanes`` lanes that make up ``own``, in lane order.

    There are at most ``2 * log2(lanes)`` of them, and one when ``own`` is a subtree itself.
    """

    def parts(node: Node) -> tuple[Node, ...]:
        lo, hi = node
        if hi <= own.start or own.stop <= lo:
            return ()
        if own.start <= lo and hi <= own.stop:
            return (node,)
        mid = middle(node)
        return parts((lo, mid)) + parts((mid, hi))

    return parts((0, lanes)) if own else ()


def merges_after_lane(own: range, lanes: int) -> tuple[int, ...]:
    """Return, for each lane of ``own``, how many sums to make once its value is there.

    With the values on a stack, lane after lane: push the lane's value, then that many times replace the two
    on top by their sum. After the last lane the stack holds the sums of ``cover(own, lanes)`` in order. This
    is the evaluation of each subtree in post-order, so the stack is never higher than ``log2(lanes) + 1``
    above the finished subtrees.
    """

    def ends(node: Node, lane: int) -> int:
        lo, hi = node
        if hi - lo == 1:
            return 0
        mid = middle(node)
        inner = (lo, mid) if lane < mid else (mid, hi)
        return ends(inner, lane) + (1 if lane == hi - 1 else 0)

    nodes = cover(own, lanes)
    return tuple(ends(next(node for node in nodes if node[0] <= lane < node[1]), lane) for lane in own)


def fold(values: Mapping[Node, T], lanes: int, add: Callable[[T, T], T]) -> T:
    """Return the value of the whole tree from the values of subtrees that cover it.

    Args:
        values: one value for each of some disjoint subtrees that together hold all lanes.
        lanes: the number of lanes.
        add: the sum of a left and a right value; it may reuse their memory.

    Raises:
        KeyError: the subtrees do not cover the tree.
    """

    def value(node: Node) -> T:
        if node in values:
            return values[node]
        if node[1] - node[0] <= 1:
            raise KeyError(node)
        mid = middle(node)
        return add(value((node[0], mid)), value((mid, node[1])))

    return value((0, lanes))
