"""Models of a user, named on the command line as own_models:NAME."""

import torch
from torch import nn


class NormNet(nn.Module):
    """BatchNorm and dropout: what usually depends on the number of processes."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Dropout(0.1),
        )
        self.linear = nn.Linear(16 * 8 * 8, num_classes)

    def forward(self, x):
        return self.linear(self.features(x).flatten(1))


def five_outputs():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))


def explodes():
    class Explodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3 * 32 * 32, 10)

        def forward(self, x):
            return self.linear(x.flatten(1)) * torch.tensor(float("inf"))

    return Explodes()


def raises():
    class Raises(NormNet):
        def forward(self, x):
            raise ValueError("the head fell off")

    return Raises()


def hungry():
    """As NormNet, but from its fourth step on no more than 16 samples of training fit into memory."""

    class Hungry(NormNet):
        forwards = 0

        def forward(self, x):
            if self.training:
                self.forwards += 1
                if self.forwards > 3 and len(x) > 16:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")
            return super().forward(x)

    return Hungry()
