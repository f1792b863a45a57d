"""How long a save holds up training: written at once, and written in the background.

    python benchmarks/checkpoint.py [--runs 9] [--dir DIR]

Prints, for net and for a model of 100 million parameters (both with SGD and momentum), the median time for
which the training thread waits in ``state.save()``, with ``wait=True`` and without, taking turns; and the
time until a checkpoint saved in the background is on the disk.
"""

import argparse
import shutil
import statistics
import tempfile
import time

import record
import torch
from torch import nn

from evenstep import TrainState, launch
from evenstep.models import Net, num_parameters


def wide():
    """100 million parameters."""
    return nn.Sequential(nn.Linear(10_000, 9_000), nn.Linear(9_000, 1_111))


def measure(world, name, runs):
    """Return the seconds of saves that wait, of the waiting for others, and until these are on the disk."""
    model = {"net": Net, "100M": wide}[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = TrainState(model, optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # makes the momentum
    at_once, blocked, on_disk = [], [], []
    for _ in range(runs + 1):
        for wait in (True, False):
            state.step += 1
            begun = time.perf_counter()
            state.save(wait=wait, keep=1)
            between = time.perf_counter()
            state.finish_saving()
            if wait:
                at_once.append(between - begun)
            else:
                blocked.append(between - begun)
                on_disk.append(time.perf_counter() - begun)
    return num_parameters(model)[0], at_once[1:], blocked[1:], on_disk[1:]


def summary(seconds):
    """Return median and quartiles in milliseconds."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"ms": round(median * 1e3, 2), "quartiles_ms": [round(low * 1e3, 2), round(high * 1e3, 2)]}


def main():
    """Measure, print, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dir", default=None, help="where to write; by default the temporary directory")
    options = parser.parse_args()
    rows = []
    for name in ("net", "100M"):
        directory = tempfile.mkdtemp(dir=options.dir)
        try:
            count, at_once, blocked, on_disk = launch(
                measure, name, options.runs, nproc=1, threads=1, device="cpu", run_dir=directory
            )
        finally:
            shutil.rmtree(directory)
        row = {
            "model": name,
            "parameters": count,
            "at_once": summary(at_once),
            "background": summary(blocked),
            "background_on_disk": summary(on_disk),
        }
        rows.append(row)
        print(
            f"{name:>5}: {count:>11,} parameters; training waits {row['at_once']['ms']:9.2f} ms at once, "
            f"{row['background']['ms']:8.2f} ms in the background (on the disk after "
            f"{row['background_on_disk']['ms']:9.2f} ms)",
            flush=True,
        )
    record.keep("checkpoint", n=options.runs, rows=rows)


if __name__ == "__main__":
    main()
