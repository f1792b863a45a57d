"""Trainings with planted defects, for test_verify: each breaks the promise of equal bits in its own way."""

import os
import random
import threading
import time

import numpy as np
import torch
from torch import nn

from evenstep import Loader, TrainState, cross_entropy, train_step

CLASSES = 4
WIDTH = 24


class Samples(torch.utils.data.Dataset):
    """Vectors of 24 numbers in 4 classes."""

    def __init__(self, read=lambda dataset, index: dataset.vectors[index]):
        generator = torch.Generator().manual_seed(7)
        self.vectors = torch.randn(64, WIDTH, generator=generator)
        self.read = read

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.read(self, index), index % CLASSES


def network(layer):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def train(world, layer=None, samples=None, workers=0, between=None, dropout=False):
    """The user's own loop."""
    model = network((layer or nn.Identity)())
    if dropout:
        model.append(nn.Dropout(0.5))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with Loader((samples or Samples)(), 16, workers=workers) as loader:
        for batch in loader.batches(state, epochs=3):
            train_step(state, batch, cross_entropy())
            if between is not None:
                between(world, state)


class RankNoise(nn.Module):
    """Noise from a generator of its own, seeded by rank, as one does to get other noise on every GPU."""

    def __init__(self):
        super().__init__()
        from evenstep import world

        self.generator = torch.Generator().manual_seed(world.current().rank)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class NewRankNoise(nn.Module):
    """The same with a new generator in each pass: it repeats itself on its rank."""

    def forward(self, x):
        rank = torch.distributed.get_rank()
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(rank))


class Norm(nn.Module):
    """A BatchNorm of the user's own writing, whose running mean is a plain attribute and no buffer."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class BufferNorm(Norm):
    """The same with a registered buffer: evenstep stages it, so there is nothing wrong with it."""

    def __init__(self):
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(WIDTH))


class SetSum(nn.Module):
    """Adds terms in the order of a set of strings."""

    def forward(self, x):
        names = {f"scale{i}" for i in range(8)}
        out = torch.zeros_like(x)
        for name in names:
            out = out + x * (0.1 + 1 / (3 + int(name[5:])))
        return out


class Racing(nn.Module):
    """Adds parts in the order in which threads get done.

    It stands for the operators of GPUs that add with atomics (index_add, scatter_add, the backward pass of an
    embedding): the parts are always the same, the order is not.
    """

    def forward(self, x):
        parts, lock = [], threading.Lock()
        start = threading.Barrier(12)

        def work(i):
            start.wait()
            time.sleep(1e-4)  # as if it computed; the order in which threads wake up is the system's
            part = x * (0.1 + 1 / (3 + i))
            with lock:
                parts.append(part)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.stack(parts).cumsum(0)[-1] + parts[0] * 1e-3


class RacingBackward(nn.Module):
    """The same in the backward pass only, as that of an embedding on a GPU."""

    def forward(self, x):
        out = x * 1.0
        out.register_hook(Racing().forward)
        return out


class Put(nn.Module):
    """Uses an operator that torch has no deterministic kernel for, on CPU as well."""

    def forward(self, x):
        index = torch.zeros(2, dtype=torch.int64)
        return x + torch.zeros(3).put_(index, torch.ones(2))[1]


class Entropy(nn.Module):
    def forward(self, x):
        return x * random.SystemRandom().random()


class ThreadsByWorld(nn.Module):
    """What launch scripts do: all cores for one process, fewer for each of several."""

    def __init__(self):
        super().__init__()
        from evenstep import world

        torch.set_num_threads(3 - world.current().world_size)

    def forward(self, x):
        return x


def clock(dataset, index):
    return dataset.vectors[index] + (time.time() % 1)


def own_generator(dataset, index):
    if not hasattr(dataset, "generator"):
        dataset.generator = np.random.default_rng(0)
    return dataset.vectors[index] * dataset.generator.random(dtype=np.float32)


def urandom(dataset, index):
    return dataset.vectors[index] + os.urandom(1)[0] / 256


def rank_of_process(dataset, index):
    return dataset.vectors[index] + torch.distributed.get_rank()


def one_rank_decays(world, state, at=2):
    """A line of the loop that only rank 0 reaches."""
    if world.is_first and state.step == at:
        with torch.no_grad():
            state.model[0].weight.mul_(0.5)


def swallowing(world):
    """A loop that survives every Exception must be ended all the same."""
    model = network(nn.Identity())
    state = TrainState(model, torch.optim.Adam(model.parameters()))
    for batch in Loader(Samples(), 16).batches(state, epochs=50):
        try:
            train_step(state, batch, cross_entropy())
        except Exception:
            continue
    raise AssertionError("not ended")


def no_steps(world):
    """A main that trains in a way of its own."""


def rank_noise(world):
    train(world, RankNoise)


def clean(world):
    train(world)


def time_in_weights(world):
    torch.manual_seed(time.time_ns() % 2**31)
    train(world)


def ends_by_rank(world):
    """Ends after another number of steps for another number of processes."""
    model = network(nn.Identity())
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in Loader(Samples(), 16).batches(state, steps=1 + world.world_size):
        train_step(state, batch, cross_entropy())


def rank_dependent_batch(world):
    model = network(nn.Identity())
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in Loader(Samples(), 16, seed=world.world_size).batches(state, epochs=1):
        train_step(state, batch, cross_entropy())


def sum_for_mean(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")


def wrong_loss(world):
    model = network(nn.Identity())
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    for batch in Loader(Samples(), 16).batches(state, epochs=1):
        train_step(state, batch, sum_for_mean)
