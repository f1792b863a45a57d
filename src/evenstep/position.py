"""Where a run stands in its data, and what came of the last batch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenstep.data.batch import Batch
from evenstep.together import Together

_MOST_AHEAD = 256  # batches that a loop may have before it does a step with the first of them


@dataclass(frozen=True)
class Position:
    """A place in the training data: a batch.

    Attributes:
        step: how many batches come before it, over all epochs.
        epoch: its epoch.
        epoch_step: how many batches of the epoch come before it.
    """

    step: int
    epoch: int
    epoch_step: int

    @classmethod
    def of(cls, batch: Batch) -> Position:
        """Return the place of a batch."""
        return cls(batch.step, batch.epoch, batch.epoch_step)

    @classmethod
    def after(cls, batch: Batch) -> Position:
        """Return the place of the batch that follows."""
        if batch.last_in_epoch:
            return cls(batch.step + 1, batch.epoch + 1, 0)
        return cls(batch.step + 1, batch.epoch, batch.epoch_step + 1)


@dataclass(frozen=True)
class Result:
    """What a step gave, see ``evenstep.step.StepResult``."""

    loss: Tensor
    lr: float
    grad_norm: float | None


@dataclass(frozen=True)
class LastBatch:
    """What came of the last batch.

    Attributes:
        place: the batch.
        results: what each of the steps that were done with it gave.
    """

    place: Position
    results: list[Result]

    def values(self) -> dict[str, Any]:
        """Return it as plain values."""
        results = [(float(done.loss), done.lr, done.grad_norm) for done in self.results]
        return {**asdict(self.place), "results": results}

    @classmethod
    def of(cls, values: Mapping[str, Any], device: torch.device) -> LastBatch:
        """Return what ``values`` were made from."""
        results = [
            Result(torch.tensor(loss, dtype=torch.float64, device=device), lr, grad_norm)
            for loss, lr, grad_norm in values["results"]
        ]
        return cls(_place(values), results)


@dataclass(frozen=True, eq=False)
class _Hand:
    """A batch that a loop has got.

    Attributes:
        place: the batch.
        after: the one that follows.
        turns: the number of steps that had been done when it was handed out.
        batch: the batch itself, as long as the loop keeps it.
        is_used: whether a step has been done with it; a loop may only look at batches.
    """

    place: Position
    after: Position
    turns: int
    batch: weakref.ref[Batch]
    is_used: bool = False


class Progress:
    """Where a run stands: the part of a TrainState that counts.

    Args:
        device: where losses are.
        together: the TrainStates of this process.

    Attributes:
        step: committed optimizer steps.
        number: the number of this TrainState among those of the process; None until it has been made.
        is_dropped: whether main needs it no longer.
    """

    def __init__(self, device: torch.device, together: Together) -> None:
        self.device = device
        self.step = 0
        self.number: int | None = None
        self.is_dropped = False
        self._together = together
        # The next batch by the steps of this state, and the batches that the loop over it has, in order, of
        # which there are several if it reads ahead: both in one, as another thread may save them at any time.
        self._place: tuple[Position, tuple[_Hand, ...]] = (Position(0, 0, 0), ())
        self._has_asked = True
        self._start: Position | None = None
        self._last: LastBatch | None = None
        self._replay: LastBatch | None = None
        self._replayed = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._loss_samples = 0

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._place[0].epoch

    @property
    def epoch_step(self) -> int:
        """Batches since the last finished epoch with which steps were done."""
        return self._place[0].epoch_step

    @property
    def start(self) -> Position:
        """The batch to begin with: the next one, or once more the one that the loop had.

        What a loop does after a step with the same batch (evaluate, save, report, another model's step) may
        be undone when a process dies or the run is stopped. So that batch is handed out again then; steps
        that were done with it are not done twice, see ``replayed``.
        """
        return self._place[0] if self._start is None else self._start

    @property
    def has_batch(self) -> bool:
        """Whether a loop over this state's batches has one, and has not asked for the next yet."""
        return not self._has_asked or self._used() is not None

    def handed_out(self, batch: Batch) -> None:
        """The loop over this state's batches has got one."""
        with self._together.lock:
            self._start = None
            place, hands = self._place
            # What is left in use here is of a loop that was broken off, as is what comes later.
            hands = tuple(hand for hand in hands if hand.place.step < batch.step)
            used = _last_used(hands)
            if used is not None:
                place, hands = _further(place, used.after), _from(hands, used)[1:]
            turns = self._together.num_turns
            hand = _Hand(Position.of(batch), Position.after(batch), turns, weakref.ref(batch))
            self._place = (place, (*hands, hand)[-_MOST_AHEAD:])
            self._has_asked = False

    def asked(self) -> None:
        """The loop over this state's batches asks for the next one.

        So it has done all with those that steps were done with. With others it has not, if it reads ahead.

        A loop over the batches of two states at once asks for both, one after the other: it has done all
        with both then. A loop inside of another one's body has not.
        """
        with self._together.lock:
            self._has_asked = True
            used = self._used()
            if used is None:
                return
            for other in self._together.living():
                if other is not None and other is not self:
                    other.over_with(used.place.step, used.turns)
            self._place = (self._next(), _from(self._place[1], used)[1:])

    def over_with(self, step: int, turns: int) -> None:
        """The loop has done all with a batch, if this state's was handed out together with it and is used."""
        place, hands = self._place
        used = self._used()
        together = used is not None and (used.place.step, used.turns) == (step, turns)
        if together and used is not None and place.step == used.after.step:
            self._place = (place, _from(hands, used)[1:])
            self._has_asked = self._has_asked or not self._place[1]

    def _next(self) -> Position:
        """Return the batch that follows the last one in hand with which somebody has done a step."""
        used = self._used()
        return self._place[0] if used is None else _further(self._place[0], used.after)

    def _used(self) -> _Hand | None:
        """Return the last batch in hand with which a step has been done."""
        return _last_used(self._place[1])

    def has(self, batch: Batch) -> bool:
        """Whether the loop over this state's batches has got this very batch."""
        return any(hand.batch() is batch for hand in self._place[1])

    def was_used(self, batch: Batch, *, is_others: bool) -> None:
        """Somebody has done a step with a batch.

        Args:
            batch: the batch; one that the loop has made from what it got counts as that.
            is_others: whether it is of another state's loop. A step with such a batch is one in the body of
                this state's loop, so it counts for the first batch that this one has.
        """
        place, hands = self._place
        if not hands:
            return
        at = Position.of(batch)
        number = 0
        for i, hand in enumerate(hands):
            if hand.batch() is batch or (not is_others and hand.place == at):
                number = i
        used = replace(hands[number], is_used=True)
        self._place = (place, (*hands[:number], used, *hands[number + 1 :]))

    def _took_turn(self, batch: Batch) -> None:
        """A step was done with a batch, or found done: tell all whose loops may have it."""
        self._together.took_turn(batch)
        living = [state for state in self._together.living() if state is not None and state is not self]
        everybody: list[Progress] = [self, *living]
        owners = [state for state in everybody if state.has(batch)]
        for state in everybody:
            state.was_used(batch, is_others=bool(owners) and state not in owners)

    def replayed(self, batch: Batch) -> Result | None:
        """Return what came of a step with this batch, if it was committed before a restart.

        Returns:
            None if the step is to be done.
        """
        last = self._replay
        if last is None:
            return None
        if batch.step == last.place.step and self._replayed < len(last.results):
            self._replayed += 1
            with self._together.lock:
                self._took_turn(batch)
            return last.results[self._replayed - 1]
        self._replay = None
        return None

    @property
    def train_loss(self) -> float | None:
        """The mean training loss over the samples of the current epoch, or of the one just finished."""
        return float(self._loss_sum) / self._loss_samples if self._loss_samples else None

    def is_first_on(self, batch: Batch) -> bool:
        """Whether this state has done no step with a batch yet."""
        return self._last is None or self._last.place.step != batch.step

    def count_step(self, batch: Batch, loss: Tensor, lr: float, grad_norm: float | None) -> None:
        """Count a committed step.

        Args:
            batch: its batch.
            loss: its mean loss.
            lr: the learning rate of the first group.
            grad_norm: the gradient's norm, if it is clipped.
        """
        last = self._last
        if self.epoch_step == 0 if last is None else last.place.epoch != batch.epoch:
            self._loss_sum, self._loss_samples = torch.zeros_like(loss), 0
        self._loss_sum = self._loss_sum + loss * batch.size
        self._loss_samples += batch.size
        result = Result(loss, lr, grad_norm)
        if last is None or self.is_first_on(batch):
            self._last = LastBatch(Position.of(batch), [result])
        else:
            last.results.append(result)
        self.step += 1
        if self.number is not None:
            self._together.count(self.number, self.step)
        with self._together.lock:
            self._place = (Position.after(batch), self._place[1])
            self._took_turn(batch)

    def progress_values(self, *, cut_off: bool) -> dict[str, Any]:
        """Return where the run stands as plain values.

        Args:
            cut_off: whether the loop had not done all with the last batch; it gets that once more then.
        """
        start = self._start  # before the place: it is forgotten when a batch is handed out
        place, hands = self._place
        again = None
        if not cut_off:
            place = self._next()
        elif not hands:
            again = None if start is None else asdict(start)
        else:
            hand = _last_used(hands) or hands[0]
            ahead = hand.place.step >= place.step
            if hand.after.step >= place.step and (hand.is_used or not ahead):
                again = asdict(hand.place)
        return {
            "last": self._last.values() if cut_off and self._last is not None else None,
            "again": again,
            "position": {
                "step": self.step,
                "batch": place.step,
                "epoch": place.epoch,
                "epoch_step": place.epoch_step,
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
        self.step = position["step"]
        if self.number is not None:
            self._together.count(self.number, self.step)
        at = Position(position.get("batch", self.step), position["epoch"], position["epoch_step"])
        self._place, self._has_asked = (at, ()), True
        self._loss_sum = torch.tensor(position["loss_sum"], dtype=torch.float64, device=self.device)
        self._loss_samples = position["loss_samples"]
        last, again = values.get("last"), values.get("again")
        if last is not None and "results" not in last:  # as it was stored before a batch could have several
            last = {**last, "results": [(last["loss"], last["lr"], last["grad_norm"])] * last["count"]}
            again = last
        self._last = self._replay = None if last is None else LastBatch.of(last, self.device)
        self._replayed = 0
        self._start = None if again is None else _place(again)


def _place(values: Mapping[str, Any]) -> Position:
    return Position(values["step"], values["epoch"], values["epoch_step"])


def _further(place: Position, other: Position) -> Position:
    return other if other.step > place.step else place


def _last_used(hands: tuple[_Hand, ...]) -> _Hand | None:
    return next((hand for hand in reversed(hands) if hand.is_used), None)


def _from(hands: tuple[_Hand, ...], first: _Hand) -> tuple[_Hand, ...]:
    return hands[hands.index(first) :]
