"""torch's DistributedDataParallel around a call of the loss function.

DDP prepares the sums of a backward pass in its forward pass, so all that leads to a gradient has to happen
in there. What it wraps is therefore a module whose forward pass is the function that it is called with: the
loss function gets the model itself, and may call it, its methods and its layers in any way.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.errors import ConfigError


class _Whole(nn.Module):
    """Holds the model for DDP, whose forward pass is then whatever it is called with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def wrapped(
    module: nn.Module, device: torch.device, hook: Callable[..., Any] | None
) -> DistributedDataParallel:
    """Return DDP around the parameters of a model that require a gradient. Collective: every rank must call.

    Args:
        module: the model, the same on every rank.
        device: its device.
        hook: the method that reduces a bucket; it does not keep its object alive. None for DDP's own sum.

    Returns:
        DDP, which is called with a function that runs the forward pass, and returns what that returns.
    """
    # torch 2.14 renamed broadcast_buffers. Ours are staged, so DDP must not touch them.
    name = "forward_sync_buffers"
    if name not in inspect.signature(DistributedDataParallel.__init__).parameters:
        name = "broadcast_buffers"
    options: dict[str, Any] = {name: False}
    ddp = DistributedDataParallel(
        _Whole(module),
        device_ids=[device] if device.type == "cuda" else None,
        init_sync=False,  # not for every dtype: take_over_from_rank_0
        gradient_as_bucket_view=True,
        **options,
    )
    if hook is not None:
        ddp.register_comm_hook(None, _weakly(hook))
    return ddp


def _weakly(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for DDP that does not keep the method's object alive.

    DDP keeps a hook in C++, where Python cannot see that both hold each other, and would never free them.
    """
    method = weakref.WeakMethod(hook)

    # DDP checks the annotations of a hook, and cannot read them where they are strings: so there are none.
    def called(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        alive = method()
        assert alive is not None, "a backward pass of lanes that have been dropped"
        return alive(state, bucket)

    return called


def check_layers(module: nn.Module) -> None:
    """Raise ConfigError if a model has a layer whose sums depend on the number of processes."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"the layer {name!r} is a torch.nn.SyncBatchNorm, which adds up its statistics in an order "
                "that depends on the number of processes, and would wait for ever where one of them has more "
                "lanes than another. Pass --batchnorm global: then it has its statistics over the global "
                "batch with the same bits everywhere. Or use torch.nn.BatchNorm1d, 2d or 3d, where each lane "
                "normalises with its own samples. For torch's layer, which needs GPUs, pass --mode fast."
            )
