"""Turn the newest snapshot into a checkpoint, when the workers cannot be started again here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstep import checkpoint, snapshot
from evenstep.several import joined

_KEEP_ALL = 1_000_000


def save_as_checkpoint(directories: Sequence[Path], run_dir: str | Path) -> tuple[int, Path] | None:
    """Write the newest snapshot as a checkpoint of the run.

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
    if found is not None and (newest is None or _step_of(newest) < snapshot.total_of(found)):
        parts = [None if state is None else vars(state) for state in snapshot.read(found).states]
        if any(parts):
            values = joined(parts, total=snapshot.total_of(found))
            # The run that goes on removes what is too much.
            newest = checkpoint.save(run_dir, **values, keep=_KEEP_ALL)
    return None if newest is None else (_step_of(newest), newest)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])
