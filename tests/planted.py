"""Code of a user with faults in it, for the tests of evenstep doctor; named planted:NAME."""

import threading

from torch import nn


class Squares:
    """A dataset that keeps something that cannot be pickled."""

    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i * i, i


def with_lambda():
    return Squares(lambda x: x + 1), Squares()


def plain():
    return Squares(), Squares()


def broken():
    raise OSError("the disk with the data is not mounted")


def locked_model():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    return model
