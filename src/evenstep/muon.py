"""The optimizer Muon: steps along orthogonalised momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, optim

NEWTON_SCHULZ_STEPS = 3
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(optim.Optimizer):
    """Muon for the groups with ``orthogonal``, SGD with Nesterov momentum for the others.

    A weight of an orthogonal group is taken as a matrix of one row per output. Its step is the Nesterov
    momentum of its gradient with all singular values brought near 1, and before the step the weight is scaled
    to the norm sqrt(outputs). So these layers should be followed by a normalisation layer, which does not see
    the scale. Weight decay would do nothing there and is for the other groups.

    Source: Keller Jordan and others, "Muon: An optimizer for hidden layers in neural networks" (2024,
    https://kellerjordan.github.io/posts/muon), in the form of airbench94_muon.py
    (https://github.com/KellerJordan/cifar10-airbench): 3 Newton-Schulz steps, weights of fixed norm.
    torch.optim.Muon (torch 2.9) takes 2-dimensional weights only and has no fixed norm.

    Args:
        params: groups; each with ``orthogonal`` and ``bf16`` (whether its steps are made orthogonal in
            bfloat16; see :func:`compute_in`), and the rest as below where it differs.
        lr: learning rate.
        momentum: momentum.
        weight_decay: weight decay, added to the gradient.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.6, weight_decay: float = 0.0
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        defaults |= {"orthogonal": False, "bf16": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step.

        Args:
            closure: computes the loss again, as for every torch optimizer.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad
                if group["weight_decay"] and not group["orthogonal"]:
                    gradient = gradient.add(p, alpha=group["weight_decay"])
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
                update = gradient.add(buffer, alpha=group["momentum"])
                if group["orthogonal"]:
                    p.mul_(len(p) ** 0.5 / p.norm().clamp_min(1e-12))  # all zeros stay zeros
                    update = orthogonalised(update, bf16=group.get("bf16", False))
                p.add_(update, alpha=-float(group["lr"]))
        return loss


def compute_in(optimizer: optim.Optimizer, precision: str) -> None:
    """Have Muon make its steps orthogonal in the precision of the forward pass; other optimizers stay.

    The sources take bfloat16. A CPU without instructions for it takes 25 times as long for that as in fp32.

    Args:
        optimizer: any optimizer.
        precision: ``fp32``, ``bf16``, or ``fp16``, with which it is done in fp32.
    """
    if isinstance(optimizer, Muon):
        for group in optimizer.param_groups:
            group["bf16"] = precision == "bf16"


def orthogonalised(update: Tensor, *, bf16: bool = False) -> Tensor:
    """Return ``update``, (outputs, ...), with singular values near 1 as a matrix (outputs, rest).

    A quintic Newton-Schulz iteration. It does not converge to 1: singular values end anywhere between about
    0.5 and 1.5, which does as well and takes fewer steps.

    Args:
        update: what the weight is to be moved by.
        bf16: compute in bfloat16.
    """
    a, b, c = _COEFFICIENTS
    # A new matrix, laid out by rows: gradients begin at any address, on which the order of a sum may depend.
    matrix = update.reshape(len(update), -1).clone(memory_format=torch.contiguous_format)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix / (matrix.norm() + 1e-7)).to(torch.bfloat16 if bf16 else torch.float32)
    x = x.T.contiguous() if is_tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.T if is_tall else x).reshape(update.shape).to(update.dtype)
    return result
