"""Step time and efficiency on 8 to 1,024 GPUs, on paper: the ordered sum beside the ring and the double tree.

    python benchmarks/scaling.py                 print the tables of docs/scaling.md
    python benchmarks/scaling.py --write         put them into that page
    python benchmarks/scaling.py --calibrate     measure here with gloo, and compare (about two minutes)

A cost model (latency, bandwidth, addition; sources in the page) of one sum, and a simulation of one step in
which DDP's buckets become ready one after the other during backward. Nothing is measured but in --calibrate.
"""

import argparse
import dataclasses
import math
import re
from pathlib import Path

import record
from clusters import A100, CASES, H100, V100

from evenstep.collectives import gather_below_bytes
from evenstep.tree import cover, merges_after_lane
from evenstep.world import share

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
MIB = 1024 * 1024
BUCKET, FIRST_BUCKET = 25 * MIB, MIB  # of torch DDP
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
TREE_SHARE = 0.92  # of the ring's bandwidth: NCCL's own model (src/graph/tuning.cc)


def crowded(machines, world_size):
    """Return the machines as processes meet them that share cores: everything that computes is slower.

    A message over loopback is computing, too: the kernel copies it on the cores that the processes use. And
    its receiver is on none of them with a chance of 1 - cores / processes; then it waits for a turn.
    """
    if machines.cores is None or world_size <= machines.cores:
        return machines
    slower = world_size / machines.cores
    return dataclasses.replace(
        machines,
        inside_s=machines.inside_s + (1 - 1 / slower) * machines.turn_s,
        inside_bytes_per_s=machines.inside_bytes_per_s / slower,
        added_bytes_per_s=machines.added_bytes_per_s / slower,
        launch_s=machines.launch_s * slower,
    )


def waiting_s(machines, world_size, meetings):
    """Return what the meetings of a step wait for the last process, where processes share cores: else 0.

    Between two meetings each process computes, and with more processes than cores they come one after the
    other. The form was chosen after two points of a busy machine had been seen (docs/scaling.md).
    """
    if machines.cores is None:
        return 0.0
    return meetings * machines.last_s * math.log2(max(1.0, world_size / machines.cores))


