"""BatchNorm with statistics over the whole global batch, the same bits on every world size.

A layer adds up, over all lanes in lane order, how many values each channel has, their sum and their sum of
squares, and normalises with the mean and the variance of all. Backward needs two more such sums. Lanes meet
for them (handover.py, globallanes.py), because no lane can go on before all have come to the layer.

What each lane brings is float64: a sum of squares minus the square of a mean loses no digit that counts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.errors import ConfigError
from evenstep.world import World

FORWARD_ENDS, BACKWARD_ENDS = 0, 1
_FIRST_LAYER = 2


class Meeting(Protocol):
    """What a layer needs of the step that runs."""

    @property
    def is_empty(self) -> bool:
        """Whether the lane that runs has no samples, so that its batch is a stand-in."""

    def meet(self, place: int, values: Tensor | None) -> Tensor:
        """Return the sum of what all lanes bring to the same place: float64, values first."""

    def record(self, layer: GlobalBatchNorm, mean: Tensor, var: Tensor) -> None:
        """Remember statistics for the layer's running ones, which change at the commit."""


class Places:
    """The layers at which lanes meet, of all models of a process; the same on every rank.

    Attributes:
        meeting: the step that runs; None between two steps.
        width: the most float64 numbers that a lane brings to a layer.
    """

    def __init__(self) -> None:
        self.meeting: Meeting | None = None
        self.width = 0
        self._names: list[str] = []

    def __deepcopy__(self, memo: Any) -> Places:
        return self  # the layers of a copied model meet in the same steps

    def add(self, layer: GlobalBatchNorm, name: str) -> None:
        """Give a layer its number."""
        layer.places, layer.number = self, len(self._names)
        self._names.append(name)
        self.width = max(self.width, 1 + 2 * layer.num_features)

    def describe(self, place: int) -> str:
        """Return the name of a place where lanes meet."""
        if place < _FIRST_LAYER:
            return "the end of the forward pass" if place == FORWARD_ENDS else "the end of the backward pass"
        number, is_backward = divmod(place - _FIRST_LAYER, 2)
        return f"the {'backward' if is_backward else 'forward'} pass of {self._names[number]!r}"


def places_of(world: World) -> Places:
    """Return the places of a process, which all its models share."""
    if not world.meeting_places:
        world.meeting_places.append(Places())
    places: Places = world.meeting_places[0]
    return places


