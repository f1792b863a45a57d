"""Evaluation: every sample exactly once, and the same bits on any number of processes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.data.chunks import eval_chunks
from evenstep.data.same import check_equal
from evenstep.errors import ConfigError
from evenstep.heartbeat import Activity, Beat, Phase, now
from evenstep.metrics import kind_of, naming
from evenstep.recovery import doing
from evenstep.seeding import preserved_rng, seed_chunk
from evenstep.step import to_device
from evenstep.world import World, current

Metrics = Callable[[nn.Module, Any], "Mapping[str, Tensor | tuple[Tensor | float, Tensor | float]]"]
"""``metrics(model, batch)``: for each name the values of the samples, shape (n,); or a 0-dimensional tensor,
their mean; or (sum, count) for a mean over something else than samples."""

EVAL_CHUNK = {"cpu": 32, "cuda": 500}
"""Samples a chunk, by the type of the device. On a CPU what a layer writes should still be in
a cache when the next one reads it, and memory that training has not taken yet costs time (docs/log.md)."""

_MEET_S = 10.0
_LOOK_EVERY_S = 0.001
# So often in a row: another process may be seen in the middle of writing its row.
_SURE = 20


def evaluate(
    model: nn.Module,
    dataset: Any,
    metrics: Metrics,
    *,
    chunk_size: int | None = None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    world: World | None = None,
    **loading: Any,
) -> dict[str, float]:
    """Return the mean of each metric over ``dataset``. Collective: every rank must call.

    The data set is cut into chunks of fixed size, whatever the number of processes; each rank evaluates some
    of them in evaluation mode, and the chunks' sums are added in the order of the chunks. No sample is
    padded, dropped or counted twice. Random numbers that the model draws are seeded for each chunk.

    No gradients are kept, but it is not torch's inference mode: what a model caches in its first forward pass
    (rotary tables, masks) must do for training afterwards. ``context=torch.inference_mode`` makes it 3 %
    faster for models that cache nothing.

    Args:
        model: the model itself, not DDP. Its training mode is put back afterwards.
        dataset: images (``ImageArrays``) or any torch Dataset.
        metrics: the function that measures one chunk, see ``Metrics``.
        chunk_size: samples a chunk; by default that of ``EVAL_CHUNK``. It is part of the bits, as the batch
            size is.
        context: what the forward pass runs in, such as ``state.autocast``.
        world: the world; by default the current one.
        **loading: passed to ``eval_chunks``: ``workers``, ``normalize``, ``collate_fn``,
            ``memory_format``.

    Returns:
        One mean a name, and ``samples``: how many samples were evaluated. The same on every rank.

    Raises:
        ConfigError: a metric has the wrong shape or type, or the ranks do not read the same data.
        DataError: the data set is empty.
    """
    world = world or current()
    device = torch.device(world.device)
    num = EVAL_CHUNK[device.type] if chunk_size is None else chunk_size
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    own: list[tuple[int, int, dict[str, tuple[float, float]]]] = []
    found: list[str] = []
    try:
        with doing(world, Phase.EVALUATING), preserved_rng(device), torch.no_grad(), context():
            for chunk, size, data in eval_chunks(
                dataset, chunk_size=num, world=world, found=found, **loading
            ):
                now(world, Activity.EVALUATE)
                seed_chunk(world.seed, chunk, device)
                with naming(functools.partial(_test_sample, chunk * num)):
                    values = as_mapping(metrics(model, to_device(data, device)))
                own.append((chunk, size, {name: _sum(name, v, size) for name, v in values.items()}))
    finally:
        for module, training in was_training.items():
            module.training = training
    everybody: list[Any] = [own]
    if world.world_size > 1:
        _meet(world)
        both: list[Any] = [None] * world.world_size
        dist.all_gather_object(both, (own, ", ".join(found)))
        now(world, Activity.USER)
        check_equal(dataset, [data for _, data in both])
        everybody = [part for part, _ in both]
    return _means(sorted((part for rank in everybody for part in rank), key=lambda part: part[0]))


def _test_sample(first: int, row: int) -> str:
    return f"test sample {first + row}"


def _meet(world: World) -> None:
    """Wait for the other processes of this machine, and notice if one of them never comes.

    A collective would not: it would mix with that of a step, and hang or fail without a word of why.

    Raises:
        ConfigError: another process has begun the next step, or has ended its main.
    """
    recovery = world.recovery
    if recovery is None:
        return
    pulse = recovery.pulse
    pulse.evaluations += 1
    pulse.now(Activity.GATHER)
    end, seen = time.monotonic() + _MEET_S, 0
    while time.monotonic() < end:
        rows = [beat for beat in pulse.beats.read() if beat.pid and beat.restart == pulse.restart]
        absent = [beat for beat in rows if beat.evaluations < pulse.evaluations]
        if not absent:
            return
        gone = [beat for beat in absent if beat.phase == Phase.DONE or _has_gone_on(beat, pulse.step)]
        seen = seen + 1 if gone else 0
        if seen > _SURE:
            where = "has ended its main" if gone[0].phase == Phase.DONE else "does the next step"
            raise ConfigError(
                f"evaluate was called after step {pulse.step} on rank {world.rank}, while rank "
                f"{gone[0].rank} {where}. Every rank must call evaluate: each does a part. Take it out of "
                "`if world.rank == 0`, and print the result on rank 0 only."
            )
        time.sleep(_LOOK_EVERY_S)


def _has_gone_on(beat: Beat, step: int) -> bool:
    return beat.activity in (Activity.FORWARD, Activity.REDUCE) and beat.step >= step


def as_mapping(values: Any) -> Mapping[str, Any]:
    """Return what a metrics function gave for a chunk.

    Raises:
        ConfigError: it is no mapping from names.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigError(
            f"the metrics function returned {kind_of(values)}; expected a dict with one value a sample for "
            "each name. Give the values a name: return {'error': values}."
        )
    return values


def _sum(name: str, value: Any, size: int) -> tuple[float, float]:
    """Return the sum and the weight of one metric over one chunk, summed in float64."""
    wanted = f"Return one value a sample, a tensor of shape ({size},), or their mean, or (sum, count)."
    if name == "samples":
        raise ConfigError(
            "a metric is called 'samples', as evaluate calls the number of samples: one of the two would be "
            "lost. Give it another name."
        )
    if isinstance(value, tuple):
        if len(value) != 2 or not all(_is_number(part) for part in value):
            raise ConfigError(f"metric {name!r} is {kind_of(value)}; a tuple must be (sum, count). {wanted}")
        return float(value[0]), float(value[1])
    if not isinstance(value, Tensor) or value.is_complex():
        raise ConfigError(f"metric {name!r} is {kind_of(value)}; expected real numbers in a tensor. {wanted}")
    if value.dim() == 0:
        return float(value) * size, float(size)
    if value.shape != (size,):
        raise ConfigError(
            f"metric {name!r} has shape {tuple(value.shape)} for {size} samples; the mean would be wrong. "
            f"{wanted}"
        )
    return float(value.double().sum()), float(size)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float))


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
