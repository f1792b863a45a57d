"""What every worker of ``evenstep train`` and ``evenstep eval`` runs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, Subset

from evenstep import checkpoint
from evenstep.banner import Facts
from evenstep.config import MODELS, OutputConfig, TrainConfig, sizes_of
from evenstep.data.augment import Augment, to_tensor
from evenstep.data.cache import ImageArrays
from evenstep.data.dataset import num_samples
from evenstep.data.loader import Loader
from evenstep.data.sources import Source, open_source
from evenstep.errors import ConfigError
from evenstep.evaluation import evaluate
from evenstep.flat import to_flat
from evenstep.loop import Cadence, FitResult, fit
from evenstep.metrics import classification, weights_sha256
from evenstep.models import assumed, build, check_sizes, num_parameters
from evenstep.numerics import autocast
from evenstep.objective import best_of, loss_of, metrics_of, own_metrics
from evenstep.optim import make_optimizer, make_schedule
from evenstep.precision import PRECISIONS, support, tell
from evenstep.predictions import Recorder, summary
from evenstep.recipes import recipe_values
from evenstep.reporter import Reporter
from evenstep.state import TrainState
from evenstep.step import Loss, train_step
from evenstep.views import at_size, epoch_of_last_step, evaluated
from evenstep.world import World

SMOKE_SAMPLES = 500
"""Samples that a smoke test evaluates."""

_Context = Callable[[], contextlib.AbstractContextManager[Any]]

INIT_IMAGES = 1000
"""Training images that a model with ``init_from_images`` is shown before the first step."""


def train_job(world: World, config: TrainConfig) -> dict[str, Any]:
    """Train and evaluate a classifier. Collective: every rank must call.

    Args:
        world: this process.
        config: the options.

    Returns:
        What ``evenstep train --json`` prints; the same on every rank, but for times.
    """
    source = _source(config)
    _check_test_set(config, source)
    optim = config.optim
    recorder = Recorder()
    with Reporter(config, world) as reporter, _loader(config, source, world) as loader:
        state = _state(config, source, loader.steps_per_epoch, world)
        reporter.start(_facts(config, source, loader, state))
        result = fit(
            state,
            loader,
            _loss(config, state),
            epochs=optim.epochs,
            steps=optim.steps,
            evaluation=_evaluation(config, source, state, recorder),
            cadence=Cadence(
                evaluate_every=config.output.evaluate_every,
                checkpoint_every=config.output.checkpoint_every,
                checkpoint_every_steps=config.output.checkpoint_every_steps,
                keep=config.output.keep,
                best=best_of(config),
                check_every=config.output.check_every,
            ),
            watcher=reporter,
        )
        values = _values(config, source, state, result)
        reporter.finish(values, _shown(config, source, state, recorder))
    return values


def steps_job(world: World, config: TrainConfig) -> None:
    """Train without evaluation, checkpoints and reports: what ``evenstep verify`` watches.

    Collective: every rank must call.

    Args:
        world: this process.
        config: the options.
    """
    source, optim = _source(config), config.optim
    with _loader(config, source, world) as loader:
        state = _state(config, source, loader.steps_per_epoch, world)
        loss = _loss(config, state)
        for batch in loader.batches(state, epochs=optim.epochs, steps=optim.steps):
            train_step(state, batch, loss)


def _values(config: TrainConfig, source: Source, state: TrainState, result: FitResult) -> dict[str, Any]:
    world = state.world
    now, begun = time.time(), world.started or time.time()
    return {
        "run_dir": world.run_dir,
        "step": state.step,
        "epoch": state.epoch,
        "world_size": world.world_size,
        "lanes": world.lanes,
        "batch_size": config.optim.batch_size,
        "train_loss": state.train_loss,
        **_test_values(config, result.metrics, source),
        "weights_sha256": weights_sha256(state.model.state_dict()),
        "images_per_s": result.images_per_s,
        "first_step_s": None if result.first_step_at is None else result.first_step_at - begun,
        "wall_s": now - begun,
        "restarts": world.restart,
        "steps_lost": 0 if world.recovery is None else world.recovery.steps_lost,
        "mode": world.mode,
        "numerics": asdict(state.numerics),
    }


def _shown(
    config: TrainConfig, source: Source, state: TrainState, recorder: Recorder
) -> dict[str, Any] | None:
    """Return what the report shows of the last evaluation, on rank 0. Collective: every rank must call."""
    found = recorder.gather(state.world, is_stream=isinstance(source.test, IterableDataset))
    if found is None or not state.world.is_first:
        return None
    test = _test_set(config, source)
    images = test.images if isinstance(test, ImageArrays) else None
    return summary(found, step=state.step, classes=source.classes or (), images=images)


def eval_job(world: World, config: TrainConfig, path: str) -> dict[str, Any]:
    """Evaluate a checkpoint. Collective: every rank must call.

    Args:
        world: this process.
        config: the options of the run that wrote the checkpoint.
        path: the checkpoint's directory.

    Returns:
        What ``evenstep eval --json`` prints; the same on every rank.
    """
    source = _source(config)
    saved = checkpoint.load(path)
    source = _with_classes(config, source, saved.meta)
    model = _model(config, source)
    checkpoint.load_into(model, saved)
    digest = weights_sha256(model.state_dict())
    average = checkpoint.average_of(saved)
    if average is not None:
        model.load_state_dict(average)
    if source.test is None:
        raise ConfigError(f"the data {config.data.data!r} has no test set, so there is nothing to evaluate.")
    device = torch.device(world.device)
    precision = config.model.precision
    if precision not in PRECISIONS:  # a config.toml by hand; the checkpoint has what the run computed in
        precision = saved.meta.get("numerics", {}).get("precision", "fp32")
    tell(precision, "as in training", world)
    epoch = epoch_of_last_step(int(saved.meta.get("epoch", 0)), int(saved.meta.get("epoch_step", 0)))
    metrics = evaluate(
        evaluated(model.to(device), config.output.tta),
        source.test,
        at_size(metrics_of(config, classification), _sizes(config), lambda: epoch),
        context=_evaluating(config, lambda: autocast(precision, device)),
        **_loading(config, source, saved.meta),
    )
    return {
        "run_dir": str(Path(path).parent.parent),
        "checkpoint": path,
        "step": saved.step,
        "world_size": world.world_size,
        **_test_values(config, metrics, source),
        "weights_sha256": digest,
    }


def _with_classes(config: TrainConfig, source: Source, meta: dict[str, Any]) -> Source:
    """Return the data with the classes of a checkpoint's model, all of which the model has outputs for.

    The data may have names for the first of them only: an ``.npz`` has no more numbers than labels occur.

    Raises:
        ConfigError: the data have other classes, or in another order.
    """
    trained, found = list(meta.get("classes") or ()), list(source.classes or ())
    if not trained:
        return source
    few = len(found) <= len(trained)
    # The data that have no names have numbers for them.
    trained_on_numbers, numbers_found = (names == _numbers(len(names)) for names in (trained, found))
    same_number = trained_on_numbers and len(found) == len(trained)
    if found == trained[: len(found)] or same_number or (numbers_found and few):
        return replace(source, classes=tuple(trained))
    raise ConfigError(
        f"the data {config.data.data!r} have the classes {_listed(found)}, and the model was trained on "
        f"{_listed(trained)}. An output of the model stands for a class by its number, so the accuracy would "
        "be wrong. Give --data with the same classes (in a folder: train and test folders of the same names)."
    )


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return f"({shown})" if len(names) <= 20 else f"({shown} and {len(names) - 20} more)"


def _test_values(config: TrainConfig, metrics: dict[str, float], source: Source) -> dict[str, Any]:
    own = own_metrics(config, metrics)
    return {
        "test_accuracy": metrics.get("accuracy"),
        "test_loss": metrics.get("loss"),
        "test_metrics": {name: value if math.isfinite(value) else None for name, value in own.items()},
        "test_samples": int(metrics.get("samples", 0)),
        "test_total": None if source.test is None else num_samples(source.test),
    }


def _source(config: TrainConfig) -> Source:
    return open_source(config.data.data, data_dir=config.data.data_dir, cache_dir=config.data.cache_dir)


def _check_test_set(config: TrainConfig, source: Source) -> None:
    """Raise ConfigError if an option is given that says how a test set is evaluated, and there is none."""
    by_recipe = {} if config.run.recipe is None else recipe_values(config.run.recipe)
    asked = {key: getattr(config.output, key) for key in ("tta", "metrics", "evaluate_every")}
    for key, value in asked.items() if source.test is None else ():
        if value not in (getattr(OutputConfig(), key), by_recipe.get(key)):
            raise ConfigError(
                f"{key} {value} does nothing with --data {config.data.data}: its test set is None. Leave out "
                f"--{key.replace('_', '-')}, or return a test set, too."
            )


def _test_set(config: TrainConfig, source: Source) -> Any:
    """Return the data that training evaluates: the test set, or the beginning of it in a smoke test."""
    test = source.test
    if not config.run.smoke_test or (num_samples(test) or 0) <= SMOKE_SAMPLES:
        return test
    if isinstance(test, ImageArrays):
        return ImageArrays(test.images[:SMOKE_SAMPLES], test.labels[:SMOKE_SAMPLES], test.classes)
    return Subset(test, range(SMOKE_SAMPLES))


def _shape(config: TrainConfig, source: Source) -> dict[str, int]:
    """Return what the data say of what a model is made for."""
    shape = {} if source.classes is None else {"num_classes": len(source.classes)}
    if isinstance(source.train, ImageArrays):
        _, height, _, channels = source.train.images.shape
        sizes = _sizes(config)
        # A layer that fits one size fits the last one: the size of most steps, and of evaluation.
        shape |= {"in_channels": channels, "image_size": sizes[-1] if sizes else height}
    return shape


def _model(config: TrainConfig, source: Source) -> nn.Module:
    if isinstance(source.train, ImageArrays):
        check_sizes(config.model.model, _sizes(config))
    return build(config.model.model, **_shape(config, source))


def _loading(config: TrainConfig, source: Source, meta: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return how samples are read, which is the same in training and in evaluation.

    With the ``meta`` of a checkpoint images are normalised as in its training, whatever the data are.
    """
    wanted = config.data.memory_format
    if isinstance(source.train, ImageArrays):
        train = source.train
        # Older checkpoints do not have it.
        saved = (meta or {}).get("normalize") or (train.mean, train.std)
        return {
            "normalize": tuple(map(tuple, saved)) if config.data.augment else None,
            "memory_format": None if wanted == "auto" else wanted,
        }
    # A model of the user's may look at its input with view(), which channels_last does not allow.
    own_data = "channels_last" if config.model.model in MODELS else None
    return {"workers": config.data.workers, "memory_format": own_data if wanted == "auto" else wanted}


