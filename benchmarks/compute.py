"""Where images, evaluation and pooling take their time on one core.

    python benchmarks/compute.py [--rounds 9]

Prints CPU time in microseconds for each image, medians of rounds in which all variants take turns:

* chunks: an evaluation of 2,000 images in chunks of so many, and the first chunk of each size in a process
  that has trained before (each first one in a process of its own);
* pooling: torch's max-pooling, with and without its backward pass, and ways around it with the same values;
* format: a training step of net with images in channels_last and contiguous;
* reading: images as evenstep reads them, and one by one from a Dataset.
"""

import argparse
import statistics
import time

import numpy as np
import record
import torch
from torch import nn

from evenstep import ImageArrays, launch
from evenstep.data.batch import laid_out
from evenstep.data.fetch import Part, Reading, Request, read_arrays, read_items
from evenstep.metrics import classification, cross_entropy
from evenstep.models import Net
from evenstep.pooling import MaxPool2x2

SIZES = (16, 32, 64, 125, 250, 500)
BATCH = 64


class MaximaBothWays(torch.autograd.Function):
    """2x2 max-pooling as three maxima, with the gradient of torch's kernel: to the first largest value."""

    @staticmethod
    def forward(ctx, x):
        """Return the largest of each 2x2 pixels."""
        pairs = torch.maximum(x[..., 0::2], x[..., 1::2])
        ctx.save_for_backward(x, pairs)
        return torch.maximum(pairs[..., 0::2, :], pairs[..., 1::2, :])

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient: 0 for all but one pixel of the four."""
        x, pairs = ctx.saved_tensors
        whole = torch.int32 if x.dtype == torch.float32 else torch.int16
        sign = 31 if x.dtype == torch.float32 else 15
        grad_pairs, grad_x = torch.empty_like(pairs), torch.empty_like(x)

        def split(grad, first, second, grad_first, grad_second):
            takes_second = torch.sub(first, second).view(whole).bitwise_right_shift_(sign)  # all ones, or 0
            torch.bitwise_and(grad.view(whole), takes_second, out=grad_second.view(whole))
            torch.bitwise_xor(grad.view(whole), grad_second.view(whole), out=grad_first.view(whole))

        rows, columns = slice(0, None, 2), slice(1, None, 2)
        split(grad, *(t[..., s, :] for t in (pairs, grad_pairs) for s in (rows, columns)))
        split(grad_pairs, *(t[..., s] for t in (x, grad_x) for s in (rows, columns)))
        return grad_x


class WithPool(Net):
    """Net with another pooling layer."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool


class Both(nn.Module):
    """The layer of MaximaBothWays."""

    def forward(self, x):
        """Return the largest of each 2x2 pixels."""
        return MaximaBothWays.apply(x)


def images(n):
    """Return n random images and their labels."""
    rng = np.random.default_rng(0)
    return ImageArrays(rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n))


def batch(data, size, start=0):
    """Return the images from ``start`` on as evenstep reads them."""
    part = Part(0, size, tuple(range(start, start + size)))
    return read_arrays(data, Request(0, (part,)), Reading(0), options=None, normalize=None)[0]


def trained(pool=None, steps=3, precision="fp32", layout=None):
    """Return a model that has been trained for some steps, and a function that does one more."""
    torch.manual_seed(0)
    model = WithPool(pool or MaxPool2x2())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = laid_out(batch(images(BATCH), BATCH), layout)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cross_entropy()(model, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        step()
    return model, step


def in_turns(variants, rounds, num_images):
    """Return for each variant the median CPU time of a call in microseconds for each image."""
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            begun = time.process_time()
            call()
            times[name].append(time.process_time() - begun)
    return {name: round(statistics.median(values) * 1e6 / num_images, 1) for name, values in times.items()}


def evaluate(model, data, size):
    """Evaluate ``data`` in chunks."""
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(data), size):
            classification(model, batch(data, min(size, len(data) - start), start))


def first_chunk(_world, size):
    """Return the microseconds for each image of the first chunk after training."""
    model, _ = trained()
    data = images(size)
    return in_turns({"first": lambda: evaluate(model, data, size)}, 1, size)["first"]


def measure(_world, rounds):
    """Return all tables but the first chunks."""
    data = images(2000)
    model, _ = trained()
    chunks = {size: (lambda size=size: evaluate(model, data, size)) for size in SIZES}
    tables = {"chunk": in_turns(chunks, rounds, len(data))}
    pools = {"torch": nn.MaxPool2d(2), "maxima": MaxPool2x2(), "maxima, backward too": Both()}
    for precision in ("fp32", "bf16"):
        steps = {
            name: trained(pool, precision=precision)[1] for name, pool in pools.items() if name != "maxima"
        }
        tables[f"training step, {precision}, pooling"] = in_turns(steps, rounds, BATCH)
        layouts = ("channels_last", "contiguous")
        steps = {name: trained(precision=precision, layout=name)[1] for name in layouts}
        tables[f"training step, {precision}, format"] = in_turns(steps, rounds, BATCH)
        hidden = torch.randn(BATCH, 64, 32, 32).contiguous(memory_format=torch.channels_last)
        hidden = hidden.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        with torch.inference_mode():
            calls = {
                name: (lambda pool=pool, hidden=hidden: pool(hidden))
                for name, pool in list(pools.items())[:2]
            }
            tables[f"pooling without a gradient, {precision}"] = in_turns(calls, rounds, BATCH)
    items = Part(0, BATCH, tuple(range(BATCH)))
    tables["reading"] = in_turns(
        {
            "whole batch": lambda: batch(data, BATCH),
            "one by one": lambda: list(read_items(data, [Request(0, (items,))], Reading(0))),
        },
        rounds,
        BATCH,
    )
    return tables


def main():
    """Measure, print, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    tables = launch(measure, options.rounds, nproc=1, device="cpu", threads=1)
    tables["first chunk"] = {
        size: launch(first_chunk, size, nproc=1, device="cpu", threads=1) for size in SIZES
    }
    for title, values in tables.items():
        print(f"{title}: " + ", ".join(f"{name} {value:g} us" for name, value in values.items()))
    record.keep("compute", n=options.rounds, tables=tables)


if __name__ == "__main__":
    main()
