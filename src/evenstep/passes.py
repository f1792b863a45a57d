"""Forward and backward passes of lanes: what both kinds of lanes (lanes.py, globallanes.py) share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.collectives import Exchange, reduce_nodes
from evenstep.data.batch import LaneBatch
from evenstep.errors import ConfigError
from evenstep.parameters import Parameters, in_pieces
from evenstep.staging import Staging
from evenstep.world import World


@dataclass(frozen=True)
class Totals:
    """What the lanes gave together in one step; the same on every rank.

    Attributes:
        loss: the mean loss over the global batch; a 0-dimensional float64 tensor.
        count: the weights' sum, if the loss function gives (sum, count); else 0.
        stop: how many processes wish to stop after this step.
    """

    loss: Tensor
    count: Tensor
    stop: Tensor


Forward = Callable[[LaneBatch, nn.Module], "tuple[Tensor, float]"]
"""``forward(part, model)`` runs a lane's forward pass on what ``run`` says is the model, and returns the
lane's mean loss times its share of the samples and 0; or its sum of losses and the weights' sum."""

Watched = Callable[[LaneBatch], "contextlib.AbstractContextManager[None]"]
"""``watched(part)``: what a lane's forward and backward pass run in."""


def begin_step(
    step: int, parameters: Parameters, staging: Staging, world: World, *, is_open: bool
) -> tuple[list[Staging], int]:
    """Take the gradients away and remember the buffers of all models in training.

    Args:
        step: the step that begins.
        parameters: the parameters of the model whose step it is.
        staging: the buffers of that model.
        world: the world.
        is_open: whether the step before has failed before its sums.

    Returns:
        The buffers, the model's own first, and how many numbers a lane will give of these.

    Raises:
        ConfigError: a step is open, so other ranks still wait in it.
    """
    if is_open and world.world_size > 1:
        raise ConfigError(
            f"step {step} failed before its gradients were summed, and the error was caught: the other "
            "ranks still wait in that step, so no further one can begin. Let the error of train_step end "
            "main; all ranks then go on from the last step (--max-restarts), or end together."
        )
    parameters.begin()
    # A lane may run other models, too, and has to find them as the first lane did.
    staged = [staging, *(other for other in world.staged if other is not staging)]
    num_running, *_ = [each.begin() for each in staged]
    return staged, num_running


@contextlib.contextmanager
def explained(size: int) -> Iterator[None]:
    """Say what to do when a normalisation layer gets a lane of one sample, which has no variance."""
    try:
        yield
    except ValueError as error:
        if size != 1 or not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise ConfigError(
            f"a lane has 1 sample in this step, but a normalisation layer needs 2 or more to train: {error}. "
            "It is the last batch of an epoch, or the batch is too small. Choose a --batch-size whose last "
            "batch has at least 2 samples for each of the --lanes, use fewer --lanes, or normalise with "
            "GroupNorm."
        ) from error


def param_views(buffer: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return each parameter's gradient in a bucket, as DDP lays it out: in the parameter's own strides.

    GradBucket.gradients() takes all of them for contiguous, which a channels_last weight is not.
    """
    views, start = [], 0
    for p in params:
        part = buffer[start : start + p.numel()]
        dense = p.is_contiguous() or torch.empty_like(p).stride() == p.stride()
        views.append(part.as_strided(p.shape, p.stride()) if dense else part.view(p.shape))
        start += p.numel()
    return views


def sum_in_pieces(
    stack: Sequence[Sequence[Tensor]], params: Sequence[Tensor], exchange: Exchange, used: Tensor | None
) -> None:
    """Leave the sums over all lanes in ``.grad``, each in its weight's strides. Collective.

    Args:
        stack: this rank's subtree sums, in the order of its cover, each with one tensor a parameter.
        params: the parameters.
        exchange: who brings what.
        used: uint8, for each parameter whether an own lane used it: one that nobody used gets no gradient;
            None if all are used.
    """
    is_used = [True] * len(params)
    if used is not None:
        if len(exchange.covers) > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
        is_used = [bool(flag) for flag in used.tolist()]
    if len(exchange.covers) == 1:
        for p, gradient, has_one in zip(params, stack[0], is_used, strict=True):
            # The order in memory is that in which the gradient's norm is summed.
            is_alike = gradient.stride() == p.stride()
            p.grad = (gradient if is_alike else torch.empty_like(p).copy_(gradient)) if has_one else None
        return
    for piece in in_pieces(params):
        parts = [params[i] for i in piece]
        nodes = [parts[0].new_empty(sum(p.numel() for p in parts)) for _ in stack]
        for node, gradients in zip(nodes, stack, strict=True):
            torch._foreach_copy_(param_views(node, parts), [gradients[i] for i in piece])
        reduce_nodes(nodes, exchange, nodes[0])
        for i, p, gradient in zip(piece, parts, param_views(nodes[0], parts), strict=True):
            p.grad = gradient if is_used[i] else None


def unused_error(names: list[str]) -> ConfigError:
    """Return the error for parameters that have got no gradient; of none if the loss depends on nothing."""
    if not names:
        return ConfigError(
            "the loss depends on no parameter that requires a gradient, so nothing would be trained. Is all "
            "of the model frozen, or the forward pass inside torch.no_grad()? If that is meant for some "
            'batches, pass --unused-parameters allow (unused_parameters="allow").'
        )
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ConfigError(
        f"no gradient for the parameters {shown}: the loss does not depend on them, so they would never be "
        "trained. Remove them, freeze them with requires_grad_(False), or pass --unused-parameters allow "
        '(unused_parameters="allow") if that is meant.'
    )
