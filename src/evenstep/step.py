"""The training step: the one function through which every run goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep import memory
from evenstep.data.batch import Batch, LaneBatch, map_tensors
from evenstep.errors import DivergedError, StoppedError
from evenstep.metrics import naming
from evenstep.passes import Totals
from evenstep.seeding import seed_commit, seed_step, turn_seed
from evenstep.state import TrainState

Loss = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Tensor | float]"]
"""``loss(model, batch)``: the mean over the samples it is given; or (sum, count) for a mean over something
else, such as the tokens of all sequences. The gradient is that of the true mean over the global batch."""


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    Attributes:
        step: the step's number, from 0.
        loss: the mean loss over the global batch before the step; a 0-dimensional float64 tensor.
        lr: the learning rate of the optimizer's first group in this step.
        grad_norm: the gradient's norm before clipping; None if it is not clipped.
    """

    step: int
    loss: Tensor
    lr: float
    grad_norm: float | None


def train_step(state: TrainState, batch: Batch, loss: Loss) -> StepResult:
    """Do one optimizer step on one global batch. Collective: every rank must call with its part of the batch.

    A step is a transaction: forward, backward and the sums leave the state as it is, and the commit at the
    end is local. So whatever happens on the way, every process holds a whole state, before or after the step.

    Args:
        state: the state; changed by the commit only.
        batch: this rank's part of the global batch, from ``Loader.batches``.
        loss: the loss function, see ``Loss``. On an empty lane it gets a stand-in and its value is dropped.

    Returns:
        The mean loss over the global batch and the learning rate, the same on every rank.

    Raises:
        MemoryExhaustedError: this rank's lane does not fit into memory. The launch ends the others.
        ConfigError: a label has no output of the model.
        DivergedError: the loss is not finite. Raised on every rank, before the commit.
        StoppedError: a process was asked to stop. Raised on every rank, after the commit and a checkpoint.
    """
    world = state.world
    own_losses: dict[int, Tensor] = {}
    turn = world.together.turn(batch)
    seed = turn_seed(world.seed, turn)
    done = state.replayed(batch)
    if done is not None:
        seed_commit(seed, batch.step, state.device)
        return StepResult(batch.step, done.loss, done.lr, done.grad_norm)
    world.observer.before_step(state, batch, loss)
    world.at("before_forward", state.step)
    state.begin()

    def forward(part: LaneBatch, model: nn.Module) -> tuple[Tensor, float]:
        if turn:  # the batch's further steps do not repeat the random numbers of the first
            seed_step(seed, batch.step, part.lane, state.device)
        with state.autocast():
            value = loss(model, to_device(part.data, state.device))
            share = part.size / batch.size
            total, count = value if isinstance(value, tuple) else (value * share, 0.0)
        own_losses[part.lane] = total.detach()
        return total, float(count)

    totals = state.lanes.run(
        batch,
        forward,
        scale=state.scaler.scale,
        watched=lambda part: _watched(state, batch, part),
    )
    world.at("after_reduce", state.step)
    mean = totals.loss / totals.count if totals.count else totals.loss
    if not torch.isfinite(mean):
        _raise_diverged(state, batch, mean, own_losses)
    seed_commit(seed, batch.step, state.device)
    lr, grad_norm = state.commit(batch, mean, float(totals.count))
    result = StepResult(batch.step, mean, lr, grad_norm)
    world.observer.after_step(state, batch, result)
    if totals.stop:
        _raise_stopped(state, totals)
    return result


@contextlib.contextmanager
def _watched(state: TrainState, batch: Batch, part: LaneBatch) -> Iterator[None]:
    """Run one lane's passes inside this block, whose errors then say where and why."""
    ids = part.ids
    named = naming(lambda row: f"training sample {ids[row]}" if row < len(ids) else f"row {row} of the batch")
    with named, memory.watched(state, batch, part):
        yield


def to_device(data: Any, device: torch.device) -> Any:
    """Return ``data`` with every tensor in it on ``device``: tuples, lists and mappings are looked into."""
    return map_tensors(data, lambda x: x if x.device == device else x.to(device, non_blocking=True))


def _raise_diverged(state: TrainState, batch: Batch, mean: Tensor, own: dict[int, Tensor]) -> NoReturn:
    """Name the lanes whose loss is not finite. Collective: the mean is the same, so every rank comes here."""
    bad = [lane for lane, loss in own.items() if not torch.isfinite(loss)]
    everybody: list[Any] = [bad]
    if state.world.world_size > 1:
        everybody = [None] * state.world.world_size
        dist.all_gather_object(everybody, bad)
    lanes = sorted(lane for part in everybody for lane in part)
    where = f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {', '.join(map(str, lanes))}"
    raise DivergedError(
        f"the loss is {float(mean)} at step {batch.step} (epoch {batch.epoch}), in {where}. Every further "
        "step would spoil the weights, so the run stops here; the last checkpoint is good. Lower --lr, or "
        "clip the gradient with --clip-norm 1."
    )


def _raise_stopped(state: TrainState, totals: Totals) -> NoReturn:
    path = state.save_to_stop()
    saved = "" if state.world.run_dir is None else " and saved"
    raise StoppedError(
        f"asked to stop: all ranks stopped{saved} after step {state.step}"
        + (f" ({path})" if path else "")
        + ". Run the same command with --resume to go on."
    )
