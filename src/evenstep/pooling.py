"""2x2 max-pooling that takes half the time on a CPU where no gradient is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MaxPool2x2(nn.MaxPool2d):
    """``nn.MaxPool2d(2)``, with the same values.

    torch's kernel also writes down which of the four pixels was the largest, 8 bytes for each result, which
    only the backward pass reads. Without gradients three maxima do, in a third to half of the time. With
    gradients it is torch's layer: a backward pass for this forward pass takes longer (docs/log.md).
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest of each 2x2 pixels: (n, C, H // 2, W // 2) of (n, C, H, W)."""
        if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
            out: Tensor = super().forward(x)
            return out
        height, width = (2 * (side // 2) for side in x.shape[-2:])
        pairs = torch.maximum(x[..., :height, 0:width:2], x[..., :height, 1:width:2])
        return torch.maximum(pairs[..., 0::2, :], pairs[..., 1::2, :])
