"""The plain PyTorch loop on one process, beside a run that goes through evenstep: the yardstick of verify."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from evenstep.optim import Schedule
from evenstep.seeding import preserved_rng, seed_step, turn_seed
from evenstep.step import to_device


class PlainTwin:
    """Trains a copy of model and optimizer on the whole global batch at once, as every tutorial does.

    It works in a world with one lane, where a batch is the whole global batch. The learning rate and the
    other options of the optimizer are taken from the run, step by step.

    Attributes:
        losses: the mean loss over the global batch before each step.
        varies_by_lane: names of layers whose result depends on how a batch is cut into lanes.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.varies_by_lane: tuple[str, ...] = ()
        self._pair: Any = None
        self._mean = math.nan
        self._options: list[dict[str, Any]] = []

    def before_step(self, state: Any, batch: Any, loss: Any) -> None:
        """Copy model and optimizer before the first step, and note the optimizer's options."""
        if self._pair is None:
            self._pair = copy.deepcopy((state.model, state.optimizer))
            self._scaler = torch.amp.GradScaler(state.device.type, enabled=state.scaler.is_enabled())
            self.varies_by_lane = varying_layers(state.model)
        self._options = _options(state.optimizer)
        self._forward_and_backward(state, batch, loss)

    def _forward_and_backward(self, state: Any, batch: Any, loss: Any) -> None:
        # Before the step, like the run's own: a loss may look at the state, whose epoch a step can end.
        model, optimizer = self._pair
        (part,) = batch.lanes
        with preserved_rng():
            seed = turn_seed(state.world.seed, state.world.together.turn(batch))
            seed_step(seed, batch.step, part.lane, state.device)
            optimizer.zero_grad()
            with state.autocast():
                value = loss(model, to_device(part.data, state.device))
                mean = value[0] / value[1] if isinstance(value, tuple) else value
            self._scaler.scale(mean).backward()
        self._mean = float(mean.detach())

    def after_step(self, state: Any, batch: Any, result: Any) -> None:
        """Take the step with the copy."""
        if isinstance(state.schedule, Schedule):  # the step itself has set the learning rate
            self._options = _options(state.optimizer)
        model, optimizer = self._pair
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update(options)
        self._scaler.unscale_(optimizer)
        if state.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), state.clip_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        self.losses.append(self._mean)


def varying_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the layers that normalise over a batch or draw random numbers, as ``name (Class)``."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return tuple(
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.training and getattr(module, "p", 1.0) > 0
    )


def varying_advice(layers: Sequence[str]) -> tuple[str, str]:
    """Return why a run with several lanes may differ from the plain loop, and what to do."""
    if layers:
        shown = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
        return (
            f"{shown} works on each lane by itself, as in each replica of DDP: a lane normalises with its "
            "own samples and draws its own random numbers",
            "Nothing, if that is meant; --lanes 1 gives the plain loop's numbers.",
        )
    return (
        "the gradient is not that of the mean over the global batch: the loss function is no mean over the "
        "samples it is given",
        "Return the mean over the samples, or (sum, count) for a mean over something else.",
    )


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
