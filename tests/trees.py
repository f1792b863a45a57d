"""The order of the tree over lanes, in the plainest way."""


def subtree(values, node, add):
    """The sum of the values of the lanes [lo, hi): of the left half and the right half."""
    lo, hi = node
    if hi - lo == 1:
        return values[lo]
    mid = (lo + hi) // 2
    return add(subtree(values, (lo, mid), add), subtree(values, (mid, hi), add))


def text_of(node):
    """The same with names of lanes: a text that shows the order."""
    return subtree([str(lane) for lane in range(node[1])], node, lambda a, b: f"({a}+{b})")