class GlobalBatchNorm(_BatchNorm):
    """A BatchNorm layer that normalises over the global batch inside of a training step.

    Everywhere else (evaluation, a layer in evaluation mode, a call outside of ``train_step``) it is torch's
    layer. Made by ``convert``.

    Attributes:
        places: where its lanes meet.
        number: its number there.
    """

    places: Places
    number: int

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` of shape (n, channels, ...)."""
        meeting = self.places.meeting
        if not self.training or meeting is None:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        output: Tensor = _Normalise.apply(input, self.weight, self.bias, self, meeting)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def update(self, mean: Tensor, var: Tensor) -> None:
        """Let the running statistics take in those of one global batch, as torch's layer does.

        Args:
            mean: float64, of shape (channels,).
            var: the unbiased variance, likewise.
        """
        if not self.track_running_stats:
            return
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                running.copy_(running.double() * (1 - factor) + new * factor)


class GlobalBatchNorm1d(GlobalBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over the global batch."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class GlobalBatchNorm2d(GlobalBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over the global batch."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class GlobalBatchNorm3d(GlobalBatchNorm, nn.BatchNorm3d):
    """BatchNorm3d over the global batch."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim


_CLASSES: dict[type[nn.Module], type[GlobalBatchNorm]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
    nn.SyncBatchNorm: GlobalBatchNorm,
}


def convert(model: nn.Module, places: Places) -> None:
    """Make every BatchNorm layer of a model one over the global batch.

    The layers stay the objects that they are, with their parameters, buffers, hooks and names, and change
    their class only: so nothing else that refers to them has to know, and checkpoints have the same keys.

    Raises:
        ConfigError: a layer is of a class of its own, whose forward pass we do not know.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    for name, layer in layers:
        if type(layer) not in _CLASSES and not isinstance(layer, GlobalBatchNorm):
            raise ConfigError(
                f"the layer {name!r} is a {type(layer).__name__}, a class of its own made from torch's "
                "BatchNorm, so --batchnorm global cannot know what its forward pass does. Use "
                "torch.nn.BatchNorm1d, 2d, 3d or SyncBatchNorm, or pass --batchnorm lane."
            )
    for name, layer in layers:
        layer.__class__ = _CLASSES.get(type(layer), type(layer))
        assert isinstance(layer, GlobalBatchNorm)
        places.add(layer, name)


class _Normalise(torch.autograd.Function):
    """Normalises with the statistics of all lanes; forward and backward each meet once."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]  # noqa: ANN205
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: GlobalBatchNorm,
        meeting: Meeting,
    ):
        x = _plain(input, _format_of(input))
        values = None
        channels = x.shape[1]
        num_values = x.numel() // channels
        if num_values and not meeting.is_empty:
            own_mean, own_var = (v.double() for v in torch.batch_norm_update_stats(x, None, None, 0.0))
            count = own_mean.new_full((1,), num_values)
            values = torch.cat([count, num_values * own_mean, num_values * (own_var + own_mean.square())])
        place = _FIRST_LAYER + 2 * layer.number
        count, sums, squares = torch.split(
            meeting.meet(place, values)[: 1 + 2 * channels], [1, channels, channels]
        )
        if count <= 1:
            raise ConfigError(
                f"the global batch has {int(count)} value for each channel in "
                f"{layer.places.describe(place)}, but a variance needs 2 or more. It is the last batch of an "
                "epoch, or the batch is too small: choose a --batch-size whose last batch has at least 2 "
                "samples."
            )
        mean = sums / count
        var = (squares / count - mean.square()).clamp_(min=0.0)
        meeting.record(layer, mean, var * (count / (count - 1)))
        mean, var = mean.to(x.dtype), var.to(x.dtype)
        ctx.save_for_backward(input, weight, mean, var, count)
        ctx.layer, ctx.meeting = layer, meeting
        w, b = (None if t is None else t.to(x.dtype) for t in (weight, bias))
        return torch.native_batch_norm(x, w, b, mean, var, False, 0.0, layer.eps)[0].to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[no-untyped-def]  # noqa: ANN205
        input, weight, mean, var, count = ctx.saved_tensors
        layer, meeting = ctx.layer, ctx.meeting
        channels, layout = len(mean), _format_of(input)
        x, dy = _plain(input, layout), _plain(grad_output, layout)
        # In evaluation mode the kernel's gradients of weight and bias are the sums of dy * xhat and of dy.
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            dy, x, None, mean, var, None, None, False, layer.eps, [False, True, True]
        )
        values = None if meeting.is_empty else torch.cat([db, dw]).double()
        total = meeting.meet(_FIRST_LAYER + 2 * layer.number + 1, values)
        mean_dy, mean_dy_xhat = torch.split(total[: 2 * channels] / count, channels)
        dx = None
        if ctx.needs_input_grad[0]:
            shape = [1, channels] + [1] * (x.dim() - 2)
            inverse = (var.double() + layer.eps).rsqrt()
            slope = inverse if weight is None else inverse * weight.double()
            scales = (slope, slope * inverse * mean_dy_xhat, mean_dy, mean)
            a, b, c, m = (t.to(x.dtype).view(shape) for t in scales)
            dx = (dy - c).mul_(a).sub_((x - m).mul_(b)).to(input.dtype)
        if weight is None:
            return dx, None, None, None, None
        return dx, dw.to(weight.dtype), db.to(weight.dtype), None, None


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _format_of(t: Tensor) -> torch.memory_format:
    layout = _FORMATS.get(t.dim(), torch.contiguous_format)
    return (
        torch.contiguous_format if t.is_contiguous() or not t.is_contiguous(memory_format=layout) else layout
    )


def _plain(t: Tensor, layout: torch.memory_format) -> Tensor:
    """Return ``t`` in exactly the strides of a layout, and in float32 where its own precision is lower.

    torch's backward kernel for CPUs gives wrong sums if the layouts of its arguments differ and a dimension
    of size 1 makes the strides of one of them ambiguous: a single sample in channels_last (torch 2.14).
    """
    dtype = t.dtype if t.dtype in (torch.float32, torch.float64) else torch.float32
    strides = torch.empty(t.shape, device="meta", memory_format=layout).stride()
    if t.dtype == dtype and t.stride() == strides:
        return t
    return torch.empty(t.shape, dtype=dtype, device=t.device, memory_format=layout).copy_(t)
