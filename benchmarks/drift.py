"""Cost of the drift alarm: the checksum of all weights and the comparison, beside a training step.

    python benchmarks/drift.py [--runs 30] [--nproc 2] [--batch-size 128]

Prints, for net and for a model of 10 million parameters, the median time of one check and of one step on
rank 0, check and step taking turns, and what a check every 100 steps adds.
"""

import argparse
import statistics
import time

import record
import torch
from wide import Wide

from evenstep import Loader, TrainState, cross_entropy, launch, train_step
from evenstep.drift import check_drift
from evenstep.models import Net, num_parameters


def measure(world, name, runs, batch_size):
    """Return the times of checks and steps in seconds. Collective: every rank must call."""
    model = Net() if name == "net" else Wide(3243, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    size = batch_size * 4
    data = torch.utils.data.TensorDataset(torch.randn(size, 3, 32, 32), torch.arange(size) % 10)
    checks, steps = [], []
    for batch in Loader(data, batch_size).batches(state, steps=runs + 3):
        begun = time.perf_counter()
        train_step(state, batch, cross_entropy())
        between = time.perf_counter()
        check_drift(model, state.step, world)
        checks.append(time.perf_counter() - between)
        steps.append(between - begun)
    state.lanes.close()
    return num_parameters(model)[0], checks[3:], steps[3:]


def main():
    """Measure, print, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    rows = []
    for name in ("net", "10M"):
        count, checks, steps = launch(
            measure, name, options.runs, options.batch_size, nproc=options.nproc, device="cpu", threads=1
        )
        check, step = statistics.median(checks), statistics.median(steps)
        low, _, high = statistics.quantiles(checks, n=4)
        rows.append(
            {
                "model": name,
                "parameters": count,
                "check_ms": round(check * 1e3, 3),
                "check_quartiles_ms": [round(low * 1e3, 3), round(high * 1e3, 3)],
                "step_ms": round(step * 1e3, 1),
                "every_100_steps": f"{check / step / 100:.4%}",
            }
        )
        print(
            f"{name:>4}: {count:>10,} parameters, check {check * 1e3:7.2f} ms, step {step * 1e3:7.1f} ms, "
            f"every 100 steps {check / step / 100:.4%}",
            flush=True,
        )
    record.keep("drift", n=options.runs, nproc=options.nproc, rows=rows)


if __name__ == "__main__":
    main()
