"""The TrainStates of a process that train together, such as the two of a GAN: what they have in common."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class Together:
    """All TrainStates of one world, in the order in which they were made.

    Attributes:
        saver: what writes their checkpoints (saving.Saver), once there is one.
        num_turns: steps that this process has done or found done, over all of them.
        lock: held by who notes which batches loops have; they may be read in another thread than main's.
    """

    def __init__(self) -> None:
        self.saver: Any = None
        self.num_turns = 0
        self.lock = threading.RLock()
        self._states: list[weakref.ref[Any]] = []
        self._steps: list[int] = []
        self._batch: weakref.ref[Any] | None = None
        self._turn = 0

    @property
    def next_number(self) -> int:
        """The number of the TrainState that is made next."""
        return len(self._states)

    def add(self, state: Any) -> None:
        """Add a TrainState that has been made, and has taken up what it found."""
        self._states.append(weakref.ref(state))
        self._steps.append(state.step)

    def count(self, number: int, step: int) -> None:
        """Take note of how many steps a TrainState has committed."""
        self._steps[number] = step

    @property
    def total(self) -> int:
        """Steps that all of them have committed together, also those that are gone."""
        return sum(self._steps)

    def living(self) -> list[Any]:
        """Return the TrainStates by number; None for one that main needs no longer."""
        found = [each() for each in self._states]
        return [None if state is None or state.is_dropped else state for state in found]

    def turn(self, batch: Any) -> int:
        """Return how many steps were done with a batch since it was handed out, by any TrainState."""
        return self._turn if self._batch is not None and self._batch() is batch else 0

    def took_turn(self, batch: Any) -> None:
        """Count a step that was done with a batch."""
        self._turn = self.turn(batch) + 1
        self._batch = weakref.ref(batch)
        self.num_turns += 1
