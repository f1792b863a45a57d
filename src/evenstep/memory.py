"""Out of memory: who holds it, what to change, and how a run goes on with smaller lanes.

The rank whose lane does not fit cannot take part in the sum of the gradients, so the step fails on all ranks
and none goes on alone: the failing rank ends with an error, the launching process ends the others, and the
error is the launch's. Nothing of the step was committed, so the failing rank holds the whole state before it;
with ``--lanes-on-oom`` it saves that, and the launching process starts all ranks again from there with twice
the lanes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock

from evenstep import checkpoint, devices
from evenstep.config import TrainConfig
from evenstep.data.batch import Batch, LaneBatch
from evenstep.devices import GpuUse
from evenstep.errors import EvenstepError, MachineError, MemoryExhaustedError
from evenstep.flat import from_flat
from evenstep.manifest import read_manifest
from evenstep.state import TrainState
from evenstep.world import World

NOTE = ".oom.json"
"""The file of a run directory that says at which step and with how many lanes and threads the run goes on."""

# What torch says in other classes than OutOfMemoryError.
_SIGNS = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_KEEP_ALL = 1 << 30


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a GPU or in the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def exhausted(
    error: BaseException,
    world: World,
    doing: str,
    *,
    query: Callable[[], Sequence[GpuUse]] = devices.query_nvml,
) -> MemoryExhaustedError:
    """Return the error to raise in place of torch's: with who holds the memory and what to change.

    Args:
        error: torch's.
        world: this process.
        doing: what ran out of memory, such as ``in step 7, lane 3 (32 samples)``.
        query: returns the use of each GPU; by default the driver's (NVML).
    """
    lines = str(error).strip().splitlines()
    said = lines[0].split(". ")[:2] if lines else [type(error).__name__]
    return MemoryExhaustedError(
        f"rank {world.rank} ran out of memory on {world.device} {doing}: {'. '.join(said).rstrip('.')}. "
        f"{_holders(world, query)} All ranks end together; nothing of this step was committed. "
        f"{_advice(world)}"
    )


@contextlib.contextmanager
def watched(state: TrainState, batch: Batch, part: LaneBatch) -> Iterator[None]:
    """Run one lane's forward and backward pass inside this block; explain it if memory runs out.

    Args:
        state: the state; saved first if the run is to go on with more lanes.
        batch: the global batch.
        part: the lane's part of it.

    Raises:
        MemoryExhaustedError: on the rank whose lane it is; the launching process ends the others.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_exhausted(error):
            raise
        doing = f"in step {batch.step}, lane {part.lane} ({part.size} of the batch's {batch.size} samples)"
        told = exhausted(error, state.world, doing)
        if state.double_lanes_on_oom and state.world.run_dir is not None:
            save_for_more_lanes(state)
        raise told.with_traceback(error.__traceback__) from error


@contextlib.contextmanager
def explained(world: World) -> Iterator[None]:
    """Run all of a worker's main inside this block; explain it if memory runs out outside of a lane."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_exhausted(error):
            raise
        told = exhausted(error, world, "outside of a lane's forward and backward pass")
        raise told.with_traceback(error.__traceback__) from error


def save_for_more_lanes(state: TrainState) -> None:
    """Save the state before the step in hand, and a note with how many lanes to go on. Any rank may call.

    Every rank has the same state, so it does not matter which one's lane did not fit. If several ranks call,
    one writes. The note is a file of its own: rank 0 may still be writing the same checkpoint, and would
    write over whatever the manifest says of it.
    """
    with contextlib.suppress(MachineError):  # it has been logged; what counts is the save below
        state.finish_saving()
    world, run_dir = state.world, Path(str(state.world.run_dir))
    values = state.checkpoint_values(cut_off=True)  # another state may have done its step with the batch
    note = {"step": values["step"], "lanes": 2 * world.lanes, "threads": world.threads}
    if state.device.type == "cuda":
        torch.cuda.empty_cache()
    with FileLock(run_dir / ".oom.lock"):
        if _note(run_dir) == note:
            return
        checkpoint.save(run_dir, **values, keep=_KEEP_ALL)
        (run_dir / NOTE).write_text(json.dumps(note), encoding="utf8")


def retried(config: TrainConfig) -> TrainConfig | None:
    """Return the options with which a run goes on after memory ran out, or None if it cannot.

    It cannot without ``--lanes-on-oom``, if memory ran out elsewhere than in a lane, or if there would be
    more lanes than samples in a batch. Threads stay as they were: they follow from the lanes by default,
    and one change of the numerics key is enough.
    """
    if not config.process.lanes_on_oom:
        return None
    run_dir = Path(str(config.run.run_dir))
    note = _note(run_dir)
    (run_dir / NOTE).unlink(missing_ok=True)
    newest = checkpoint.latest(run_dir)
    if note is None or newest is None or read_manifest(newest)["step"] != note["step"]:
        return None
    if note["lanes"] > config.optim.batch_size:
        return None
    return from_flat({"lanes": note["lanes"], "threads": note["threads"], "resume": True}, config)


def _note(run_dir: Path) -> dict[str, int] | None:
    try:
        note: dict[str, int] = json.loads((run_dir / NOTE).read_text(encoding="utf8"))
        return note
    except (OSError, ValueError):
        return None


def _advice(world: World) -> str:
    lanes = (
        f"Cut the batch into more lanes than processes (a new run with --lanes {2 * world.lanes}, or "
        "--lanes-on-oom, which goes on from here): fewer samples are in memory at a time, the batch stays"
    )
    if world.device == "cpu":
        return f"{lanes}; or use a smaller --batch-size or fewer processes."
    share = devices.own_share(world.device)
    if share is not None and share < 1:
        raised = f"raise this run's own limit (--gpu-memory-fraction; now {share:g} for this process)"
        return f"{lanes}; or use --precision bf16, or {raised}."
    return f"{lanes}; or use --precision bf16, or --gpus idle for GPUs that nobody uses."


def _holders(world: World, query: Callable[[], Sequence[GpuUse]]) -> str:
    if world.device == "cpu":
        return _machine_memory()
    number = int(world.device.partition(":")[2] or 0)
    try:
        uses = devices.visible_only(query(), number + 1)
        return f"{devices.holders(number, uses[number])}."
    except (EvenstepError, IndexError):
        return "The driver was not asked who holds it (pip install 'evenstep[gpu]' for that)."


def _machine_memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        free, total = kib["MemAvailable"] / 2**20, kib["MemTotal"] / 2**20
        return f"The machine has {free:.1f} of {total:.1f} GiB available."
    except (OSError, KeyError, ValueError):
        return "How much memory the machine has left is not known."
