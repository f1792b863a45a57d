"""What a launch is to do, and what has happened in it so far: values that the parts of the agent share."""

from __future__ import annotations

import multiprocessing.process
import signal
from dataclasses import dataclass, field

from evenstep import health, rendezvous, sharedmem, worker
from evenstep.heartbeat import Heartbeats, Phase
from evenstep.machines import Machines
from evenstep.recovery import Cause

MAX_RESTARTS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run starts and how it deals with failures.

    Attributes:
        setting: what all workers have in common.
        nproc: how many there are.
        payload: main and its arguments, pickled.
        max_restarts: how often the workers are started again after one died.
        grace_s: seconds from a failure to SIGKILL for the workers that have not ended by themselves.
        stop_grace_s: seconds that the workers have to stop and save after a signal to the launching process.
        nproc_min: with how few workers the run may go on if they keep dying; None for no fewer.
        all_values: return every rank's value.
        start_method: of the processes: ``forkserver``, or ``spawn`` where there is none.
        machines: where several machines meet; None for this machine alone.
        asked: what was asked for and not chosen by default: ``lanes`` and ``threads`` may be among it.
    """

    setting: worker.Setting
    nproc: int
    payload: bytes
    max_restarts: int | None
    grace_s: float
    stop_grace_s: float
    nproc_min: int | None
    all_values: bool
    start_method: str
    machines: Machines | None = None
    asked: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class Course:
    """What has happened in a launch so far, as the launching process knows it.

    Attributes:
        plan: what it is to do.
        beats: the workers' heartbeats.
        nproc: how many workers it has now.
        stopped: whether ``handle.stop()`` was called.
        signal: the first signal that asked this process to end, or SIGQUIT; None for none.
        signal_at: when it came, as ``time.monotonic()``.
        is_killed: whether the workers were killed on purpose.
        hang: the hang for which they were.
        told: the newest hang that was reported, with the number of the start.
        restart: the number of this start of the workers.
        restarts_before: the number of the first start with so many workers.
        children: their processes.
        meeting: of several machines; None for one, or if they have not met yet.
        lost: why the workers were told to leave, if another machine was the cause.
    """

    plan: Plan
    beats: Heartbeats
    nproc: int
    stopped: bool = False
    signal: signal.Signals | None = None
    signal_at: float = 0.0
    is_killed: bool = False
    hang: health.Hang | None = None
    told: tuple[int, health.Hang] | None = None
    restart: int = 0
    restarts_before: int = 0
    children: list[multiprocessing.process.BaseProcess] = field(default_factory=list)
    meeting: rendezvous.Meeting | None = None
    lost: Cause | None = None

    @property
    def max_restarts(self) -> int:
        """How often the workers are started again."""
        return MAX_RESTARTS if self.plan.max_restarts is None else self.plan.max_restarts

    def is_saving(self) -> bool:
        """Whether a worker of this start writes its state."""
        beats = [beat for beat in self.beats.read() if beat.restart == self.restart]
        return any(beat.phase == Phase.SAVING and sharedmem.is_alive(beat.pid) for beat in beats)

    def has_states(self) -> bool:
        """Whether a worker of this start has made a TrainState."""
        return any(beat.num_states for beat in self.beats.read() if beat.restart == self.restart)
