"""TrainState: all that must survive between two steps, and how it is saved and restored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evenstep import checkpoint
from evenstep.data.batch import Batch
from evenstep.errors import CheckpointError, ConfigError, DivergedError
from evenstep.lanes import Lanes
from evenstep.optim import Schedule, apply_schedule
from evenstep.saving import Saved, Saver
from evenstep.world import World, current

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stateful(Protocol):
    """Anything that can hand out its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


@dataclass(frozen=True)
class Numerics:
    """The numerics key: what the bits of a run depend on besides its options and its seed.

    It is stored in every checkpoint. A run that goes on under another key may get other bits from there on.
    """

    lanes: int
    threads: int
    mode: str
    precision: str
    compile: bool
    device: str
    torch: str

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return a line for each field in which ``other`` differs."""
        return [
            f"{name}: {other.get(name)!r} in the checkpoint, {value!r} now"
            for name, value in asdict(self).items()
            if other.get(name) != value
        ]


class TrainState:
    """A model, its optimizer and everything else that a step changes.

    Made inside ``main(world)`` on every rank. Moves the model to the process's device, makes rank 0's initial
    weights everybody's, and restores the newest checkpoint if the run resumes.
    Collective: every rank must call.

    Args:
        model: the model; the same on every rank.
        optimizer: the optimizer over its parameters.
        schedule: the learning rate's course: a ``evenstep.optim.Schedule``, or a torch scheduler. torch's
            ReduceLROnPlateau is saved and restored, but stepped by you, since it needs your metric.
        schedule_every: when a torch scheduler is stepped.
        clip_norm: clip the norm of the whole gradient to this.
        ema_decay: keep an exponential moving average of the weights with this decay in ``ema``.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for the forward pass (autocast; the weights stay fp32).
        unused_parameters: ``error`` or ``allow`` parameters that get no gradient.
        compile: run the model through torch.compile.
        extras: more objects with ``state_dict`` and ``load_state_dict`` that must survive.
        world: the world; by default the current one.

    Attributes:
        step: committed optimizer steps.
        epoch: finished epochs.
        epoch_step: committed steps since the last finished epoch.
        meta: json-able values that go into the checkpoint's manifest; yours to fill.
        double_lanes_on_oom: save the state when a lane does not fit into memory (memory.py); set by the
            command's ``--lanes-on-oom``, which starts the run again with twice the lanes.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
        ConfigError: an argument is wrong.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each thing that is optional in a step
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        schedule: Schedule | LRScheduler | None = None,
        schedule_every: Literal["step", "epoch"] = "step",
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        unused_parameters: Literal["error", "allow"] = "error",
        compile: bool = False,
        extras: Mapping[str, Stateful] | None = None,
        world: World | None = None,
    ) -> None:
        if precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"precision is {precision!r}; choose fp32, bf16 or fp16 (--precision bf16).")
        self.world = world or current()
        self.device = torch.device(self.world.device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.schedule = schedule
        self.schedule_every = schedule_every
        self.clip_norm = clip_norm
        self.precision = precision
        self.extras = dict(extras or {})
        self.step = 0
        self.epoch = 0
        self.epoch_step = 0
        self.meta: dict[str, Any] = {}
        self.double_lanes_on_oom = False
        self._saver = Saver(self.world)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._loss_samples = 0
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        called: Any = torch.compile(self.model) if compile else self.model
        self.lanes = Lanes(called, self.world, unused_parameters=unused_parameters)
        # After Lanes, because DDP has made rank 0's weights everybody's by then.
        self.ema: nn.Module | None = None
        self._averaged: AveragedModel | None = None
        if ema_decay is not None:
            average = get_ema_multi_avg_fn(ema_decay)  # type: ignore[no-untyped-call]
            self._averaged = AveragedModel(self.model, multi_avg_fn=average)
            self.ema = self._averaged.module
        self.numerics = Numerics(
            lanes=self.world.lanes,
            threads=self.world.threads,
            mode=self.world.mode,
            precision=precision,
            compile=compile,
            device=_device_name(self.device),
            torch=torch.__version__.split("+")[0],
        )
        self.resumed_from: Path | None = None
        if self.world.resume and self.world.run_dir is not None:
            path = checkpoint.latest(self.world.run_dir)
            if path is not None:
                self.restore(path)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the forward pass runs."""
        return autocast(self.precision, self.device)

    @property
    def train_loss(self) -> float | None:
        """The mean training loss over the samples of the current epoch, or of the one just finished."""
        return float(self._loss_sum) / self._loss_samples if self._loss_samples else None

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated and shown: the moving average if there is one, else the model."""
        return self.model if self.ema is None else self.ema

    def commit(self, batch: Batch, loss: Tensor, count: float) -> tuple[float, float | None]:
        """Turn the reduced gradient into the next state. Local: nothing is communicated.

        Args:
            batch: this step's batch.
            loss: its mean loss.
            count: what the gradient has to be divided by; 0 if it is a mean already.

        Returns:
            The learning rate of the first group in this step, and the gradient's norm if it is clipped.
        """
        params = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in params if p.grad is not None]
        if count and gradients:
            torch._foreach_div_(gradients, count)
        if isinstance(self.schedule, Schedule):
            apply_schedule(self.optimizer, self.base_lrs, self.schedule.factor(self.step, self.epoch))
        self.scaler.unscale_(self.optimizer)
        grad_norm = None
        if self.clip_norm is not None:
            grad_norm = float(nn.utils.clip_grad_norm_(params, self.clip_norm))
            if not math.isfinite(grad_norm) and not self.scaler.is_enabled():
                raise DivergedError(
                    f"the gradient's norm is {grad_norm} at step {self.step}, although the loss is finite. "
                    "The update would spoil the weights, so the run stops here. Lower --lr, or use "
                    "--precision fp32."
                )
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.lanes.commit()
        if self._averaged is not None:
            self._averaged.update_parameters(self.model)
        self._count_step(batch, loss)
        is_due = self.schedule_every == "step" or batch.last_in_epoch
        if (
            is_due
            and isinstance(self.schedule, LRScheduler)
            and not isinstance(self.schedule, ReduceLROnPlateau)
        ):
            self.schedule.step()
        return lr, grad_norm

    def _count_step(self, batch: Batch, loss: Tensor) -> None:
        if self.epoch_step == 0:
            self._loss_sum, self._loss_samples = torch.zeros_like(loss), 0
        self._loss_sum = self._loss_sum + loss * batch.size
        self._loss_samples += batch.size
        self.step += 1
        if batch.last_in_epoch:
            self.epoch, self.epoch_step = self.epoch + 1, 0
        else:
            self.epoch_step += 1

    def training_state(self) -> dict[str, Any]:
        """Return everything but the model's weights, as plain values and tensors."""
        return {
            "position": {
                "step": self.step,
                "epoch": self.epoch,
                "epoch_step": self.epoch_step,
                "loss_sum": float(self._loss_sum),
                "loss_samples": self._loss_samples,
            },
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if isinstance(self.schedule, LRScheduler) else None,
            "scaler": self.scaler.state_dict(),
            "averaged": None if self._averaged is None else self._averaged.state_dict(),
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
        }

    def manifest_meta(self) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says of this run, as json-able values."""
        return {
            **self.meta,
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "seed": self.world.seed,
            "lanes": self.world.lanes,
            "world_size": self.world.world_size,
            "numerics": asdict(self.numerics),
        }

    def save(self, *, score: float | None = None, keep: int = 3, wait: bool = False) -> Path | None:
        """Save a checkpoint into the run directory. Between steps; any rank may call, rank 0 writes.

        Training waits only while the state is copied; the files are written in the background, one
        checkpoint at a time. The end of main waits for them, and so does :meth:`finish_saving`.

        Args:
            score: how good this state is (higher is better); the best checkpoint is kept.
            keep: how many of the newest checkpoints are kept.
            wait: return when the checkpoint is on the disk.

        Returns:
            The checkpoint's directory on rank 0, None on the others and without a run directory.

        Raises:
            MachineError: it cannot be written, older checkpoints are untouched. Without ``wait``, a single
                failure is logged and the run goes on; the next save raises if it fails, too.
        """
        if self.world.run_dir is None or not self.world.is_first:
            return None
        self._saver.save(
            self.world.run_dir,
            step=self.step,
            model=self.model.state_dict(),
            training=self.training_state(),
            meta=self.manifest_meta(),
            score=score,
            keep=keep,
            wait=wait,
        )
        return checkpoint.path_of(self.world.run_dir, self.step)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            MachineError: it could not be written.
        """
        self._saver.wait()

    def take_saved(self) -> list[Saved]:
        """Return the checkpoints that have got onto the disk since the last call."""
        return self._saver.take_saved()

    def restore(self, path: str | Path) -> None:
        """Take the state of a checkpoint. Every rank must call, with the same path.

        Raises:
            CheckpointError: it is missing, damaged, or of another model or optimizer.
        """
        saved = checkpoint.load(path)
        checkpoint.load_into(self.model, saved)
        training = saved.training
        try:
            self.optimizer.load_state_dict(training["optimizer"])
            if isinstance(self.schedule, LRScheduler) and training["schedule"] is not None:
                self.schedule.load_state_dict(training["schedule"])
            if self.scaler.is_enabled() and training["scaler"]:
                self.scaler.load_state_dict(training["scaler"])
            if self._averaged is not None:
                self._restore_average(training["averaged"])
            for name, extra in self.extras.items():
                extra.load_state_dict(training["extras"][name])
            position = training["position"]
            self.step, self.epoch, self.epoch_step = (position[k] for k in ("step", "epoch", "epoch_step"))
            self._loss_sum = torch.tensor(position["loss_sum"], dtype=torch.float64, device=self.device)
            self._loss_samples = position["loss_samples"]
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not fit this run: {error}. It was saved with another optimizer, schedule or "
                "extras. Resume with the options of its config.toml, or begin a new run in another --run-dir."
            ) from error
        self.resumed_from = Path(path)
        for line in self.numerics.differences(saved.meta.get("numerics", {})):
            logger.warning("resumed under another numerics key, so bits may differ from here on: {}", line)

    def _restore_average(self, saved: dict[str, Tensor] | None) -> None:
        assert self._averaged is not None
        if saved is not None:
            self._averaged.load_state_dict(saved)
            return
        logger.warning("the checkpoint has no moving average: it begins with the checkpoint's weights")
        self._averaged.module.load_state_dict(self.model.state_dict())


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a forward pass of ``precision`` runs."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[precision])


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
