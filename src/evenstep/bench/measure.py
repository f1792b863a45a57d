"""What each process of ``evenstep bench`` runs: the same steps, through one of the loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from evenstep import jobs
from evenstep.bench.peak import Peak, flops_of, peak_of
from evenstep.bench.plan import Row
from evenstep.config import TrainConfig
from evenstep.data.batch import Batch
from evenstep.data.sources import Source
from evenstep.flat import from_flat
from evenstep.muon import compute_in
from evenstep.numerics import autocast
from evenstep.objective import loss_of
from evenstep.position import Position
from evenstep.precision import settle
from evenstep.seeding import mix_array
from evenstep.step import Loss, to_device, train_step
from evenstep.world import World

PARTS = ("data", "forward", "backward", "wait", "other")
"""Where the time of a step goes. wait: from this process's last gradient to the optimizer."""

MAX_PROFILED = 20


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process measures.

    Attributes:
        row: the way to train.
        steps: steps of the training, the first ones included.
        drop: how many of the first steps do not count.
        profile: whether further steps follow, in which each part is timed.
        gpus: the GPUs of DataParallel.
        peak_s: seconds to measure each peak for.
    """

    row: Row
    steps: int
    drop: int
    profile: bool
    gpus: tuple[int, ...] = ()
    peak_s: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process measured.

    Attributes:
        images: samples of the global batches of the steps that count.
        wall_s: seconds for them.
        samples: samples that this process trained in all steps, the dropped ones included.
        digest: a number that stands for which samples these were, whatever their order; None for a stream.
        device: the device's name.
        loss: the loss of the last step: this process's own in torch's loops.
        peak: the arithmetic that this process reaches beside the others.
        precision: what it computed in.
        parts: seconds in each of ``PARTS`` over the profiled steps.
        flops_per_image: floating-point operations of forward and backward for one sample.
    """

    images: int
    wall_s: float
    samples: int
    digest: int | None
    device: str
    loss: float
    peak: Peak
    precision: str = "fp32"
    parts: dict[str, float] | None = None
    flops_per_image: float | None = None


Step = Callable[[Batch, Loss], "Tensor"]


def measure(world: World, config: TrainConfig, task: Task) -> Measured:
    """Train some steps and time them. Collective: every rank must call.

    Args:
        world: this process.
        config: the options of the training.
        task: what to measure.
    """
    device = torch.device(world.device)
    config = from_flat({"precision": settle(config.model.precision, device)[0]}, config)
    source = jobs._source(config)
    loss = loss_of(config)
    num_profiled = min(task.steps - task.drop, MAX_PROFILED) if task.profile else 0
    seen: list[tuple[int, tuple[int, ...]]] = []
    images, samples, wall_s, begun = 0, 0, 0.0, 0.0
    laps: Laps | None = None
    value = torch.zeros(())
    with jobs._loader(config, source, world) as loader:
        start, step, params, optimizer = _stepper(world, config, source, task)
        for batch in loader.batches(start, steps=task.steps + num_profiled):
            if laps is not None:
                laps.lap("data")
                step(batch, laps.forward(loss))
                laps.lap("other")
                continue
            value = step(batch, loss)
            samples += sum(part.size for part in batch.lanes)
            seen += [(batch.step, part.ids) for part in batch.lanes]
            done = batch.step + 1
            if done > task.drop:
                images += batch.size
            if done == task.steps:
                wall_s = _now(device) - begun
                if num_profiled:
                    laps = Laps(device, params, optimizer, alone=world.world_size == 1)
            elif done == task.drop:
                images, begun = 0, _now(device)
        sized = loader.num_samples is not None
        profiled = None if laps is None else laps.end()
    return Measured(
        images=images,
        wall_s=wall_s,
        samples=samples,
        digest=_digest(seen) if sized else None,
        device=_name(device),
        loss=float(value),
        peak=peak_of(device, config.model.precision, task.peak_s),
        precision=config.model.precision,
        parts=profiled,
        flops_per_image=_flops(config, source, world, loss) if task.profile and world.is_first else None,
    )


