"""fit: the training loop with cadence, as the command uses it: evaluate, save, report, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evenstep.data.loader import Loader
from evenstep.drift import check_drift
from evenstep.metrics import RateMeter
from evenstep.state import TrainState
from evenstep.step import Loss, train_step
from evenstep.timing import Stopwatch, Times


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often fit does what besides training. The end of the run always counts.

    Attributes:
        evaluate_every: epochs between evaluations.
        checkpoint_every: epochs between checkpoints.
        checkpoint_every_steps: steps between checkpoints, besides those at the ends of epochs.
        keep: how many of the newest checkpoints are kept, besides the best.
        best: the metric whose highest value makes the best checkpoint; with a minus sign (``-loss``) the
            lowest.
        check_every: steps between two checks that all ranks hold the same weights, besides one before each
            checkpoint; 0: never.
    """

    evaluate_every: int = 1
    checkpoint_every: int = 1
    checkpoint_every_steps: int | None = None
    keep: int = 3
    best: str = "accuracy"
    check_every: int = 100


class Watcher(Protocol):
    """What fit tells of its progress; a Reporter is one."""

    def step(
        self, step: int, epoch: int, loss: Any, lr: float, images: int, grad_norm: float | None = None
    ) -> None:
        """After each step.

        Args:
            step: committed steps.
            epoch: the epoch of the step, from 0.
            loss: the mean loss over the global batch; a 0-dimensional tensor.
            lr: the learning rate of the first group.
            images: samples in the global batch.
            grad_norm: the gradient's norm before clipping; None if it is not clipped.
        """

    def evaluation(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation.

        Args:
            step: committed steps.
            epoch: finished epochs.
            metrics: what ``evaluation`` returned.
        """

    def times(self, step: int, epoch: int, times: Times) -> None:
        """Before each evaluation is told: where the time of every rank went.

        Args:
            step: committed steps.
            epoch: finished epochs.
            times: seconds since the last start, by rank.
        """

    def checkpoint(self, step: int, epoch: int, path: str | Path) -> None:
        """After each checkpoint, once it is on the disk: training may be some steps ahead by then.

        Args:
            step: the committed steps that it holds.
            epoch: the finished epochs that it holds.
            path: its directory.
        """

    def epoch_end(self, step: int, epoch: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """After each epoch.

        Args:
            step: committed steps.
            epoch: the epoch that has ended, from 0.
            groups: the optimizer's groups.
        """


@dataclass(frozen=True)
class FitResult:
    """What a run came to.

    Attributes:
        metrics: the last evaluation; empty without one.
        images_per_s: training speed over all processes, without the first steps, evaluations and
            checkpoints; None if there were too few steps to tell.
        first_step_at: ``time.time()`` after the first step of this process; None if there was none.
    """

    metrics: dict[str, float]
    images_per_s: float | None
    first_step_at: float | None


def fit(
    state: TrainState,
    train: Loader,
    loss: Loss,
    *,
    epochs: int,
    steps: int | None = None,
    evaluation: Callable[[], dict[str, float]] | None = None,
    cadence: Cadence = Cadence(),
    watcher: Watcher | None = None,
) -> FitResult:
    """Train from where the state stands to the end of the last epoch. Collective: every rank must call.

    In short::

        for batch in train.batches(state, epochs=epochs, steps=steps):
            train_step(state, batch, loss)
            if the epoch or the run ends here: evaluate and save, as the cadence says

    Args:
        state: the state.
        train: the training data.
        loss: the loss function, see ``evenstep.step.Loss``.
        epochs: epochs of the whole run.
        steps: stop at this step, wherever the epoch stands.
        evaluation: returns the metrics of the state's model; every rank calls it.
        cadence: how often what happens.
        watcher: is told of every step, evaluation, checkpoint and epoch.

    Returns:
        The last evaluation and the speed.

    Raises:
        DivergedError, StoppedError: as ``train_step``.
        DriftError: the ranks hold different weights.
        MachineError: the last checkpoint cannot be written, or two in a row cannot.
    """
    meter, stopwatch = RateMeter(), Stopwatch()
    metrics: dict[str, float] = {}
    evaluated_at = saved_at = checked_at = -1
    first_step_at: float | None = None

    @contextlib.contextmanager
    def off_the_clock() -> Iterator[None]:
        yield
        meter.restart_clock()

    def evaluate_now() -> None:
        nonlocal metrics, evaluated_at
        if evaluation is None or evaluated_at == state.step:
            return
        with off_the_clock():
            metrics = evaluation()
            times = stopwatch.everybody(state.world, state.lanes.wait_per_step_s)
        evaluated_at = state.step
        if watcher is not None:
            watcher.times(state.step, state.epoch, times)
            watcher.evaluation(state.step, state.epoch, metrics)

    def check_now() -> None:
        nonlocal checked_at
        if checked_at != state.step and cadence.check_every:
            check_drift(state.model, state.step, state.world)
            checked_at = state.step

    def save_now(*, wait: bool = False) -> None:
        nonlocal saved_at
        if saved_at == state.step:
            return
        if state.world.run_dir is not None:
            check_now()
        score = _score(metrics, cadence.best) if evaluated_at == state.step else None
        with off_the_clock():
            state.save(score=score, keep=cadence.keep, wait=wait)
        saved_at = state.step

    start_step = state.start.step
    for batch in stopwatch.reading(train.batches(state, epochs=epochs, steps=steps)):
        with stopwatch.stepping():
            result = train_step(state, batch, loss)
        meter.update(batch.size)
        if first_step_at is None:
            first_step_at = time.time()
        if watcher is not None:
            watcher.step(state.step, batch.epoch, result.loss, result.lr, batch.size, result.grad_norm)
        if cadence.check_every and state.step % cadence.check_every == 0:
            check_now()
        if batch.last_in_epoch:
            if watcher is not None:
                watcher.epoch_end(state.step, batch.epoch, state.optimizer.param_groups)
            if state.epoch % cadence.evaluate_every == 0:
                evaluate_now()
            if state.epoch % cadence.checkpoint_every == 0:
                save_now()
        every = cadence.checkpoint_every_steps
        if every is not None and state.step % every == 0:
            save_now()
        _tell_saved(state, watcher)
    evaluate_now()
    if state.step > start_step:
        save_now(wait=True)
    state.finish_saving()
    _tell_saved(state, watcher)
    return FitResult(metrics, meter.per_s, first_step_at)


def _score(metrics: Mapping[str, float], best: str) -> float | None:
    value = metrics.get(best.removeprefix("-"))
    return -value if value is not None and best.startswith("-") else value


def _tell_saved(state: TrainState, watcher: Watcher | None) -> None:
    """Tell of the checkpoints that have got onto the disk meanwhile."""
    for saved in state.take_saved():
        if watcher is not None:
            watcher.checkpoint(saved.step, saved.epoch, saved.path)
