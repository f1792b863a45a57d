"""Optimizers, and learning-rate schedules as pure functions of the step and the epoch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from evenstep.errors import ConfigError, did_you_mean
from evenstep.muon import Muon

OPTIMIZERS = ("sgd", "adam", "adamw", "muon")
SCHEDULES = ("step", "linear", "cosine", "onecycle", "constant")
DEFAULT_LR = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001, "muon": 0.24}

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def make_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float | None = None,
    lr_rest: float | None = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> optim.Optimizer:
    """Return an optimizer over the trainable parameters of ``model``.

    Without weight decay there is one group, named ``all``. With it there are two: ``decay``, and ``no_decay``
    for biases, the parameters of normalisation layers, and any other with fewer than two dimensions. A group
    without parameters is left out. With muon there is one more, ``orthogonal``: the weights of all
    convolutions and linear layers but the last; sgd with Nesterov momentum moves the others.

    Args:
        model: the model; its frozen parameters are left out.
        name: ``sgd``, ``adam``, ``adamw`` or ``muon``.
        lr: learning rate; by default 0.05 for sgd, 0.001 for adam and adamw, 0.24 for muon.
        lr_rest: muon: the learning rate of what sgd moves; by default that of sgd.
        momentum: momentum of sgd and muon; the others ignore it.
        nesterov: Nesterov momentum, for sgd only; muon has it anyway.
        weight_decay: weight decay; added to the gradient by sgd and adam, decoupled in adamw.

    Raises:
        ConfigError: the name is unknown, nothing can be trained, or the options contradict each other.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"unknown optimizer {name!r}.{did_you_mean(name.lower(), OPTIMIZERS)} Choose --optimizer "
            f"{', '.join(OPTIMIZERS)}."
        )
    if lr_rest is not None and name != "muon":
        raise ConfigError(
            f"--lr-rest {lr_rest} does not go with --optimizer {name}, which has one learning rate for all "
            "parameters. Leave out --lr-rest, or use --optimizer muon."
        )
    if nesterov and (name not in ("sgd", "muon") or momentum <= 0):
        raise ConfigError(
            f"--nesterov does not go with --optimizer {name}, momentum {momentum}: Nesterov momentum is a "
            "form of sgd's momentum. Leave out --nesterov, or use --optimizer sgd with --momentum above 0."
        )
    if weight_decay < 0:
        raise ConfigError(f"weight_decay is {weight_decay}; it must be 0 or more. Correct --weight-decay.")
    is_muon = name == "muon"
    groups = _groups(model, weight_decay, orthogonal=_hidden_weights(model) if is_muon else ())
    learning_rate = DEFAULT_LR[name] if lr is None else lr
    # Neither fused nor foreach is asked for. torch then takes foreach on accelerators and a plain loop on the
    # CPU, which has the same bits, and where foreach is no faster (a step of net on one core, measured once,
    # by hand: 97 us both with sgd, 340 and 325 with adam). fused would take 56 and 125 us, below 0.2% of a
    # training step of net, but its CPU kernels give wrong results without an error where a gradient or a
    # state has other strides than its parameter (torch 2.14), and sgd's skip bfloat16 weights (pytorch issue
    # 191763).
    if is_muon:
        rest = DEFAULT_LR["sgd"] if lr_rest is None else lr_rest
        groups = [{**group, "lr": learning_rate if group.get("orthogonal") else rest} for group in groups]
        return Muon(groups, lr=learning_rate, momentum=momentum)
    if name == "sgd":
        return optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov)
    kind = optim.Adam if name == "adam" else optim.AdamW
    return kind(groups, lr=learning_rate)


def _hidden_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights of convolutions and linear layers, but for the last one's."""
    kinds = (_ConvNd, nn.Linear)
    weights = [module.weight for module in model.modules() if isinstance(module, kinds)]
    hidden = [weight for weight in weights[:-1] if weight is not weights[-1]]
    return [weight for weight in hidden if isinstance(weight, nn.Parameter) and weight.requires_grad]


