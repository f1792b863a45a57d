"""A stream without an end: what a sensor on a machine reads, and whether its bearing knocks."""

import argparse
from itertools import islice

import numpy as np
import torch
from torch import nn

from evenstep import weights_sha256


def reading(number):
    """Return reading ``number``: float32 (1, 64), and 1. if the bearing knocks, else 0."""
    random = np.random.default_rng(number)
    signal = np.sin(random.uniform(0.1, 0.5) * np.arange(64)) + 0.3 * random.standard_normal(64)
    knocks = random.random() < 0.5
    if knocks:
        signal[random.integers(8) :: 8] += 1
    return signal.astype(np.float32)[None], np.float32(knocks)


class Readings(torch.utils.data.IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return map(reading, self.numbers)


def loss(model, batch):
    signals, knocks = batch
    return nn.functional.binary_cross_entropy_with_logits(model(signals), knocks)


def main(args):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 16, 5), nn.ReLU(), nn.Conv1d(16, 16, 9, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 26, 1), nn.Flatten(0),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    train = torch.utils.data.DataLoader(Readings(range(10**9)), batch_size=64)
    for batch in islice(train, args.steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    held_out = Readings(range(10**9, 10**9 + 1000))
    (batch,) = torch.utils.data.DataLoader(held_out, batch_size=1000)
    with torch.no_grad():
        accuracy = ((model(batch[0]) > 0) == (batch[1] > 0)).float().mean().item()
    return accuracy, weights_sha256(model.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    accuracy, digest = main(args)
    print(f"accuracy {accuracy:.3f}, weights {digest[:16]}")
