"""The world: who this process is, which lanes it owns, and the only place that reads ``os.environ``.

All arithmetic with ranks and lanes is here. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from evenstep import schedulers
from evenstep.errors import ConfigError, MachineError
from evenstep.together import Together


def share(index: int, parts: int, n: int) -> range:
    """Return part ``index`` of ``parts`` of ``range(n)``: ``[index*n//parts, (index+1)*n//parts)``.

    The parts are contiguous, in order, cover every element once and differ in length by at most one.
    The same rule gives a rank its lanes and a lane its samples.
    """
    return range(index * n // parts, (index + 1) * n // parts)


class Channel(Protocol):
    """The line between a worker and the parent that launched it."""

    def send(self, obj: Any) -> None:
        """Send a picklable object to the parent."""

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next object from the parent."""


class NoParent:
    """The channel of a process that nobody launched: it has nobody to talk to."""

    def send(self, obj: Any) -> None:
        """Drop the object: there is no parent."""

    def receive(self, timeout_s: float | None = None) -> Any:
        """Raise, because no object can ever come."""
        raise MachineError(
            "world.receive: this process has no parent to receive from. It was not started by "
            "evenstep.launch on this machine; start it with evenstep.launch(main, nproc=...)."
        )


class Pending(Protocol):
    """Something that a process does in the background."""

    def wait(self) -> None:
        """Wait for its end, and raise what went wrong."""


class Observer(Protocol):
    """Is told of every step of a process; ``evenstep verify`` watches any loop through one."""

    def reading(self, loader: Any) -> None:
        """Before the first batch of a Loader."""

    def before_step(self, state: Any, batch: Any, loss: Any) -> None:
        """Before a step: the TrainState, the Batch and the loss function that ``train_step`` got."""

    def after_step(self, state: Any, batch: Any, result: Any) -> None:
        """After a step's commit, with its StepResult."""


class Unobserved:
    """The observer of a process that nobody watches."""

    def reading(self, loader: Any) -> None:
        """Do nothing."""

    def before_step(self, state: Any, batch: Any, loss: Any) -> None:
        """Do nothing."""

    def after_step(self, state: Any, batch: Any, result: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a process knows of the run it is in. Rank, local_rank, world_size, node_rank: as in torch."""

    rank: int = 0
    """Number of this process, from 0, over all machines."""
    world_size: int = 1
    """Number of processes, over all machines."""
    local_rank: int = 0
    """Number of this process on its machine, from 0."""
    local_world_size: int = 1
    """Number of processes on this machine."""
    node_rank: int = 0
    """Number of this machine, from 0."""
    num_nodes: int = 1
    """Number of machines."""
    lanes: int = 1
    """Number of logical workers, fixed for the life of the run; at least ``world_size``."""
    seed: int = 0
    """Seed of everything random in the run."""
    mode: str = "exact"
    """``exact``: bit-identical for every world size. ``fast``: plain DDP."""
    device: str = "cpu"
    """The device of this process in torch's notation, such as ``cpu`` or ``cuda:1``."""
    backend: str = "gloo"
    """Backend of torch.distributed: ``gloo`` or ``nccl``."""
    threads: int = 1
    """CPU threads of this process; they change the bits of some kernels, so they are part of the run."""
    run_dir: str | None = None
    """Directory of the run, or None if nothing is written."""
    resume: bool = False
    """Whether the run goes on from the newest checkpoint in ``run_dir``."""
    restart: int = 0
    """How often the workers of this launch were restarted before this one was started."""
    started: float | None = None
    """When the run was launched, as ``time.time()`` gives it."""
    channel: Channel = field(default_factory=NoParent, compare=False, repr=False)
    stop: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    """Set by a signal handler: this process wishes to stop. All ranks then stop after the same step."""
    staged: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, compare=False, repr=False)
    """The buffers of all models in training (staging.Staging): each lane has to start from the same ones."""
    together: Together = field(default_factory=Together, compare=False, repr=False)
    """The TrainStates of this process, and what they have in common."""
    meeting_places: list[Any] = field(default_factory=list, compare=False, repr=False)
    """Where lanes meet that normalise over the global batch (globalnorm.Places), once a model has them."""
    pending: set[Pending] = field(default_factory=set, compare=False, repr=False)
    """What must end before this process does, such as the writing of a checkpoint."""
    recovery: Any = field(default=None, compare=False, repr=False)
    """The TrainStates of this process, and what saves them when another process dies (recovery.Recovery)."""
    fault: Callable[[str, int], None] | None = field(default=None, compare=False, repr=False)
    """Called as ``fault(point, step)`` at named points of a step, for tests (testing.kill_at)."""
    observer: Observer = field(default_factory=Unobserved, compare=False, repr=False)
    """Is told of every step."""

    def __post_init__(self) -> None:
        if self.world_size > self.lanes:
            raise ConfigError(
                f"world size {self.world_size} is above lanes {self.lanes}: each process needs a lane of its "
                f"own. Start at most {self.lanes} processes (--nproc {self.lanes}), or begin a new run with "
                f"--lanes {self.world_size}."
            )

    @property
    def own_lanes(self) -> range:
        """The contiguous lanes of this rank."""
        return self.lanes_of(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one that prints, and writes files."""
        return self.rank == 0

    def lanes_of(self, rank: int) -> range:
        """The contiguous lanes of a rank.

        Args:
            rank: any rank of the run.
        """
        return share(rank, self.world_size, self.lanes)

    def at(self, point: str, step: int) -> None:
        """Let a fault strike at a named point of a step; does nothing but in tests.

        Args:
            point: one of ``evenstep.testing.POINTS``.
            step: committed steps.
        """
        if self.fault is not None:
            self.fault(point, step)

    def send(self, obj: Any) -> None:
        """Send a picklable object to the callback ``on_message(rank, obj)`` of the launching process.

        Any rank may call, at any time. Without a launching process (torchrun, Slurm) it does nothing.

        Args:
            obj: anything that pickle knows.
        """
        self.channel.send(obj)

    def finish(self) -> None:
        """Wait for what this process does in the background; a worker calls it at its end.

        Raises:
            MachineError: a checkpoint could not be written.
        """
        for each in list(self.pending):
            each.wait()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next object that the launching process sent with ``handle.send(obj)``; return it.

        Args:
            timeout_s: how long to wait, in seconds; None for as long as it takes.

        Raises:
            TimeoutError: nothing came within ``timeout_s`` seconds.
            MachineError: there is no launching process.
        """
        return self.channel.receive(timeout_s)


# The one value of the package that changes over a process's life: which world it is in. The public
# face (TrainState(model, optimizer), evaluate(...)) would otherwise have to be handed it at each call.
_current: list[World] = []


def current() -> World:
    """Return the world of this process; a world of one process if nothing was launched."""
    return _current[-1] if _current else _alone()


@functools.cache
def _alone() -> World:
    # One and the same, so that two models that train together know of each other.
    return World()


@contextlib.contextmanager
def entered(world: World) -> Iterator[World]:
    """Make ``world`` the current world inside a ``with`` block."""
    _current.append(world)
    try:
        yield world
    finally:
        _current.pop()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place that a launcher other than ours (torchrun) gave this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    restart: int
    launcher: str
    run_id: str = "none"
    meeting: tuple[str, int] | None = None
    """Where the processes meet, if the launcher has not put it into MASTER_ADDR and MASTER_PORT."""

    def variables(self) -> dict[str, str]:
        """The variables that torch reads, for a launcher that sets others."""
        if self.meeting is None:
            return {}
        values = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        host, port = self.meeting
        return {name: str(value) for name, value in values.items()} | {
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise MachineError(
            f"environment variable {name} is missing although RANK is set. A launcher sets RANK, WORLD_SIZE "
            f"and LOCAL_RANK together; unset RANK to start processes with --nproc, or set {name}."
        )
    try:
        return int(text)
    except ValueError:
        raise MachineError(
            f"environment variable {name} is {text!r}, not a whole number. Set it right or unset it."
        ) from None


def placement(environ: Mapping[str, str] | None = None) -> Placement | None:
    """Return the place given by another launcher's variables; None if none started this process.

    Launchers are torchrun, ``srun`` (Slurm), Kubeflow's PyTorchJob, and whatever sets torchrun's variables.

    Args:
        environ: the variables; by default those of this process.

    Raises:
        MachineError: the variables contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env:
        if not schedulers.is_slurm_task(env):
            return None
        return Placement(
            **schedulers.slurm_place(env),
            restart=0,
            launcher="srun",
            run_id=f"slurm-{env.get('SLURM_JOB_ID', 'none')}-{env['SLURM_STEP_ID']}",
            meeting=schedulers.slurm_meeting(env),
        )
    if schedulers.is_pytorchjob(env):
        place = schedulers.pytorchjob_place(env)
        return Placement(**place, restart=0, launcher="the PyTorchJob", run_id="pytorchjob")
    world_size = _number(env, "WORLD_SIZE")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", env.get("WORLD_SIZE"))
    return Placement(
        rank=_number(env, "RANK"),
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=_number(env, "GROUP_RANK", "0"),
        num_nodes=max(1, world_size // max(1, local_world_size)),
        restart=_number(env, "TORCHELASTIC_RESTART_COUNT", "0"),
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment",
        run_id=env.get("TORCHELASTIC_RUN_ID", "none"),
    )


def variable(name: str, default: str | None = None) -> str | None:
    """Return an environment variable. Every read of the environment goes through this module."""
    return os.environ.get(name, default)


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, for libraries that can be told no other way."""
    os.environ.update(values)


def environment() -> dict[str, str]:
    """Return a copy of all environment variables, to hand them to another process."""
    return dict(os.environ)


def replace_environment(values: Mapping[str, str]) -> None:
    """Make the environment variables of this process exactly ``values``."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


# For the variables that are set for a while: by how many, and what they were before the first of them. The
# environment is one for all threads, and launches in the background may overlap in any order.
_held: dict[str, tuple[int, str | None]] = {}
_held_lock = threading.Lock()


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a ``with`` block; the last to leave puts the old ones back."""
    with _held_lock:
        for name in values:
            count, before = _held.get(name, (0, os.environ.get(name)))
            _held[name] = (count + 1, before)
        os.environ.update(values)
    try:
        yield
    finally:
        with _held_lock:
            for name in values:
                count, before = _held.pop(name)
                if count > 1:
                    _held[name] = (count - 1, before)
                elif before is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = before


def process_started() -> float:
    """Return when this process was started, as ``time.time()`` gives it; where that is not known, now."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/uptime", "rb") as file:
            uptime_s = float(file.read().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(lanes: int) -> int:
    """Return the CPU threads per process that a run with ``lanes`` lanes has unless told otherwise.

    It is cores // lanes, not cores // processes: with the default of one lane per process these are
    equal, and with more lanes the number must not change with the number of processes, because the
    number of threads changes the bits of some kernels (the weight gradient of a convolution, for one).
    """
    return max(1, num_cores() // lanes)