def _sizes(config: TrainConfig) -> tuple[int, ...]:
    return () if config.data.image_sizes is None else sizes_of(config.data.image_sizes)


def _loss(config: TrainConfig, state: TrainState) -> Loss:
    return at_size(loss_of(config), _sizes(config), lambda: state.epoch)


def _augment(config: TrainConfig) -> Augment:
    data = config.data
    return Augment(crop_padding=data.crop_padding, crop_border=data.crop_border, flip=data.flip)


def _check_batchnorm(config: TrainConfig, model: nn.Module) -> None:
    if config.model.batchnorm == "global" and not any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise ConfigError(
            f"--batchnorm global does nothing with --model {config.model.model}: it has no BatchNorm. Use "
            "--batchnorm lane."
        )


def _init_from_images(model: nn.Module, config: TrainConfig, source: Source) -> None:
    """Show some training images to a model that computes weights from them: ``init_from_images``."""
    init = getattr(model, "init_from_images", None)
    if init is None:
        return
    train = source.train
    if not isinstance(train, ImageArrays):
        raise ConfigError(
            f"the model {config.model.model} computes weights from training images, which it can only be "
            f"shown where evenstep decodes them itself; {config.data.data} gives a Dataset of your own. Use "
            "another --model."
        )
    # Images may be sorted by class, so these come from everywhere.
    rows = np.linspace(0, len(train) - 1, min(INIT_IMAGES, len(train))).astype(np.int64)
    init(to_tensor(train.gather(rows)[0], *(_loading(config, source)["normalize"] or ())))


