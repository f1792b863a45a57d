"""A model that is all weights: as few operations for each parameter as there can be."""

import itertools

import torch
from torch import nn


class Wide(nn.Module):
    """``depth`` hidden layers of ``width`` for images of 3x32x32 and 10 classes.

    Communication and checks weigh most here, since there is little else to do.
    """

    def __init__(self, width, depth):
        super().__init__()
        sizes = [3072] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        """Return the logits."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)
