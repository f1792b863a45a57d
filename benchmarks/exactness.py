"""The price of exactness: a step in exact mode, in fast mode and of a hand-written DDP loop, side by side.

    python benchmarks/exactness.py [--nproc 2] [--models net,10M,100M] [--rounds 12] [--lanes-per-process 1]

All three train in the same processes and take turns, some steps each, in an order that is turned round by
round; so what else the machine does hits all of them alike. Prints the median time of a step, its spread, and
the median of the rounds' ratios to the hand-written loop, and writes benchmarks/results/exactness_DATE.json.
"""

import argparse
import dataclasses
import statistics
import time

import record
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wide import Wide

from evenstep import ImageArrays, Loader, TrainState, cross_entropy, launch, train_step
from evenstep.models import Net, num_parameters

KINDS = ("hand-written DDP", "fast", "exact")


MODELS = {"net": Net, "10M": lambda: Wide(2000, 2), "100M": lambda: Wide(6300, 3)}


def images(n):
    """Return random pictures, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 32, 32, 3), generator=generator, dtype=torch.uint8)
    return ImageArrays(pixels.numpy(), torch.randint(0, 10, (n,), generator=generator).numpy())


def ours(world, make, batch_size, mode):
    """Return a function that does one step of evenstep in ``mode``."""
    world = dataclasses.replace(world, mode=mode)
    model = make()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), world=world)
    batches = Loader(images(batch_size * 4), batch_size, world=world).batches(state)
    loss = cross_entropy()
    return lambda: train_step(state, next(batches), loss)


def by_hand(world, make, batch_size):
    """Return a function that does one step of a plain loop with torch DDP, fed by the same Loader."""
    model = make()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    other = nn.Linear(1, 1)
    at = TrainState(other, torch.optim.SGD(other.parameters(), lr=1), world=world)
    batches = Loader(images(batch_size * 4), batch_size, world=world).batches(at)

    def step():
        parts = next(batches).lanes
        for part in parts:
            inputs, labels = part.data
            with ddp.no_sync() if part is not parts[-1] else torch.enable_grad():
                (nn.functional.cross_entropy(ddp(inputs), labels) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(world, name, batch_size, rounds, steps):
    """Return the seconds a step of each kind took in each round. Collective: every rank must call."""
    make = MODELS[name]
    kinds = {
        "hand-written DDP": by_hand(world, make, batch_size),
        "fast": ours(world, make, batch_size, "fast"),
        "exact": ours(world, make, batch_size, "exact"),
    }
    times = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for turn in range(len(KINDS)):
            kind = KINDS[(number + turn) % len(KINDS)]
            torch.use_deterministic_algorithms(kind == "exact")
            torch.distributed.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                kinds[kind]()
            if number:  # the first round warms up
                times[kind].append((time.perf_counter() - begun) / steps)
    return num_parameters(make())[0], times


def main():
    """Measure, print a table, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--lanes-per-process", type=int, default=1)
    parser.add_argument("--models", default="net,10M,100M")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="steps in a row of each kind")
    asked = parser.parse_args()
    found = {}
    lanes = asked.nproc * asked.lanes_per_process
    for name in asked.models.split(","):
        steps = max(1, asked.steps // (4 if name == "100M" else 1))
        arguments = (name, asked.batch_size, asked.rounds, steps)
        size, times = launch(measure, *arguments, nproc=asked.nproc, lanes=lanes, threads=1, device="cpu")
        print(f"{name}: {size:,} parameters, {asked.nproc} processes x {asked.lanes_per_process} lanes")
        for kind in KINDS:
            ratios = [t / base for t, base in zip(times[kind], times[KINDS[0]], strict=True)]
            low, _, high = statistics.quantiles(times[kind], n=4)
            row = {
                "median_ms": 1e3 * statistics.median(times[kind]),
                "quartiles_ms": [1e3 * low, 1e3 * high],
                "ratio": statistics.median(ratios),
            }
            found[f"{name}/{kind}"] = row
            print(
                f"  {kind:<17} {row['median_ms']:9.2f} ms a step  ({1e3 * low:.2f} to {1e3 * high:.2f})  "
                f"{row['ratio']:.3f} x"
            )
    record.keep("exactness", n=asked.rounds, results=found)


if __name__ == "__main__":
    main()
