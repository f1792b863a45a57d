"""Checks of this project; run them with python -m pytest test_project.py."""

from evenstep.testing import run_ranks

import train
from data import make_data
from model import SpiralNet
from objective import loss, metrics


def test_the_parts_fit_together() -> None:
    """The model takes a batch of the data, the loss is one number, the metrics have one value a sample."""
    data = make_data()
    batch = data["test"][:7]
    model = SpiralNet(num_classes=len(data["classes"]))
    assert loss(model, batch).shape == ()
    assert all(values.shape == (7,) for values in metrics(model, batch).values())


def test_training_learns_the_same_on_one_process_and_on_two() -> None:
    """All of train.py, compared to the last bit."""
    one, two = (run_ranks(train.main, n, lanes=4)[0] for n in (1, 2))
    assert one == two
    assert one["accuracy"] > 0.9
