"""What is trained for, and what is measured: ``--loss objective:loss --metrics objective:metrics``."""

from typing import Any

import torch
from torch import Tensor, nn


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over the samples of the batch, or a pair (sum, count).

    ``batch`` is what your Dataset gives, many samples together. It is a part of the global batch: the parts
    are weighted by their sizes, so that the gradient is that of the mean over all.
    """
    points, arms = batch
    return nn.functional.cross_entropy(model(points), arms)


def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return for each name one value a sample, shape (n,). The means over the test set are reported."""
    points, arms = batch
    shares = torch.softmax(model(points), dim=1)
    return {"accuracy": shares.argmax(dim=1) == arms, "confidence": shares.amax(dim=1)}