def num_machines(machines, world_size):
    """Return how many machines a run has."""
    return -(-world_size // machines.gpus)


def path_bytes_per_s(machines, world_size):
    """Return what a ring or a tree through all GPUs reaches: all network cards of a machine work for it."""
    if num_machines(machines, world_size) == 1:
        return machines.inside_bytes_per_s
    return min(machines.inside_bytes_per_s, machines.gpus * machines.between_bytes_per_s)


def _hops(machines, world_size, steps, crossings):
    crossings = min(steps, crossings) if num_machines(machines, world_size) > 1 else 0
    return (steps - crossings) * machines.inside_s + crossings * machines.between_s


def ring(machines, n, world_size):
    """Return the parts of a ring all-reduce of n bytes in seconds (Thakur et al. 2005; hops as in NCCL)."""
    steps = 2 * (world_size - 1)
    moved = n * (world_size - 1) / world_size
    return {
        "calls": machines.call_s,
        "hops": _hops(machines, world_size, steps, 2 * num_machines(machines, world_size)),
        "bytes": 2 * moved / path_bytes_per_s(machines, world_size),
        "adding": moved / machines.added_bytes_per_s,
    }


def double_tree(machines, n, world_size):
    """Return the parts of an all-reduce along two trees (Sanders et al. 2009, as NCCL has it)."""
    levels = math.ceil(math.log2(num_machines(machines, world_size)))
    chain = min(machines.gpus, world_size) - 1
    return {
        "calls": machines.call_s,
        "hops": 2 * (chain * machines.inside_s + levels * machines.between_s),
        "bytes": 2 * n / (TREE_SHARE * path_bytes_per_s(machines, world_size)),
        "adding": n / machines.added_bytes_per_s,
    }


def _all_gather(machines, n, world_size):
    """Return (hops, bytes) in seconds of a ring all-gather whose result has n bytes."""
    crossings = num_machines(machines, world_size) - 1
    moved = n * (world_size - 1) / world_size
    return _hops(machines, world_size, world_size - 1, crossings), moved / path_bytes_per_s(
        machines, world_size
    )


def _all_to_all(machines, n, inside, between):
    """Return (messages, bytes) in seconds.

    Args:
        machines: the machines.
        n: bytes that a process keeps and sends, in equal parts.
        inside: to how many other processes of its machine.
        between: to how many on other machines; a process has its own network card alone for them.
    """
    part = n / (inside + between + 1)
    moved = max(
        part * inside / machines.inside_bytes_per_s,
        part * between / machines.between_bytes_per_s,
    )
    first = machines.between_s if between else machines.inside_s
    return first + max(0, inside + between - 1) * machines.message_s, moved


def _adding(machines, rows, n, *, by_level=False):
    """Return (starts, bytes) in seconds of adding rows of n bytes, one by one or a tree level at once."""
    starts = math.ceil(math.log2(rows)) if by_level and rows > 1 else rows - 1
    return starts * machines.launch_s, (rows - 1) * n / machines.added_bytes_per_s


def num_nodes(lanes, parts):
    """Return the subtrees of each of ``parts`` equal parts of the lanes."""
    return [len(cover(share(part, parts, lanes), lanes)) for part in range(parts)]


def two_phase(machines, n, world_size, *, lanes=None, by_level=False):
    """Return the parts of collectives.reduce_two_phase in seconds: all-to-all, ordered fold, all-gather."""
    nodes = num_nodes(lanes or world_size, world_size)
    inside = min(machines.gpus, world_size) - 1
    messages, sent = _all_to_all(machines, n * max(nodes), inside, world_size - 1 - inside)
    starts, added = _adding(machines, sum(nodes), n / world_size, by_level=by_level)
    hops, handed = _all_gather(machines, n, world_size)
    return {
        "calls": 2 * machines.call_s,
        "messages": messages,
        "all-to-all bytes": sent,
        "starts": starts,
        "adding": added,
        "hops": hops,
        "all-gather bytes": handed,
    }


def gather(machines, n, world_size, *, lanes=None):
    """Return the parts of collectives.reduce_by_gather in seconds: everybody gets everything and folds it."""
    nodes = num_nodes(lanes or world_size, world_size)
    hops, handed = _all_gather(machines, n * max(nodes) * world_size, world_size)
    starts, added = _adding(machines, sum(nodes), n)
    return {
        "calls": machines.call_s,
        "hops": hops,
        "all-gather bytes": handed,
        "starts": starts,
        "adding": added,
    }


def evenstep(machines, n, world_size):
    """Return the parts of the sum as collectives.reduce_nodes chooses it, with a lane a process."""
    if world_size == 2:
        return ring(machines, n, world_size)
    if n < gather_below_bytes(world_size):
        return gather(machines, n, world_size)
    return two_phase(machines, n, world_size)


def by_level(machines, n, world_size):
    """Return the parts of a two-phase sum that adds all pairs of one level of the tree at once."""
    return two_phase(machines, n, world_size, by_level=True)


def hierarchical(machines, n, world_size):
    """Return the parts of the same tree, inside each machine first: two-phase in it, then between machines.

    Process i of each machine folds chunk i of its machine's lanes, exchanges it with the processes i of the
    other machines, folds again; the chunks go back the same way.
    """
    others = num_machines(machines, world_size)
    if others == 1:
        return by_level(machines, n, world_size)
    inside = machines.gpus
    nodes = num_nodes(world_size, others)
    most = max(nodes)
    first, sent = _all_to_all(machines, n * most, inside - 1, 0)
    second, crossed = _all_to_all(machines, n * most / inside, 0, others - 1)
    starts, added = _adding(machines, inside, n / inside, by_level=True)
    more_starts, more_added = _adding(machines, sum(nodes), n / world_size, by_level=True)
    moved = n / inside * (others - 1) / others
    return {
        "calls": 4 * machines.call_s,
        "messages": first + second,
        "all-to-all bytes": sent + crossed,
        "starts": starts + more_starts,
        "adding": added + more_added,
        "hops": (others - 1) * machines.between_s + (inside - 1) * machines.inside_s,
        "all-gather bytes": moved / machines.between_bytes_per_s
        + n * (inside - 1) / inside / machines.inside_bytes_per_s,
    }


WAYS = {
    "ring": ring,
    "double tree": double_tree,
    "evenstep": evenstep,
    "by level": by_level,
    "hierarchical": hierarchical,
}


def buckets(n):
    """Return the sizes of DDP's buckets for n bytes of gradients, in the order in which they are ready."""
    sizes = [min(n, FIRST_BUCKET)]
    while (rest := n - sum(sizes)) > 0:
        sizes.append(min(rest, BUCKET))
    return sizes


OURS = (evenstep, by_level, hierarchical)


def step_s(machines, work, world_size, way):
    """Return the seconds of one step: buckets are summed one after the other while backward goes on.

    A third of the time is forward; a bucket is ready when backward has come through its share of the bytes.
    evenstep sums a vector of loss and statistics before them, as soon as forward is done.
    On shared cores nothing overlaps: sums and backward wait for the same cores, and so do all processes. They
    meet after backward; with evenstep after forward, too. The buckets of one backward are one meeting.
    """
    if world_size == 1:
        return work.compute_s
    crowd = crowded(machines, world_size)
    sizes = [work.vector_bytes] * (way in OURS) + buckets(work.gradient_bytes)
    costs = [sum(way(crowd, size, world_size).values()) for size in sizes]
    if machines.cores is not None:
        waiting = waiting_s(machines, world_size, 1 + (way in OURS))
        return max(1.0, world_size / machines.cores) * work.compute_s + sum(costs) + waiting
    done, ready = 0, work.compute_s / 3
    if way in OURS:
        del sizes[0]
        ready += costs.pop(0)
    for size, cost in zip(sizes, costs, strict=True):
        done += size
        ready = max(ready, work.compute_s / 3 * (1 + 2 * done / work.gradient_bytes)) + cost
    return max(work.compute_s, ready)


def copies(lanes, world_size):
    """Return the most lane gradients that a process keeps besides the one in DDP's buckets."""
    most = 0
    for rank in range(world_size):
        height = 0
        for merges in merges_after_lane(share(rank, world_size, lanes), lanes)[:-1]:
            most = max(most, height + 1)
            height += 1 - merges
    return most


def table(header, rows):
    """Return a table in Markdown, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|" + "|".join(" --- " if index == 0 else " ---: " for index in range(len(header))) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _giga(rate):
    return f"{rate / 1e9:,.0f}" if rate > 1e11 else f"{rate / 1e9:.3g}"


def numbers_table(kinds, places=1):
    """Return the numbers of machines: what a start or a message costs, and rates."""
    rows = []
    for m in kinds:
        between = m.between_bytes_per_s < float("inf")
        costs = (m.call_s, m.inside_s, m.between_s if between else None, m.message_s, m.launch_s)
        rates = (m.inside_bytes_per_s, m.between_bytes_per_s if between else None, m.added_bytes_per_s)
        row = ["" if cost is None else f"{1e6 * cost:,.{places}f}" for cost in costs]
        rows.append([m.name, *row, *("" if rate is None else _giga(rate) for rate in rates)])
    costs = ("call", "inside", "between", "message", "launch")
    rates = ("inside", "between", "adding")
    return table(["", *(f"{c}, us" for c in costs), *(f"{r}, GB/s" for r in rates)], rows)


def sum_table():
    """Return the time of one sum of a bucket of 25 MiB, for each way."""
    rows = [
        [f"{w:,}", *(f"{1e3 * sum(way(H100, BUCKET, w).values()):.2f}" for way in WAYS.values())]
        for w in SIZES
    ]
    return table(["GPUs", *WAYS], rows)


def parts_table():
    """Return where the time of that sum goes in the two-phase way, and the size of a chunk."""
    names = list(two_phase(H100, BUCKET, 8))
    rows = []
    for w in SIZES:
        parts = two_phase(H100, BUCKET, w)
        rows.append([f"{w:,}", f"{BUCKET / w / 1024:,.0f}", *(f"{1e3 * parts[name]:.2f}" for name in names)])
    return table(["GPUs", "chunk, KiB", *names], rows)


def step_tables():
    """Return for each case the milliseconds of a step and the efficiency in percent."""
    texts = []
    for machines, work in CASES:
        rows = []
        for w in SIZES:
            times = [step_s(machines, work, w, way) for way in WAYS.values()]
            rows.append([f"{w:,}", *(f"{1e3 * t:.1f} ({work.compute_s / t:.0%})" for t in times)])
        alone = f"{work.name}, on {machines.name}: {1e3 * work.compute_s:.0f} ms alone"
        texts.append(f"**{alone}**\n\n{table(['GPUs', *WAYS], rows)}".replace("%", " %"))
    return "\n\n".join(texts)


def limit(machines, world_size):
    """Return the largest power of two of bytes for which the gather is no slower than two-phase."""
    n = 1
    while sum(gather(machines, 2 * n, world_size).values()) <= sum(
        two_phase(machines, 2 * n, world_size).values()
    ):
        n *= 2
    return n


def limits_table():
    """Return these limits for the machines, and what collectives.py has, in KiB."""
    kinds = (H100, A100, V100)
    rows = []
    for w in (4, *SIZES):
        limits = [*(limit(machines, w) for machines in kinds), gather_below_bytes(w)]
        rows.append([f"{w:,}", *(f"{n / 1024:,.0f}" for n in limits)])
    return table(["GPUs", *(machines.name for machines in kinds), "collectives.py"], rows)


def connections_table():
    """Return with how many others a process talks directly."""
    rows = [[f"{w:,}", w - 1, (H100.gpus - 1) + num_machines(H100, w) - 1] for w in SIZES]
    return table(["GPUs", "two-phase", "hierarchical"], rows)


def memory_table():
    """Return the lane gradients that are kept, for some numbers of lanes and processes."""
    counts = (1, 2, 3, 4, 8, 16, 64)
    rows = []
    for lanes in (8, 64, 256, 1024):
        rows.append([f"{lanes:,}", *(copies(lanes, w) if w <= lanes else "" for w in counts)])
    return table(["lanes", *(f"{w} processes" if w > 1 else "1 process" for w in counts)], rows)


def tables():
    """Return the tables of the page by name."""
    import loopback

    return {
        "presets": numbers_table((H100, A100, V100)),
        "sum": sum_table(),
        "parts": parts_table(),
        "steps": step_tables(),
        "limits": limits_table(),
        "connections": connections_table(),
        "memory": memory_table(),
        **loopback.tables(record.newest("scaling")),
    }


def filled(page, texts):
    """Return the page with what is between ``<!-- table: NAME -->`` and ``<!-- end -->`` from ``texts``."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{texts[match[2]]}\n\n{match[3]}",
        page,
        flags=re.S,
    )


def main():
    """Print the tables, write them, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    parser.add_argument("--calibrate", action="store_true", help="measure 1, 2, 4, 8 processes here")
    parser.add_argument("--rounds", type=int, default=3, help="of --calibrate")
    options = parser.parse_args()
    if options.calibrate:
        import loopback

        loopback.calibrate(options.rounds)
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    if not options.calibrate and not options.write:
        for name, text in tables().items():
            print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
