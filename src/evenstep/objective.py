"""What a run is trained for and measured by: cross entropy and accuracy, or functions of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.config import CROSS_ENTROPY, TrainConfig
from evenstep.errors import ConfigError
from evenstep.evaluation import Metrics, as_mapping
from evenstep.metrics import cross_entropy, kind_of
from evenstep.objects import import_object
from evenstep.step import Loss

# Keys of a line in metrics.jsonl and of the report's columns.
_TAKEN = frozenset({"kind", "step", "epoch", "time", "t", "wall_s", "samples"})


def loss_of(config: TrainConfig) -> Loss:
    """Return the loss function that ``--loss`` names.

    Raises:
        ConfigError: there is no such function; and, from a function of the user's, its value is no mean.
    """
    optim = config.optim
    if optim.loss == CROSS_ENTROPY:
        return cross_entropy(optim.label_smoothing)
    return OwnLoss(_function(optim.loss, "loss", "the mean over the samples of the batch"), optim.loss)


def metrics_of(config: TrainConfig, classifier: Metrics) -> Metrics:
    """Return the function that measures a chunk of the test set.

    With cross entropy it measures what ``classifier`` does, with a loss of the user's that loss; in both
    cases the user's ``--metrics``, too.

    Args:
        config: the options.
        classifier: measures ``loss`` and ``accuracy``.

    Raises:
        ConfigError: a function is not there; and, from the function that is returned, what the user's
            functions give is of the wrong kind, or has a name that is taken.
    """
    base = classifier if config.optim.loss == CROSS_ENTROPY else _measured(loss_of(config))
    spec = config.output.metrics
    if spec is None:
        return base
    own: Metrics = _function(spec, "metrics", "for each name one value a sample")

    def both(model: nn.Module, batch: Any) -> dict[str, Any]:
        values = dict(base(model, batch))
        found = as_mapping(own(model, batch))
        taken = sorted(found.keys() & (values.keys() | _TAKEN))
        if taken:
            raise ConfigError(
                f"--metrics {spec} measures {taken[0]!r}, a name that evenstep uses itself, as "
                f"{', '.join([*values, *sorted(_TAKEN)])}: one of the two would be lost. Call it "
                f"my_{taken[0]}, or leave it out."
            )
        return {**values, **found}

    return both


def own_metrics(config: TrainConfig, means: Mapping[str, float]) -> dict[str, float]:
    """Return those of the means of an evaluation that ``--metrics`` measured."""
    ours = {"samples", "loss"} | ({"accuracy"} if config.optim.loss == CROSS_ENTROPY else set())
    return {name: value for name, value in means.items() if name not in ours}


def best_of(config: TrainConfig) -> str:
    """Return what makes the best checkpoint, as for ``Cadence``: accuracy, or a low loss of the user's."""
    return "accuracy" if config.optim.loss == CROSS_ENTROPY else "-loss"


@dataclass(frozen=True)
class OwnLoss:
    """A loss function of the user's, whose value is checked before anything is done with it.

    Attributes:
        function: ``loss(model, batch)``.
        spec: the ``module:callable`` that it comes from.
    """

    function: Loss
    spec: str

    def __call__(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """Return the loss of a batch: a mean, or (sum, count)."""
        value: Any = self.function(model, batch)
        is_pair = isinstance(value, tuple) and len(value) == 2
        total = value[0] if is_pair else value
        if not isinstance(total, Tensor) or total.dim() != 0 or not total.is_floating_point():
            raise ConfigError(
                f"--loss {self.spec} returned {kind_of(value)}; expected the mean over the samples of the "
                "batch as a float tensor of shape (), or (sum, count). Take the .mean() of one loss a "
                "sample; leave out .item() and float()."
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            raise ConfigError(
                f"--loss {self.spec} returned a tensor without a gradient: nothing could be learned from it. "
                "Compute it from model(...), without .detach(), .item(), numpy or torch.no_grad()."
            )
        return value  # type: ignore[no-any-return]


def _measured(loss: Loss) -> Metrics:
    # A mean and (sum, count) mean the same to evaluate.
    def measured(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": loss(model, batch)}

    return measured


def _function(spec: str, name: str, returns: str) -> Callable[..., Any]:
    found = import_object(spec, what=name, flag=f"--{name}")
    if not callable(found):
        raise ConfigError(
            f"--{name} {spec} is of type {type(found).__name__}, which cannot be called. Give a function "
            f"{name}(model, batch) that returns {returns}."
        )
    if isinstance(found, type):
        raise ConfigError(
            f"--{name} {spec} is a class, and would be called as {name}(model, batch). Give a function, or "
            f"an object of the class: {name} = {found.__name__}(...) in its module."
        )
    return found  # type: ignore[no-any-return]