def _loader(config: TrainConfig, source: Source, world: World) -> Loader:
    own = not isinstance(source.train, ImageArrays)
    if own and config.data.augment:
        raise ConfigError(
            f"--augment works on images that evenstep decodes itself, but {config.data.data} gives a Dataset "
            "of your own. Put the random transforms into its __getitem__, and leave out --augment (with a "
            "recipe that sets it: --no-augment)."
        )
    return Loader(
        source.train,
        config.optim.batch_size,
        augment=_augment(config) if config.data.augment else None,
        world=world,
        **_loading(config, source),
    )


def _optimizer(config: TrainConfig, model: nn.Module) -> Optimizer:
    optim = config.optim
    return make_optimizer(
        model,
        optim.optimizer,
        lr=optim.lr,
        lr_rest=optim.lr_rest,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        weight_decay=optim.weight_decay,
    )


def _state(config: TrainConfig, source: Source, steps_per_epoch: int | None, world: World) -> TrainState:
    optim = config.optim
    model = _model(config, source)
    _check_batchnorm(config, model)
    _init_from_images(model, config, source)
    optimizer = _optimizer(config, model)
    schedule = make_schedule(
        optim.lr_schedule,
        epochs=optim.epochs,
        steps_per_epoch=steps_per_epoch,
        decay=optim.lr_decay,
        decay_epochs=optim.lr_decay_epochs,
        warmup_epochs=optim.warmup_epochs,
    )
    state = TrainState(
        model,
        optimizer,
        schedule=schedule,
        clip_norm=optim.clip_norm,
        ema_decay=optim.ema_decay,
        precision=config.model.precision,
        unused_parameters=config.model.unused_parameters,
        compile=config.model.compile,
        batchnorm=config.model.batchnorm,
        world=world,
    )
    state.double_lanes_on_oom = config.process.lanes_on_oom
    meta = {
        "config": to_flat(config) | {"precision": state.precision},
        "classes": list(source.classes or ()),
        "fingerprint": getattr(source.train, "fingerprint", None),
        "normalize": _loading(config, source).get("normalize"),
    }
    if state.resumed_from is not None:
        _check_resumed(state, checkpoint.read_meta(state.resumed_from), meta)
    state.meta = meta
    return state


