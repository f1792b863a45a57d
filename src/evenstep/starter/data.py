"""The data: ``--data data:make_data`` opens them on every process."""

from typing import Any

import torch
from torch.utils.data import TensorDataset


def make_data() -> dict[str, Any]:
    """Return the training and the test set, and the names of the classes (or just ``(train, test)``).

    Any torch Dataset will do. Every process must get the same samples in the same order; random transforms
    belong into ``__getitem__``, where evenstep seeds them for each sample.
    """
    return {
        "train": spirals(1200, seed=1),
        "test": spirals(900, seed=2),
        "classes": ("left", "right", "down"),
    }


def spirals(n: int, seed: int) -> TensorDataset:
    """Return n points on three arms: float (n, 2) and int64 (n,)."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.arange(n) % 3
    radius = torch.rand(n, generator=generator)
    angle = 5 * radius + 2.1 * arms + 0.2 * torch.randn(n, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arms)
