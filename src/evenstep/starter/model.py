"""The model: ``--model model:SpiralNet`` makes one on every process."""

import torch
from torch import Tensor, nn


class SpiralNet(nn.Module):
    """Says of points in the plane which arm of a spiral they are from.

    Args:
        num_classes: arms. The command passes it, because it has this name: the data have three classes.
    """

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 64)
        self.middle = nn.Linear(64, 64)
        self.output = nn.Linear(64, num_classes)

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits, float (n, num_classes), of points, float (n, 2)."""
        hidden = torch.relu(self.middle(torch.relu(self.hidden(points))))
        logits: Tensor = self.output(hidden)
        return logits
