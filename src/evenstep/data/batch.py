"""What a Loader yields: the part of one global batch that belongs to this process, lane by lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MemoryFormat = Literal["channels_last", "contiguous"]


@dataclass(frozen=True)
class LaneBatch:
    """The samples of one lane in one step.

    Attributes:
        lane: the lane's number.
        size: how many samples it has; 0 for an empty lane.
        data: the collated samples, as the loss function takes them. For an empty lane: a stand-in of at
            most two samples of the same global batch, whose loss and gradient are thrown away. It is there
            because torch DDP needs a forward and a backward pass on every process.
        ids: the samples' indices in the data set, ``size`` of them.
    """

    lane: int
    size: int
    data: Any
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Batch:
    """This process's part of the global batch of one step.

    Attributes:
        step: the optimizer step that this batch is for, from 0.
        epoch: the epoch, from 0.
        epoch_step: the step inside the epoch, from 0.
        size: samples in the global batch, over all lanes.
        last_in_epoch: whether the epoch ends with this batch.
        lanes: the lanes of this process, in order.
    """

    step: int
    epoch: int
    epoch_step: int
    size: int
    last_in_epoch: bool
    lanes: tuple[LaneBatch, ...]


def map_tensors(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``data`` with every tensor in it changed: tuples, lists and mappings are looked into."""
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):  # a namedtuple
        return type(data)(*(map_tensors(value, change) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(value, change) for value in data)
    return data


def laid_out(data: Any, memory_format: MemoryFormat | None) -> Any:
    """Return ``data`` with all tensors of four dimensions in a memory format; None leaves them as they are.

    The values are the same, but a convolution may add them in another order, so bits depend on it.
    """
    if memory_format is None:
        return data
    wanted = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    return map_tensors(data, lambda x: x.contiguous(memory_format=wanted) if x.dim() == 4 else x)
