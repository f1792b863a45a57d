"""Running statistics of BatchNorm, kept out of the model's state until the step is committed.

In training each lane normalises with its own batch, as each replica of DDP does. The running mean and
variance that come out are not left in the model: every lane starts from the same ones, and the new ones are
the lanes' results averaged with the lanes' shares of the samples, added in tree order. With one lane these
are the bits of plain PyTorch. Until ``commit`` the model holds the old statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class NormStaging:
    """The running statistics of all normalisation layers of one model during one step."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            module
            for module in model.modules()
            if isinstance(module, _NormBase)
            and module.track_running_stats
            and module.running_mean is not None
        ]
        self._floats: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._old_floats: list[Tensor] = []
        self._old_counts: list[Tensor] = []

    def begin(self) -> int:
        """Remember the statistics before the step; return how many numbers a lane will give."""
        active = [module for module in self._modules if module.training]
        self._floats = [b for m in active for b in (m.running_mean, m.running_var) if b is not None]
        self._counts = [m.num_batches_tracked for m in active if m.num_batches_tracked is not None]
        self._old_floats = [buffer.clone() for buffer in self._floats]
        self._old_counts = [count.clone() for count in self._counts]
        return sum(buffer.numel() for buffer in self._floats)

    def take(self, share: float, out: Tensor) -> None:
        """Write the statistics after a lane's forward pass, times ``share``.

        ``rollback`` has to follow, but only after the backward pass: autograd has saved the buffers for it,
        and would notice that they changed.

        Args:
            share: the lane's part of the global batch's samples, 0 to 1.
            out: float64 tensor with as many elements as ``begin`` returned.
        """
        if not self._floats:
            return
        torch.cat([buffer.detach().reshape(-1).double() for buffer in self._floats], out=out)
        out.mul_(share)

    def rollback(self) -> None:
        """Put the statistics back to what they were before the step."""
        with torch.no_grad():
            for now, old in ((self._floats, self._old_floats), (self._counts, self._old_counts)):
                if now:
                    torch._foreach_copy_(now, old)

    def commit(self, total: Tensor) -> None:
        """Make the sum of what the lanes gave the model's statistics; the step counts as one batch."""
        with torch.no_grad():
            parts = torch.split(total, [buffer.numel() for buffer in self._floats])
            for buffer, part in zip(self._floats, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
            for count in self._counts:
                count.add_(1)
