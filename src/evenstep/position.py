"""Where a run stands in its data, and what came of the last batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep.data.batch import Batch


@dataclass(frozen=True)
class Position:
    """A place in the training data: a step, and where in its epoch it is."""

    step: int
    epoch: int
    epoch_step: int


@dataclass(frozen=True)
class LastBatch:
    """What came of the last batch.

    Attributes:
        step, epoch, epoch_step: the batch.
        count: how many steps were done with it.
        loss, lr, grad_norm: what the last of them gave, see ``evenstep.step.StepResult``.
    """

    step: int
    epoch: int
    epoch_step: int
    count: int
    loss: Tensor
    lr: float
    grad_norm: float | None

    def values(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "loss": float(self.loss)}

    @classmethod
    def of(cls, values: Mapping[str, Any], device: torch.device) -> LastBatch:
        """Return what ``values`` were made from."""
        return cls(**{**values, "loss": torch.tensor(values["loss"], dtype=torch.float64, device=device)})


class Progress:
    """Where a run stands: the part of a TrainState that counts.

    Attributes:
        step: committed optimizer steps.
        epoch: finished epochs.
        epoch_step: committed steps since the last finished epoch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = 0
        self.epoch = 0
        self.epoch_step = 0
        self._last: LastBatch | None = None
        self._replay: LastBatch | None = None
        self._replayed = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._loss_samples = 0

    @property
    def start(self) -> Position:
        """The batch to begin with: the next one, or once more the last one.

        What a loop does after a step with the same batch (evaluate, save, report, another model's step) may
        be undone when a process dies or the run is stopped. So the last batch is handed out again then; its
        step is not done twice, see ``replayed``.
        """
        if self._replay is not None:
            return Position(self._replay.step, self._replay.epoch, self._replay.epoch_step)
        return Position(self.step, self.epoch, self.epoch_step)

    def replayed(self, batch: Batch) -> LastBatch | None:
        """Return what came of the step with this batch, if it was committed before a restart.

        Returns:
            None if the step is to be done.
        """
        last = self._replay
        if last is None:
            return None
        if batch.step == last.step and self._replayed < last.count:
            self._replayed += 1
            return last
        self._replay = None
        return None

    @property
    def train_loss(self) -> float | None:
        """The mean training loss over the samples of the current epoch, or of the one just finished."""
        return float(self._loss_sum) / self._loss_samples if self._loss_samples else None

    def count_step(self, batch: Batch, loss: Tensor, lr: float, grad_norm: float | None) -> None:
        """Count a committed step.

        Args:
            batch: its batch.
            loss: its mean loss.
            lr: the learning rate of the first group.
            grad_norm: the gradient's norm, if it is clipped.
        """
        if self.epoch_step == 0:
            self._loss_sum, self._loss_samples = torch.zeros_like(loss), 0
        self._loss_sum = self._loss_sum + loss * batch.size
        self._loss_samples += batch.size
        self.step += 1
        if batch.last_in_epoch:
            self.epoch, self.epoch_step = self.epoch + 1, 0
        else:
            self.epoch_step += 1
        count = 1 if self._last is None or self._last.step != batch.step else self._last.count + 1
        self._last = LastBatch(batch.step, batch.epoch, batch.epoch_step, count, loss, lr, grad_norm)

    def progress_values(self, *, cut_off: bool) -> dict[str, Any]:
        """Return ``last`` and ``position`` as plain values.

        Args:
            cut_off: whether the loop had not done all with the last batch; it gets that once more then.
        """
        return {
            "last": self._last.values() if cut_off and self._last is not None else None,
            "position": {
                "step": self.step,
                "epoch": self.epoch,
                "epoch_step": self.epoch_step,
                "loss_sum": float(self._loss_sum),
                "loss_samples": self._loss_samples,
            },
        }

    def take_progress(self, values: Mapping[str, Any]) -> None:
        """Take what ``progress_values`` gave.

        Raises:
            KeyError: a value is missing.
        """
        position = values["position"]
        self.step, self.epoch, self.epoch_step = (position[k] for k in ("step", "epoch", "epoch_step"))
        self._loss_sum = torch.tensor(position["loss_sum"], dtype=torch.float64, device=self.device)
        self._loss_samples = position["loss_samples"]
        last = values.get("last")
        self._last = self._replay = None if last is None else LastBatch.of(last, self.device)
