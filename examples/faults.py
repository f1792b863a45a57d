"""Faults on purpose, to see what evenstep says of them: evenstep train --model faults:Raises.

docs/diagnosing.md uses them all.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from evenstep.data import digits
from evenstep.models import Net


def on_last_rank():
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


class Faulty(Net):
    """The small net, with a fault from its fourth training step on."""

    forwards = 0

    def forward(self, images):
        if self.training:
            self.forwards += 1
            if self.forwards > 3:
                self.go_wrong(images)
        return super().forward(images)


class Raises(Net):
    def forward(self, images):
        raise ValueError(f"no head for images of shape {tuple(images.shape)}")


class Dies(Faulty):
    def go_wrong(self, images):
        if on_last_rank():
            os.kill(os.getpid(), signal.SIGKILL)


class Hungry(Faulty):
    def go_wrong(self, images):
        if len(images) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


class Drifts(Faulty):
    def go_wrong(self, images):
        if on_last_rank():
            self.linear.bias.data[0] += 0.5


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(4, 4)


class Digits(Dataset):
    """The built-in digits, one sample at a time."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, index):
        return self.arrays[index]


class SlowDigits(Digits):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)


class HangingDigits(Digits):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > 200 and on_last_rank():
            time.sleep(1000)
        return super().__getitem__(index)


class BrokenDigits(Digits):
    def __getitem__(self, index):
        if index == 700:
            raise OSError("cannot identify image file img-700.jpg")
        return super().__getitem__(index)


def slow():
    train, test = digits.load()
    return SlowDigits(train), test


def hanging():
    train, test = digits.load()
    return HangingDigits(train), test


def broken():
    train, test = digits.load()
    return BrokenDigits(train), test
