"""Turn the newest snapshot into a checkpoint, when the workers cannot be started again here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstep import checkpoint, snapshot

_KEEP_ALL = 1_000_000


def save_as_checkpoint(directories: Sequence[Path], run_dir: str | Path) -> tuple[int, Path] | None:
    """Write the newest snapshot as a checkpoint of the run.

    A run with several TrainStates has a checkpoint of its first one only, as ``state.save`` of it gives.

    Args:
        directories: where the snapshots of this launch are.
        run_dir: the run's directory.

    Returns:
        The step and the checkpoint that a resumed run goes on from; None if there is neither a snapshot nor a
        checkpoint.

    Raises:
        MachineError: it cannot be written.
    """
    newest, found = checkpoint.latest(run_dir), snapshot.newest(directories)
    states = [] if found is None else [state for state in snapshot.read(found).states if state is not None]
    if states and (newest is None or _step_of(newest) < states[0].step):
        state = states[0]
        newest = checkpoint.save(
            run_dir,
            step=state.step,
            model=state.model,
            training=state.training,
            meta=state.meta,
            keep=_KEEP_ALL,  # the run that goes on removes what is too much
        )
    return None if newest is None else (_step_of(newest), newest)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])
