"""Several TrainStates in one checkpoint: all that train together are saved, and found again, together.

The weights and the training state of the first one are where a run with a single TrainState has them. The
others' are in the training state, under ``others``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.checkpoint import Checkpoint


def joined(parts: Sequence[Mapping[str, Any] | None], *, total: int) -> dict[str, Any]:
    """Return what a checkpoint holds of all TrainStates.

    Args:
        parts: for each TrainState, in the order in which they were made, ``model``, ``training`` and
            ``meta``; None for one that is gone. At least one is there.
        total: steps that all of them have committed together.

    Returns:
        ``step``, ``model``, ``training`` and ``meta``.
    """
    (number, first), *others = [(number, part) for number, part in enumerate(parts) if part is not None]
    training = dict(first["training"])
    if len(parts) > 1:
        training |= {
            "number": number,
            "others": [
                {"number": number, "model": part["model"], "training": part["training"]}
                for number, part in others
            ],
        }
    return {"step": total, "model": first["model"], "training": training, "meta": first["meta"]}


def part_of(whole: Checkpoint, number: int) -> Checkpoint | None:
    """Return what a checkpoint holds of one TrainState.

    Args:
        whole: the checkpoint.
        number: the number of the TrainState, in the order in which they are made.

    Returns:
        None if it has nothing of it: it had not been made yet, or was gone.
    """
    if whole.training.get("number", 0) == number:
        return whole
    for part in whole.training.get("others", ()):
        if part["number"] == number:
            return Checkpoint(whole.path, whole.step, whole.meta, part["model"], part["training"])
    return None