def _stepper(
    world: World, config: TrainConfig, source: Source, task: Task
) -> tuple[Any, Step, list[nn.Parameter], Optimizer]:
    """Return where the data begin, a function that does one step, the parameters and the optimizer."""
    if task.row.kind == "evenstep":
        state = jobs._state(config, source, None, world)
        ours = [p for p in state.model.parameters() if p.requires_grad]
        return state, lambda batch, loss: train_step(state, batch, loss).loss, ours, state.optimizer
    device = torch.device(world.device)
    module = jobs._model(config, source).to(device)
    optimizer = jobs._optimizer(config, module)
    compute_in(optimizer, config.model.precision)
    params = [p for p in module.parameters() if p.requires_grad]
    model: nn.Module = _compiled(module) if config.model.compile else module
    if task.row.kind == "ddp":
        model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=config.model.unused_parameters == "allow",
        )
    elif task.row.kind == "data_parallel":
        model = nn.DataParallel(model, device_ids=list(task.gpus))
    scaler = torch.amp.GradScaler(device.type, enabled=config.model.precision == "fp16")

    def step(batch: Batch, loss: Loss) -> Tensor:
        (part,) = batch.lanes
        optimizer.zero_grad()
        data = to_device(part.data, device)
        with autocast(config.model.precision, device):
            mean = _mean(loss(model, data))
        scaler.scale(mean).backward()  # type: ignore[no-untyped-call]
        if config.optim.clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, config.optim.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return mean.detach()

    return Position(0, 0, 0), step, params, optimizer


def _mean(value: Tensor | tuple[Tensor, Tensor | float]) -> Tensor:
    """Return a loss as a mean, also where the user's function gives (sum, count)."""
    return value[0] / value[1] if isinstance(value, tuple) else value


def _compiled(module: nn.Module) -> nn.Module:
    model: Any = torch.compile(module)
    assert isinstance(model, nn.Module)
    return model


class Laps:
    """Times the parts of a step. On a GPU it waits for the device at each mark, so the step gets slower.

    The same marks serve every loop: the loss function is wrapped, and hooks on the parameters and on the
    optimizer say when the last gradient of this process was there and when the optimizer began.
    """

    def __init__(
        self, device: torch.device, params: list[nn.Parameter], optimizer: Optimizer, *, alone: bool
    ) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._alone = alone
        self._next = "other"
        self._gradient: Any = None
        hooks: list[Any] = [optimizer.register_step_pre_hook(self._before_optimizer)]
        hooks += [p.register_post_accumulate_grad_hook(self._after_gradient) for p in params]  # type: ignore[no-untyped-call]
        self._hooks = hooks
        self._last = _now(device)

    def lap(self, part: str) -> float:
        """Count the time since the last mark for ``part`` and return the clock."""
        now = _now(self._device)
        self.seconds[part] += now - self._last
        self._last = now
        if part == "data":
            self._next, self._gradient = "other", None
        return now

    def forward(self, loss: Loss) -> Loss:
        """Return ``loss`` with a mark before and after it."""

        def timed(model: nn.Module, batch: Any) -> Any:
            self.lap(self._next)
            value = loss(model, batch)
            self.lap("forward")
            self._next = "backward"
            return value

        return timed

    def end(self) -> dict[str, float]:
        """Remove the hooks and return the seconds of each part."""
        for hook in self._hooks:
            hook.remove()
        return self.seconds

    def _after_gradient(self, _: Tensor) -> None:
        if self._device.type == "cuda":  # no waiting here: it would keep backward from running ahead
            self._gradient = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._gradient.record()
        else:
            self._gradient = time.perf_counter()

    def _before_optimizer(self, *_: Any) -> None:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        now = self.lap("backward")
        if self._gradient is None or self._alone:
            return
        waited = now - self._gradient if event is None else self._gradient.elapsed_time(event) / 1e3
        self.seconds["backward"] -= waited
        self.seconds["wait"] += waited


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _digest(seen: list[tuple[int, tuple[int, ...]]]) -> int:
    """Return a number for (step, sample) pairs that does not depend on who trained which."""
    sums = [int(mix_array(step, np.array(ids, np.uint64)).sum(dtype=np.uint64)) for step, ids in seen if ids]
    return sum(sums) % (1 << 64)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _flops(config: TrainConfig, source: Source, world: World, loss: Loss) -> float | None:
    """Return the operations for one sample, counted on one of this process's lanes; None if none count."""
    device = torch.device(world.device)
    with jobs._loader(config, source, world) as loader:
        (batch,) = loader.batches(Position(0, 0, 0), steps=1)
    part = batch.lanes[-1]
    if not part.size:
        return None
    model = jobs._model(config, source).to(device)
    data = to_device(part.data, device)
    with autocast(config.model.precision, device):
        return flops_of(lambda: _mean(loss(model, data))) / part.size or None
