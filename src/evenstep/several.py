"""Several TrainStates in one checkpoint: all that train together are saved, and found again, together.

The weights and the training state of the first one are where a run with a single TrainState has them. The
others' are in the training state, under ``others``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.checkpoint import Checkpoint
from evenstep.errors import CheckpointError


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


def part_asked_for(whole: Checkpoint, own: int, number: int | None) -> Checkpoint:
    """Return what a checkpoint holds of the TrainState that somebody asks for.

    Args:
        whole: the checkpoint.
        own: the number of the TrainState that takes it.
        number: the number that is asked for; None for the own one, or the only one.

    Raises:
        CheckpointError: it has nothing of it.
    """
    wanted = own if number is None else number
    found = part_of(whole, wanted)
    others = whole.training.get("others", ())
    if found is None and number is None and not others:
        return whole
    if found is None:
        held = ", ".join(str(part["number"]) for part in ({"number": 0} | whole.training, *others))
        raise CheckpointError(
            f"{whole.path} has nothing of TrainState number {wanted}: it holds number {held}, counted from 0 "
            "in the order in which main made them; those made earlier in this process count, too. Say which "
            "one is meant: state.restore(path, number=...)."
        )
    return found


def part_to_go_on(whole: Checkpoint, number: int) -> Checkpoint | None:
    """Return what a checkpoint holds of a TrainState that is being made, in a run that goes on.

    Args:
        whole: the checkpoint.
        number: the number of the TrainState.

    Returns:
        None if it has nothing of it: main had not come to it yet.

    Raises:
        CheckpointError: it may be of this one or of another, as an earlier version saved it, when each held
            one TrainState only, whichever was asked to save. It counts no batches.
    """
    found = part_of(whole, number)
    is_old = "batch" not in whole.training.get("position", {"batch": 0})
    if found is None and is_old and not whole.training.keys() & {"number", "others"}:
        raise CheckpointError(
            f"{whole.path} holds one TrainState and does not say which one, as an earlier version saved it, "
            f"but main makes TrainState number {number} now, counted from 0. Begin a new run in another "
            "--run-dir, and let the state that it is of take it: state.restore(path, number=0)."
        )
    return found
