"""TrainState: all that must survive between two steps, and how it is saved and restored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evenstep import checkpoint, log
from evenstep import precision as precisions
from evenstep.agreement import check_same_precision
from evenstep.checkpoint import Checkpoint
from evenstep.data.batch import Batch
from evenstep.errors import CheckpointError, ConfigError, DivergedError
from evenstep.globallanes import GlobalLanes
from evenstep.heartbeat import Activity, Phase, now
from evenstep.lanes import Lanes
from evenstep.muon import compute_in
from evenstep.numerics import Numerics, autocast, device_name
from evenstep.optim import Schedule, apply_schedule, check_groups, check_no_closure
from evenstep.parameters import check_trained
from evenstep.position import Progress
from evenstep.recovery import doing
from evenstep.resuming import newest_whole
from evenstep.saving import Saved, Saver
from evenstep.several import joined, part_asked_for, part_to_go_on
from evenstep.storable import plain_values
from evenstep.unsaved import Unsaved, put_back
from evenstep.world import World, current


class Stateful(Protocol):
    """Anything that can hand out its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


class TrainState(Progress):
    """A model, its optimizer and everything else that a step changes.

    Made inside ``main(world)`` on every rank. Moves the model to the process's device, makes rank 0's initial
    weights everybody's, and restores the newest checkpoint if the run resumes.
    Collective: every rank must call.

    Args:
        model: the model; the same on every rank.
        optimizer: the optimizer over its parameters.
        schedule: the learning rate's course: a ``evenstep.optim.Schedule``, or a torch scheduler. torch's
            ReduceLROnPlateau is saved and restored, but stepped by you, since it needs your metric.
        schedule_every: when a torch scheduler is stepped: after each step, or after the first step on an
            epoch's last batch. Further steps on that batch have the next epoch's rate already.
        clip_norm: clip the norm of the whole gradient to this.
        ema_decay: keep an exponential moving average of the weights with this decay in ``ema``.
        precision: ``fp32``, or ``bf16`` or ``fp16`` for the forward pass (autocast; the weights stay fp32).
            ``auto``: bf16 where the device computes it itself, else fp32; a run that goes on keeps its own.
        unused_parameters: ``error`` or ``allow`` parameters that get no gradient.
        compile: run the model through torch.compile.
        batchnorm: what BatchNorm normalises with: the samples of each ``lane``, or of the ``global`` batch.
            For the latter the model's BatchNorm and SyncBatchNorm layers are converted in place.
        extras: more objects with ``state_dict`` and ``load_state_dict`` that must survive.
        world: the world; by default the current one.

    Attributes:
        precision: the precision that was asked for, or chosen.
        precision_reason: why it was chosen.
        step: committed optimizer steps.
        epoch: finished epochs.
        epoch_step: batches since the last finished epoch with which steps were committed.
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
        precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32",
        unused_parameters: Literal["error", "allow"] = "error",
        compile: bool = False,
        batchnorm: Literal["lane", "global"] = "lane",
        extras: Mapping[str, Stateful] | None = None,
        world: World | None = None,
    ) -> None:
        check_no_closure(optimizer)
        if batchnorm not in ("lane", "global"):
            raise ConfigError(f"batchnorm is {batchnorm!r}; choose lane or global (--batchnorm global).")
        if batchnorm == "global" and compile:
            raise ConfigError(
                "--batchnorm global cannot go with --compile: lanes have to leave the model at every "
                "BatchNorm layer to meet, and compiled code does not let them. Leave one of the two out."
            )
        self.world = world or current()
        if self.world.recovery is not None:
            self.world.recovery.making()
        super().__init__(torch.device(self.world.device), self.world.together)
        check_trained(optimizer, model)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.schedule = schedule
        self.schedule_every = schedule_every
        self.clip_norm = clip_norm
        self.precision, self.precision_reason = precisions.settle(precision, self.device)
        self._keeps_precision = precision == "auto"
        compute_in(optimizer, self.precision)
        self.extras = dict(extras or {})
        self.meta: dict[str, Any] = {}
        self.double_lanes_on_oom = False
        self._saver = self.world.together.saver = self.world.together.saver or Saver(self.world)
        self._committed = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        called: Any = torch.compile(self.model) if compile else self.model
        lanes = GlobalLanes if batchnorm == "global" else Lanes
        self.lanes = lanes(called, self.world, unused_parameters=unused_parameters)
        log.moment("model wrapped")
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
            precision=self.precision,
            compile=compile,
            batchnorm=batchnorm,
            device=device_name(self.device),
            torch=torch.__version__.split("+")[0],
        )
        self._unsaved = Unsaved(self.model)
        self.resumed_from: Path | None = None
        self._take_up()
        check_same_precision(self.precision, self.precision_reason, self.world)
        precisions.tell(self.precision, self.precision_reason, self.world)
        log.moment("state taken up")

    def _take_up(self) -> None:
        """Go on from a snapshot after a restart, or from the newest checkpoint, if there is one."""
        recovery = self.world.recovery
        found = None if recovery is None else recovery.found()
        if found is not None:
            self._take(found, "snapshot")
        elif recovery is not None and recovery.found_checkpoint is not None:
            self._restore(recovery.found_checkpoint, verified=False)
        elif self.world.resume and self.world.run_dir is not None:
            path = newest_whole(self.world.run_dir, self.world)
            if path is not None:
                self._restore(path, verified=True)
        self.number = self.world.together.next_number
        self.world.together.add(self)
        if recovery is not None:
            recovery.register(self)

    def _keep_precision(self, saved: str | None) -> None:
        """Take, with auto, the precision of the run that goes on: this device might choose another one."""
        if self._keeps_precision and saved in precisions.PRECISIONS:
            self.precision, self.precision_reason = saved, "as the run began"
            self.scaler = torch.amp.GradScaler(self.device.type, enabled=saved == "fp16")
            self.numerics = replace(self.numerics, precision=saved)

    def __del__(self) -> None:
        self.is_dropped = True
        recovery = getattr(getattr(self, "world", None), "recovery", None)
        if recovery is not None:
            recovery.dropped(self)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the forward pass runs."""
        return autocast(self.precision, self.device)

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated and shown: the moving average if there is one, else the model."""
        return self.model if self.ema is None else self.ema

    def begin(self) -> None:
        """Start a step, which changes nothing before its commit.

        Raises:
            ConfigError: the optimizer has got a group of parameters since this state was made.
        """
        check_groups(self.optimizer, len(self.base_lrs))
        now(self.world, Activity.FORWARD)
        self.lanes.begin(self.step)
        if self._committed is not None:
            self._committed.record()  # on a GPU, the copies of the state before the step come after it

    def commit(self, batch: Batch, loss: Tensor, count: float) -> tuple[float, float | None]:
        """Turn the reduced gradient into the next state; nobody saves it meanwhile. Local.

        Args:
            batch: this step's batch.
            loss: its mean loss.
            count: what the gradient has to be divided by; 0 if it is a mean already.

        Returns:
            The learning rate of the first group in this step, and the gradient's norm if it is clipped.
        """
        if self.world.recovery is None:
            return self._commit(batch, loss, count)
        now(self.world, Activity.COMMIT)
        with self.world.recovery:
            result = self._commit(batch, loss, count)
            if self._committed is not None:
                self._committed.record()  # on a GPU, the optimizer's kernels may still run
        now(self.world, Activity.USER)
        return result

    def _commit(self, batch: Batch, loss: Tensor, count: float) -> tuple[float, float | None]:
        """Turn the reduced gradient into the next state. Local: nothing is communicated.

        Args:
            batch: this step's batch.
            loss: its mean loss.
            count: what the gradient has to be divided by; 0 if it is a mean already.

        Returns:
            The learning rate of the first group in this step, and the gradient's norm if it is clipped.
        """
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        params = [p for p in self.model.parameters() if p.grad is not None and id(p) in stepped]
        gradients = [p.grad for p in params if p.grad is not None]
        if count and gradients:
            torch._foreach_div_(gradients, count)
        if isinstance(self.schedule, Schedule):
            apply_schedule(self.optimizer, self.base_lrs, self.schedule.factor(self.step, batch.epoch))
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
        self.world.at("in_commit", self.step)
        self.lanes.commit()
        if self._averaged is not None:
            self._averaged.update_parameters(self.model)
        is_due = self.schedule_every == "step" or (batch.last_in_epoch and self.is_first_on(batch))
        self.count_step(batch, loss, lr, grad_norm)
        if (
            is_due
            and isinstance(self.schedule, LRScheduler)
            and not isinstance(self.schedule, ReduceLROnPlateau)
        ):
            self.schedule.step()
        return lr, grad_norm

    def training_state(self, *, cut_off: bool = False) -> dict[str, Any]:
        """Return everything but the model's weights, as plain values and tensors.

        Args:
            cut_off: whether the loop had not done all with the last batch; it gets that once more then.
        """
        return {
            **self.progress_values(cut_off=cut_off),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if isinstance(self.schedule, LRScheduler) else None,
            "scaler": self.scaler.state_dict(),
            "averaged": None if self._averaged is None else self._averaged.state_dict(),
            "buffers": self._unsaved.values(),
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

    def snapshot(self) -> dict[str, Any]:
        """Return all of the state after the last commit. Any thread may call, but not during one."""
        with _side_stream(self.device, self._committed):
            model, training = dict(self.model.state_dict()), self.training_state(cut_off=True)
            before: dict[tuple[int, str], Tensor | None] = {}
            for staging in self.world.staged:
                before |= staging.before_step()
            put_back(before, self.model, model, training["buffers"])
            content: dict[str, Any] = plain_values(
                {
                    "model": model,
                    "training": training,
                    "meta": self.manifest_meta(),
                    "step": self.step,
                },
                "snapshot",
            )
            return content

    def checkpoint_values(self, *, cut_off: bool = False) -> dict[str, Any]:
        """Return what a checkpoint of the run holds: ``step``, ``model``, ``training`` and ``meta``.

        That of all TrainStates which train together, so that they go on from the same place.

        Args:
            cut_off: as for :meth:`save`.
        """
        parts = [
            None
            if state is None
            else {
                "model": state.model.state_dict(),
                "training": state.training_state(cut_off=cut_off),
                "meta": state.manifest_meta(),
            }
            for state in self.world.together.living()
        ]
        return joined(parts, total=self.world.together.total)

    def save(
        self, *, score: float | None = None, keep: int = 3, wait: bool = False, cut_off: bool = False
    ) -> Path | None:
        """Save a checkpoint into the run directory. Between steps; any rank may call, rank 0 writes.

        It holds all TrainStates of the run, whichever of them is asked to save, and is named by the steps
        that they have committed together. With several steps a batch, save after the last of them.

        Training waits only while the state is copied; the files are written in the background, one
        checkpoint at a time. The end of main waits for them, and so does :meth:`finish_saving`.

        Args:
            score: how good this state is (higher is better); the best checkpoint is kept.
            keep: how many of the newest checkpoints are kept.
            wait: return when the checkpoint is on the disk.
            cut_off: the loop has not come to its end with the last batch, so it gets that once more.

        Returns:
            The checkpoint's directory on rank 0, None on the others and without a run directory.

        Raises:
            MachineError: it cannot be written, older checkpoints are untouched. Without ``wait``, a single
                failure is logged and the run goes on; the next save raises if it fails, too.
        """
        if self.world.run_dir is None or not self.world.is_first:
            return None
        with doing(self.world, Phase.SAVING):
            self._saver.save(
                self.world.run_dir,
                **self.checkpoint_values(cut_off=cut_off),
                score=score,
                keep=keep,
                wait=wait,
            )
            self.world.at("in_save", self.step)
        return checkpoint.path_of(self.world.run_dir, self.world.together.total)

    def save_to_stop(self) -> Path | None:
        """Save the checkpoint with which a run stops as it was asked to. Every rank must call, rank 0 writes.

        Returns:
            As :meth:`save`.

        Raises:
            MachineError: it cannot be written.
        """
        if self.world.recovery is not None:
            self.world.recovery.stopping()
        return self.save(wait=True, cut_off=True)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            MachineError: it could not be written.
        """
        self._saver.wait()

    def take_saved(self) -> list[Saved]:
        """Return the checkpoints that have got onto the disk since the last call."""
        return self._saver.take_saved()

    def restore(self, path: str | Path, *, number: int | None = None) -> None:
        """Take the state of a checkpoint. Every rank must call, with the same path and number.

        Args:
            path: the checkpoint's directory, ``RUN_DIR/checkpoints/step-00000390``.
            number: which TrainState of the checkpoint, counted from 0 in the order in which its main made
                them. By default the one with this state's number, or the only one.

        Raises:
            CheckpointError: it is missing, damaged, of another model or optimizer, or has no such TrainState.
        """
        found = part_asked_for(checkpoint.load(Path(path), verified=False), self.number or 0, number)
        self._take(found, str(path))
        self.resumed_from = Path(path)

    def _restore(self, path: Path, *, verified: bool) -> None:
        """Take this state's part of a checkpoint as it is made. It may have none: main came to it later."""
        number = self.world.together.next_number
        found = part_to_go_on(checkpoint.load(path, verified=verified), number)
        if found is None:
            logger.warning(
                "{} has nothing of TrainState number {} of this main, counted from 0: it begins anew",
                *(path, number),
            )
            return
        self._take(found, str(path))
        self.resumed_from = path

    def _take(self, saved: Checkpoint, origin: str) -> None:
        seed = saved.meta.get("seed", self.world.seed)
        if seed != self.world.seed:
            raise ConfigError(
                f"{origin} is of a run with seed {seed}, but the seed is {self.world.seed} now: the rest of "
                f"the epoch would repeat some samples and leave others out. Resume with --seed {seed}, or "
                "begin a new run in another --run-dir."
            )
        self._keep_precision(saved.meta.get("numerics", {}).get("precision"))
        checkpoint.load_into(self.model, saved)
        training = saved.training
        try:
            self.optimizer.load_state_dict(training["optimizer"])
            compute_in(self.optimizer, self.precision)
            if isinstance(self.schedule, LRScheduler) and training["schedule"] is not None:
                self.schedule.load_state_dict(training["schedule"])
            if self.scaler.is_enabled() and training["scaler"]:
                self.scaler.load_state_dict(training["scaler"])
            if self._averaged is not None:
                self._restore_average(training["averaged"])
            for name, extra in self.extras.items():
                extra.load_state_dict(training["extras"][name])
            self._unsaved.take(training.get("buffers", {}), self.device)
            self.take_progress(training)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{origin} does not fit this run: {error}. It was saved with another optimizer, schedule or "
                "extras. Resume with the options of its config.toml, or begin a new run in another --run-dir."
            ) from error
        for line in self.numerics.differences(saved.meta.get("numerics", {})):
            logger.warning("resumed under another numerics key, so bits may differ from here on: {}", line)

    def _restore_average(self, saved: dict[str, Tensor] | None) -> None:
        assert self._averaged is not None
        if saved is not None:
            self._averaged.load_state_dict(saved)
            return
        logger.warning("the checkpoint has no moving average: it begins with the checkpoint's weights")
        self._averaged.module.load_state_dict(self.model.state_dict())


@contextlib.contextmanager
def _side_stream(device: torch.device, committed: torch.cuda.Event | None) -> Iterator[None]:
    """Copy from the GPU inside this block, past what hangs in the stream of the main thread."""
    if committed is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(committed)
    with torch.cuda.stream(stream):
        yield
