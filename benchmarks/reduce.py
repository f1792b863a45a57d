"""Where the two ways of the ordered sum cross: gather and two-phase, interleaved, for several world sizes.

Run it on an otherwise idle machine:

    python benchmarks/reduce.py --world-sizes 3 4 8

It prints the median time of each size and writes ``results/reduce_<date>.json``. The smallest size at which
two-phase is quicker belongs into ``evenstep.collectives.GATHER_BELOW_BYTES``. A plain all-reduce, whose bits
depend on the number of processes, is measured beside them as the baseline.
"""

import argparse
import statistics
import time

import record
import torch
import torch.distributed as dist

from evenstep.collectives import Exchange, reduce_by_gather, reduce_two_phase
from evenstep.testing import run_ranks

SIZES = tuple(4096 << k for k in range(11))  # 4 KiB to 4 MiB


def times(world, rounds, sizes=SIZES):
    """``{size: {way: [seconds, ...]}}`` of this rank; the ways take turns, after two rounds of warming up."""
    exchange = Exchange.of(world)
    found = {size: {"all-reduce": [], "gather": [], "two-phase": []} for size in sizes}
    for turn in range(rounds + 2):
        for size in sizes:
            nodes = [torch.ones(size // 4) for _ in exchange.covers[world.rank]]
            out = torch.empty(size // 4)
            ways = {
                "all-reduce": lambda out=out: dist.all_reduce(out),
                "gather": lambda nodes=nodes, out=out: out.copy_(reduce_by_gather(nodes, exchange)),
                "two-phase": lambda nodes=nodes, out=out: reduce_two_phase(nodes, exchange, out),
            }
            names = list(ways)
            for name in names[turn % 3 :] + names[: turn % 3]:
                dist.barrier()
                start = time.perf_counter()
                ways[name]()
                if turn >= 2:
                    found[size][name].append(time.perf_counter() - start)
    return found


def summary(samples):
    """Median and the quartiles, in microseconds."""
    low, median, high = statistics.quantiles([s * 1e6 for s in samples], n=4)
    return {"median_us": round(median, 1), "quartiles_us": [round(low, 1), round(high, 1)]}


def crossover(rows):
    """The smallest size from which on two-phase has the lower median at every size; None if there is none."""
    sizes = sorted(rows)
    for index, size in enumerate(sizes):
        if all(rows[s]["two-phase"]["median_us"] < rows[s]["gather"]["median_us"] for s in sizes[index:]):
            return size
    return None


def main():
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--lanes", type=int, help="default: as many as processes")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    results = {}
    for world_size in options.world_sizes:
        lanes = options.lanes or world_size
        measured = run_ranks(times, world_size, options.rounds, lanes=lanes)[0]
        rows = {size: {way: summary(s) for way, s in ways.items()} for size, ways in measured.items()}
        results[world_size] = {"lanes": lanes, "crossover_bytes": crossover(rows), "sizes": rows}
        print(f"{world_size} processes, {lanes} lanes: medians in microseconds")
        print(f"{'bytes':>9} {'all-reduce':>11} {'gather':>11} {'two-phase':>11}")
        for size, row in rows.items():
            print(f"{size:>9} " + " ".join(f"{row[way]['median_us']:>11.0f}" for way in row))
        print(f"two-phase is quicker from {results[world_size]['crossover_bytes']} bytes on\n", flush=True)
    record.keep("reduce", rounds=options.rounds, world_sizes=results)


if __name__ == "__main__":
    main()