def _check_resumed(state: TrainState, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse, or at the end of an epoch only mention, what changes which samples a step takes."""
    sizes = [meta.get("config", {}).get("batch_size") for meta in (before, now)]
    changes = []
    if sizes[0] not in (None, sizes[1]):
        changes.append(f"the batch size was {sizes[0]} and is {sizes[1]} now (--batch-size {sizes[0]})")
    if before.get("fingerprint") not in (None, now["fingerprint"]):
        changes.append(f"the data are not those of --data {before.get('config', {}).get('data')}")
    if changes and state.epoch_step:
        raise ConfigError(
            f"the run stands at step {state.epoch_step} of epoch {state.epoch}, and {' and '.join(changes)}: "
            "the rest of the epoch would repeat some samples and leave others out. Resume with what the run "
            "was started with, or begin a new run in another --run-dir."
        )
    told = logger.bind(file_only=not state.world.is_first)  # all ranks see the same
    for change in changes:
        told.warning("resumed with a change: {}", change)
    epochs = [meta.get("config", {}).get("epochs") for meta in (before, now)]
    if epochs[0] not in (None, epochs[1]):
        told.warning(
            "resumed with epochs {} instead of {}: the schedule is laid over them from here on",
            epochs[1],
            epochs[0],
        )


def _evaluation(
    config: TrainConfig, source: Source, state: TrainState, recorder: Recorder
) -> Callable[[], dict[str, float]] | None:
    if source.test is None:
        return None
    test = _test_set(config, source)
    measured = at_size(
        metrics_of(config, recorder),
        _sizes(config),
        lambda: epoch_of_last_step(state.epoch, state.epoch_step),
    )

    def evaluation() -> dict[str, float]:
        recorder.clear()
        return evaluate(
            evaluated(state.evaluated_model, config.output.tta),
            test,
            measured,
            context=_evaluating(config, state.autocast),
            world=state.world,
            **_loading(config, source),
        )

    return evaluation


def _evaluating(config: TrainConfig, precision: _Context) -> _Context:
    """Return what an evaluation runs in: inference mode for evenstep's own models, which cache nothing."""
    if config.model.model not in MODELS:
        return precision

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with torch.inference_mode(), precision():
            yield

    return context


def _precision_note(asked: str, state: TrainState) -> str | None:
    """Return why a precision was chosen, or what would be faster: unasked none is, since it changes bits."""
    if asked == "auto":
        return f"{state.precision_reason} (--precision auto)"
    found = support("bf16", state.device)
    if asked != "fp32" or state.device.type != "cpu" or not found.is_native:
        return None
    return f"{found.reason}: --precision bf16, or auto, is faster (net with AVX512: 1.6 times), to other bits"


def _assumed_note(config: TrainConfig, source: Source) -> str | None:
    """Return what the model was made for although nobody has said so."""
    found = assumed(config.model.model, _shape(config, source))
    if not found:
        return None
    note = (
        ", ".join(f"{key} {value}" for key, value in found.items()) + ": assumed, since the data do not say"
    )
    if "num_classes" not in found:
        return note
    return (
        f"{note}; `classes` beside train and test in a dict, or as an attribute of train, names the classes"
    )


def _facts(config: TrainConfig, source: Source, loader: Loader, state: TrainState) -> Facts:
    per_epoch = loader.steps_per_epoch
    ends = [None if per_epoch is None else per_epoch * config.optim.epochs, config.optim.steps]
    return Facts(
        data=source.name,
        train_samples=loader.num_samples,
        test_samples=None if source.test is None else num_samples(source.test),
        steps_per_epoch=per_epoch,
        total_steps=int(min((end for end in ends if end is not None), default=math.inf))
        if any(end is not None for end in ends)
        else None,
        num_parameters=num_parameters(state.model)[0],
        groups=state.optimizer.param_groups,
        lr=state.base_lrs[0],
        start_step=state.step,
        repeats=state.step - state.start.step,
        start_epoch=state.epoch,
        data_note=source.note,
        assumed_note=_assumed_note(config, source),
        precision=state.precision,
        precision_note=_precision_note(config.model.precision, state),
    )
