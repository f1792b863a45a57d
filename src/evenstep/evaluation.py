"""Evaluation: every sample exactly once, and the same bits on any number of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.data.loader import eval_chunks
from evenstep.errors import ConfigError
from evenstep.heartbeat import Phase
from evenstep.recovery import doing
from evenstep.step import to_device
from evenstep.world import World, current

Metrics = Callable[[nn.Module, Any], "Mapping[str, Tensor | tuple[Tensor | float, Tensor | float]]"]
"""``metrics(model, batch)``: for each name the values of the samples, shape (n,); or a 0-dimensional tensor,
their mean; or (sum, count) for a mean over something else than samples."""


def evaluate(
    model: nn.Module,
    dataset: Any,
    metrics: Metrics,
    *,
    chunk_size: int = 250,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    world: World | None = None,
    **loading: Any,
) -> dict[str, float]:
    """Return the mean of each metric over ``dataset``. Collective: every rank must call.

    The data set is cut into chunks of fixed size, whatever the number of processes; each rank evaluates some
    of them in evaluation mode, and the chunks' sums are added in the order of the chunks. No sample is
    padded, dropped or counted twice.

    Args:
        model: the model itself, not DDP. Its training mode is put back afterwards.
        dataset: images (``ImageArrays``) or any torch Dataset.
        metrics: the function that measures one chunk, see ``Metrics``.
        chunk_size: samples a chunk. It is part of the bits, as the batch size is.
        context: what the forward pass runs in, such as ``state.autocast``.
        world: the world; by default the current one.
        **loading: passed to ``eval_chunks``: ``workers``, ``normalize``, ``collate_fn``.

    Returns:
        One mean a name, and ``samples``: how many samples were evaluated. The same on every rank.

    Raises:
        ConfigError: a metric has the wrong shape.
        DataError: the data set is empty.
    """
    world = world or current()
    device = torch.device(world.device)
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    own: list[tuple[int, int, dict[str, tuple[float, float]]]] = []
    try:
        with doing(world, Phase.EVALUATING), torch.inference_mode(), context():
            for chunk, size, data in eval_chunks(dataset, chunk_size=chunk_size, world=world, **loading):
                values = metrics(model, to_device(data, device))
                own.append((chunk, size, {name: _sum(name, v, size) for name, v in values.items()}))
    finally:
        for module, training in was_training.items():
            module.training = training
    everybody: list[Any] = [own]
    if world.world_size > 1:
        everybody = [None] * world.world_size
        dist.all_gather_object(everybody, own)
    return _means(sorted((part for rank in everybody for part in rank), key=lambda part: part[0]))


def _sum(name: str, value: Any, size: int) -> tuple[float, float]:
    """Return the sum and the weight of one metric over one chunk, summed in float64."""
    if isinstance(value, tuple):
        return float(value[0]), float(value[1])
    if value.dim() == 0:
        return float(value) * size, float(size)
    if value.shape != (size,):
        raise ConfigError(
            f"metric {name!r} has shape {tuple(value.shape)} for {size} samples; the mean would be wrong. "
            f"Return one value a sample, shape ({size},), or their mean, or (sum, count)."
        )
    return float(value.double().sum()), float(size)


def _means(chunks: list[tuple[int, int, dict[str, tuple[float, float]]]]) -> dict[str, float]:
    sums: dict[str, tuple[float, float]] = {}
    samples = 0
    for _, size, values in chunks:
        samples += size
        for name, (total, weight) in values.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + weight)
    means = {name: total / weight if weight else float("nan") for name, (total, weight) in sums.items()}
    return {**means, "samples": samples}
