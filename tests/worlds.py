"""What the tests of lanes, step and evaluation share: small models and data, and one short training."""

import numpy as np
import torch
from torch import nn

from evenstep import ImageArrays, Loader, TrainState, cross_entropy, train_step, weights_sha256
from evenstep.data.augment import Augment
from evenstep.world import World


def ranks(world_size, lanes, **options):
    """The worlds of all ranks."""
    return [World(rank=rank, world_size=world_size, lanes=lanes, **options) for rank in range(world_size)]


class SmallNet(nn.Module):
    """A convolution, BatchNorm of both kinds, dropout: all that usually depends on the world size."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16, momentum=None)
        self.drop = nn.Dropout(0.2)
        self.linear = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 2)
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.linear(self.drop(nn.functional.max_pool2d(x, 2).flatten(1)))


def images(n=205, size=16, seed=0):
    generator = np.random.default_rng(seed)
    return ImageArrays(
        generator.integers(0, 256, (n, size, size, 3), dtype=np.uint8), generator.integers(0, 10, n)
    )


def trained(world, *, make=SmallNet, batch_size=50, epochs=2, loss=None, optimizer=None, **options):
    """Train shortly and return the state and the losses of the steps."""
    model = make()
    optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    state = TrainState(model, optimizer(model.parameters()), **options)
    loader = Loader(images(), batch_size, augment=Augment())
    losses = []
    for batch in loader.batches(state, epochs=epochs):
        losses.append(float(train_step(state, batch, loss or cross_entropy()).loss))
    return state, losses


def digest(state):
    """A digest of all that the state holds: weights, buffers, optimizer, moving average."""
    tensors = dict(state.model.state_dict())
    for number, values in state.optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer/{number}/{key}": torch.as_tensor(value)
            for key, value in values.items()
            if value is not None
        }
    if state.ema is not None:
        tensors |= {f"ema/{key}": value for key, value in state.ema.state_dict().items()}
    return weights_sha256(tensors)


def outcome(world, **options):
    """What must not depend on the world size: run with run_ranks."""
    state, losses = trained(world, **options)
    result = digest(state), losses, state.train_loss
    state.lanes.close()
    return result