def _groups(
    model: nn.Module, weight_decay: float, orthogonal: Sequence[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        total = sum(1 for _ in model.parameters())
        raise ConfigError(
            f"the model has nothing to train: it has {total} parameter tensors, and none has requires_grad "
            "set. Unfreeze some of them (parameter.requires_grad_(True)), or use `evenstep eval` for a model "
            "that is only to be evaluated."
        )
    chosen = {id(p) for p in orthogonal}
    weights = [p for _, p in trainable if id(p) in chosen]
    others = [(name, p) for name, p in trainable if id(p) not in chosen]
    groups = [
        {"name": "orthogonal", "params": weights, "orthogonal": True, "weight_decay": 0.0},
        *_decay_groups(model, others, weight_decay),
    ]
    return [group for group in groups if group["params"]]


def _decay_groups(
    model: nn.Module, trainable: Sequence[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    if weight_decay == 0:
        return [{"name": "all", "params": [p for _, p in trainable], "weight_decay": 0.0}]
    normal = {id(p) for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters()}
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, p in trainable:
        spared = p.ndim < 2 or id(p) in normal or name.rpartition(".")[2] == "bias"
        (no_decay if spared else decay).append(p)
    return [
        {"name": "decay", "params": decay, "weight_decay": weight_decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate goes: ``lr = base_lr * factor(step, epoch)``.

    It has no state: the factor is a function of the step and the epoch alone, so there is nothing to save in
    a checkpoint, and a resumed run gets the same learning rates. Make one with :func:`make_schedule`.
    """

    name: Literal["step", "linear", "cosine", "onecycle", "constant"]
    """The shape, see :func:`make_schedule`."""
    total_steps: int | None = None
    """Steps of the whole run; None if that is not known."""
    decay: float = 0.3
    """The factor of ``step``."""
    decay_epochs: int = 5
    """Epochs between two decays of ``step``."""
    warmup_steps: int = 0
    """Steps in which the factor grows linearly, before the shape begins."""

    def factor(self, step: int, epoch: int) -> float:
        """Return what the base learning rate is multiplied with in a step.

        Args:
            step: the step, counted from 0 over the whole run.
            epoch: the epoch that it belongs to, from 0.
        """
        if step < self.warmup_steps:
            # The first step gets 1/warmup_steps: with a learning rate of 0 it would be wasted.
            warm = (step + 1) / self.warmup_steps
            return warm * self._decayed(epoch) if self.name == "step" else warm
        if self.name == "step":
            return self._decayed(epoch)
        if self.name == "constant":
            return 1.0
        assert self.total_steps is not None
        if self.name == "onecycle":
            return _onecycle(step, self.total_steps)
        progress = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return 1.0 - progress if self.name == "linear" else _cosine(1.0, 0.0, progress)

    def _decayed(self, epoch: int) -> float:
        return float(self.decay ** (epoch // self.decay_epochs))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * progress))


def _onecycle(step: int, total_steps: int) -> float:
    """Return the factor of torch's OneCycleLR (pct_start 0.3, div_factor 25, final_div_factor 1e4)."""
    start, peak, end = 1 / 25, 1.0, 1 / 25 / 1e4
    peak_step = 0.3 * total_steps - 1
    last_step = total_steps - 1
    step = min(step, last_step)
    if step <= peak_step:
        return _cosine(start, peak, step / peak_step)
    return _cosine(peak, end, (step - peak_step) / (last_step - peak_step))


def make_schedule(
    name: str,
    *,
    epochs: int,
    steps_per_epoch: int | None,
    decay: float = 0.3,
    decay_epochs: int = 5,
    warmup_epochs: float = 0.0,
) -> Schedule:
    """Return a schedule laid over ``epochs`` epochs.

    Args:
        name: ``step``: times ``decay`` every ``decay_epochs`` epochs, as torch's StepLR. ``cosine``: from 1
            to 0 along half a cosine over all steps, as CosineAnnealingLR. ``linear``: from 1 to 0 along a
            straight line. ``onecycle``: from 1/25 up to 1 in
            the first 30% of the steps, then down to almost 0, as OneCycleLR; the base learning rate is the
            peak; the momentum is left alone. ``constant``: 1.
        epochs: epochs of the whole run.
        steps_per_epoch: steps of an epoch; None for iterable data whose length nobody knows.
        decay: the factor of ``step``.
        decay_epochs: epochs between two decays of ``step``.
        warmup_epochs: epochs at the beginning in which the learning rate grows linearly from 0; ``cosine``
            and ``linear`` then go over the steps that are left.

    Raises:
        ConfigError: the name is unknown, the number of steps must be known and is not, or the warm-up does
            not fit.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"unknown learning-rate schedule {name!r}.{did_you_mean(name.lower(), SCHEDULES)} Choose "
            f"--lr-schedule {', '.join(SCHEDULES)}."
        )
    if steps_per_epoch is None and name in ("linear", "cosine", "onecycle"):
        raise ConfigError(
            f"--lr-schedule {name} needs to know how many steps an epoch has, but the training data are "
            "iterable and have no length. Use --lr-schedule step or constant, or give the data set a "
            "__len__."
        )
    if steps_per_epoch is None and warmup_epochs > 0:
        raise ConfigError(
            f"--warmup-epochs {warmup_epochs} needs to know how many steps an epoch has, but the training "
            "data are iterable and have no length. Leave out --warmup-epochs, or give the data set a __len__."
        )
    if warmup_epochs > 0 and name == "onecycle":
        raise ConfigError(
            f"--warmup-epochs {warmup_epochs} does not go with --lr-schedule onecycle, which warms up by "
            "itself over the first 30% of the steps. Leave out --warmup-epochs, or use --lr-schedule cosine."
        )
    if not 0 <= warmup_epochs < max(epochs, 1):
        raise ConfigError(
            f"warmup_epochs is {warmup_epochs}; it must be at least 0 and below --epochs {epochs}, or the "
            "learning rate would never reach its value. Use a smaller --warmup-epochs or more --epochs."
        )
    return Schedule(
        name=name,  # type: ignore[arg-type]  # checked above
        total_steps=None if steps_per_epoch is None else epochs * steps_per_epoch,
        decay=decay,
        decay_epochs=decay_epochs,
        warmup_steps=round(warmup_epochs * (steps_per_epoch or 0)),
    )


def apply_schedule(optimizer: optim.Optimizer, base_lrs: Sequence[float], factor: float) -> None:
    """Set the learning rate of each group to its base learning rate times ``factor``.

    Args:
        optimizer: the optimizer; a learning rate that is a tensor is changed in place.
        base_lrs: one base learning rate per group.
        factor: what :meth:`Schedule.factor` gives.
    """
    for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(base_lr * factor)
        else:
            group["lr"] = base_lr * factor


def check_no_closure(optimizer: optim.Optimizer) -> None:
    """Raise ConfigError if an optimizer asks for the loss again in its step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again, as often as the "
            "optimizer likes. A step here computes it once, on all lanes, before the optimizer begins. Use "
            "an optimizer whose step takes the gradient as it is (SGD, Adam, ...)."
        )


def check_groups(optimizer: optim.Optimizer, number: int) -> None:
    """Raise ConfigError if an optimizer has not as many groups of parameters as at the start."""
    if len(optimizer.param_groups) != number:
        raise ConfigError(
            f"the optimizer had {number} groups of parameters when its TrainState was made, and has "
            f"{len(optimizer.param_groups)} now: a group that comes later has no place in the schedule, and "
            "a run that goes on after a death or with --resume would not find it. Make all groups before the "
            "TrainState; freeze the parameters of a group that is to come in later, with "
            "requires_grad_(False)."
        )
