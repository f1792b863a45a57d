"""Recovery: what a process needs to hand its state on when another one dies, and to take one up.

A step is a transaction: only the commit changes a TrainState, and the commit is local. So a process that is
between two commits holds a whole state, wherever its main thread hangs, and any thread may save it. One lock
keeps the two apart: the commit holds it, and so does who saves.

After the restart all processes agree on the most advanced state that is left: a snapshot of a survivor, or
the newest checkpoint if nobody has survived, or none.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from loguru import logger

from evenstep import checkpoint, log, sharedmem, snapshot
from evenstep.agreement import gathered
from evenstep.checkpoint import Checkpoint
from evenstep.errors import CheckpointError
from evenstep.heartbeat import Activity, Heartbeats, Phase, Pulse
from evenstep.resuming import newest_whole
from evenstep.world import World

_LOCK_PATIENCE_S = 10.0
_WORD_S = 0.5
_BODY_S = 1.0
_LOOK_EVERY_S = 0.002
_HISTORY = "recoveries.jsonl"


class Recoverable(Protocol):
    """A TrainState."""

    step: int

    @property
    def has_batch(self) -> bool:
        """Whether its loop is in its body."""

    def snapshot(self) -> dict[str, Any]:
        """Return ``model``, ``training``, ``meta`` and ``step`` between two commits; any thread may call."""


@dataclass(frozen=True)
class Cause:
    """Why the workers were started again.

    Attributes:
        text: such as ``rank 1 died (signal 9)``.
        time: when, as ``time.time()``.
    """

    text: str
    time: float


class Recovery:
    """The TrainStates of this process, and the lock that keeps commits and saving apart.

    A context manager around each commit: ``with recovery: ...``.

    Args:
        directory: the launch's directory in shared memory.
        run_dir: the run's directory; takes the snapshots for which shared memory has no room.
        rank: this process's rank.
        local_rank: its number on this machine.
        local_world_size: how many processes this machine has.
        restart: the number of this start of the workers.
    """

    def __init__(
        self,
        directory: Path,
        run_dir: str | None,
        *,
        rank: int,
        local_rank: int,
        local_world_size: int,
        restart: int,
    ) -> None:
        self.directory = directory
        self.directories = [directory]
        if run_dir is not None:
            self.directories.append(sharedmem.fallback(directory, run_dir))
        self.rank = rank
        self.restart = restart
        self.pulse = Pulse(Heartbeats(directory, local_world_size), local_rank, rank, restart)
        self._began = _first_start(directory)
        self.steps_lost = sum(int(entry["lost"]) for entry in _history(directory))
        self._lock = threading.Lock()
        self._is_torn = False
        self._states: list[weakref.ref[Any]] = []
        self._identities: list[int] = []
        self._dropped: dict[int, Any] = {}
        self._snapshot: snapshot.Snapshot | None = None
        self._checkpoint: Path | None = None
        self._leaving = threading.Event()
        self._failed = threading.Event()
        self._stopping = threading.Event()
        self._leave_lock = threading.Lock()
        self.finish: Callable[[], None] = lambda: None
        """Waits for what the process does in the background, such as the writing of a checkpoint."""

    def __enter__(self) -> None:
        self._lock.acquire()
        self._is_torn = True  # until the end of the commit

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._is_torn = False
            self.pulse.step += 1
            self.pulse.beat()
        self._lock.release()

    @contextlib.contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """Show in the heartbeat what goes on inside a ``with`` block."""
        pulse, before = self.pulse, self.pulse.phase
        pulse.phase = phase
        pulse.beat()
        pulse.now(Activity.SAVE if phase == Phase.SAVING else Activity.EVALUATE)
        try:
            yield
        finally:
            pulse.phase = before
            pulse.beat()
            pulse.now(Activity.USER)

    @property
    def has_states(self) -> bool:
        """Whether a TrainState of main's lives in this process."""
        return any(self._held(i) is not None and i not in self._dropped for i in range(len(self._states)))

    def _held(self, number: int) -> Any:
        """Return a TrainState that is still in memory, or None."""
        return self._dropped.get(number) or self._states[number]()

    @property
    def can_stop(self) -> bool:
        """Whether there will be a step to stop after: of a TrainState that is there, or is about to be."""
        return self.has_states or (self.restart > 0 and snapshot.newest(self.directories) is not None)

    @property
    def has_something_to_save(self) -> bool:
        """Whether a TrainState is in memory, be it one that main needs no longer."""
        return any(self._held(number) is not None for number in range(len(self._states)))

    def dropped(self, state: Recoverable) -> None:
        """Keep a TrainState that main needs no longer, in case another process dies before its main returns.

        Called when nothing refers to it any more: most often because main has returned.
        """
        numbers = [number for number, identity in enumerate(self._identities) if identity == id(state)]
        if numbers:  # the last one: memory is used again
            self._dropped[numbers[-1]] = state

    def making(self) -> None:
        """Free the TrainStates that main has dropped: it is about to make the next one."""
        self._dropped.clear()

    def found(self) -> Checkpoint | None:
        """Return what the TrainState that is being made has to take up; None for nothing."""
        number = len(self._states)
        if self._snapshot is not None and number < len(self._snapshot.states):
            return self._snapshot.states[number]
        return None

    @property
    def found_checkpoint(self) -> Path | None:
        """The checkpoint to go on from after a restart that nobody has survived."""
        return self._checkpoint

    def register(self, state: Recoverable) -> None:
        """Add a TrainState that has been made, and has taken up what it found."""
        with self._lock:
            self._states.append(weakref.ref(state))
            self._identities.append(id(state))
            self.pulse.num_states = len(self._states)
            self.pulse.phase = Phase.TRAINING
            if self._snapshot is None:
                self.pulse.step += state.step
        self.pulse.beat()

    def save(self) -> Path | None:
        """Save all TrainStates, from any thread; None if there are none, or a commit was cut off."""
        if not self._lock_to_save():
            return None
        try:
            return self._save_locked()
        finally:
            self.pulse.show_saving(False)
            self._lock.release()

    def _lock_to_save(self) -> bool:
        """Take the lock; return False, without it, if there is nothing to save or a commit does not end."""
        if not self.has_something_to_save:
            return False
        while not self._lock.acquire(timeout=_LOCK_PATIENCE_S):
            if not self.pulse.saving:  # a large state takes its time
                logger.error("no snapshot: a commit has not ended in {} s", _LOCK_PATIENCE_S)
                return False
        return True

    def _save_locked(self) -> Path | None:
        try:
            if self._is_torn:
                logger.error("no snapshot: an error has cut off a commit, so the state is not whole")
                return None
            if self.pulse.step == 0:
                return None  # to begin again is the same
            self.pulse.show_saving(True)  # nobody ends this process meanwhile
            living = [self._held(number) for number in range(len(self._states))]
            states = [None if state is None else state.snapshot() for state in living]
            return snapshot.save(self.directories, states, total=self.pulse.step, rank=self.rank)
        except Exception:
            logger.exception("no snapshot of step {}", self.pulse.step)
            return None

    def leave(self) -> NoReturn:
        """Save and end this process at once, from any thread; the main thread may hang in a collective.

        If another thread has begun to, wait: it ends the process when the state is saved.
        """
        self._leaving.set()
        if threading.current_thread() is not threading.main_thread():
            self._wait_for_body()
        with self._leave_lock:
            log.moment("leaving")
            if self._lock_to_save():
                self._save_locked()  # the lock stays taken: what main committed from here on would be lost
            with contextlib.suppress(Exception):
                self.finish()
            log.moment("saved")
            end_process(sharedmem.LEFT_EXIT)

    def _wait_for_body(self) -> None:
        """Give the main thread a moment to end the loop's body, whose changes to extras are then saved whole.

        It soon asks for the next batch, or waits for the process that has died, in a collective.
        """
        end = time.monotonic() + _BODY_S
        while self._is_in_body() and time.monotonic() < end and not self._failed.wait(_LOOK_EVERY_S):
            pass

    def _is_in_body(self) -> bool:
        states = [
            self._states[number]() for number in range(len(self._states)) if number not in self._dropped
        ]
        has_batch = any(state is not None and state.has_batch for state in states)
        return has_batch and self.pulse.activity == Activity.USER

    def leave_if_possible(self) -> None:
        """Leave if there is something to save; otherwise main may still end by itself.

        A run that stops as it was asked to has its checkpoint, or is writing it: its main does end.
        """
        if self.has_something_to_save and not self.is_stopping:
            self.leave()

    def leave_with_others(self) -> None:
        """Wait a moment for the word that another process has died, on which a thread ends this one.

        For the main thread, whose collective has failed: what it would do on its way out (log, report) takes
        time from the cores on which the processes start again.
        """
        self._failed.set()
        if self.has_something_to_save and self._leaving.wait(_WORD_S):
            self.leave()

    def done(self) -> None:
        """Main has returned: the end of this process is no death."""
        self.pulse.phase = Phase.DONE
        self.pulse.beat()

    def stopping(self) -> None:
        """All ranks have agreed to stop after the step in hand: the end of a process is no death."""
        self._stopping.set()
        self.pulse.phase = Phase.STOPPED
        self.pulse.beat()

    @property
    def is_stopping(self) -> bool:
        """Whether the step in hand is the last one, because a process was asked to stop."""
        return self._stopping.is_set()

    @property
    def is_leaving(self) -> bool:
        """Whether a thread saves the state, and ends this process then."""
        return self._leaving.is_set()

    def peer_died(self, *, done_stay: bool) -> bool:
        """Whether a process of this start and machine has ended without having done its part.

        Args:
            done_stay: whether one whose main has returned stays until all have, so that its end is a death.
        """
        return any(
            beat.pid
            and beat.restart == self.restart
            and (done_stay or beat.phase != Phase.DONE)
            and beat.phase != Phase.STOPPED
            and not sharedmem.is_alive(beat.pid)
            for beat in self.pulse.beats.read()
        )

    def agree(self, world: World) -> None:
        """Find the most advanced state that is left. Collective: every rank must call, before main begins."""
        world.at("in_recovery", 0)
        path = snapshot.newest(self.directories)
        highest = max(beat.highest for beat in self.pulse.beats.read())
        from_disk = None if world.run_dir is None else checkpoint.latest(world.run_dir)
        if from_disk is not None and not world.resume and from_disk.stat().st_mtime < self._began:
            from_disk = None  # of another run, in whose directory this one was begun without --resume
        on_disk = -1 if from_disk is None else checkpoint.step_of(from_disk)
        mine = torch.tensor([-1 if path is None else snapshot.total_of(path), highest, on_disk])
        everybody = gathered(mine, world)
        total, highest, newest = (int(column.max()) for column in everybody.T)
        if newest > total:
            # A machine that came later has not seen it written, so there the time does not count.
            since = 0.0 if world.resume or from_disk is None else self._began
            try:
                from_disk = newest_whole(str(world.run_dir), world, since=since)
            except CheckpointError as error:  # on all ranks, or on none
                if total < 0:
                    raise
                from_disk = None
                text = "going on from the snapshot of step {}, because of the checkpoints: {}"
                logger.bind(file_only=not world.is_first).warning(text, total, error)
            newest = -1 if from_disk is None else checkpoint.step_of(from_disk)
        if from_disk is not None and newest > total:
            self._checkpoint, restored, origin = from_disk, newest, f"the checkpoint {from_disk}"
        elif total >= 0:
            holders = [rank for rank, row in enumerate(everybody.tolist()) if row[0] == total]
            content: Any = path if path is not None and snapshot.total_of(path) == total else None
            if len(holders) < world.world_size or _differ(content, world):
                content = _sent(content, holders[0], world)
            self._snapshot = snapshot.read(content)
            restored, origin = total, f"rank {self._snapshot.rank}'s snapshot"
        else:
            restored, origin = 0, "the beginning"
        lost = max(0, highest - restored)
        self.steps_lost += lost
        self.pulse.go_back_to(restored if self._snapshot is not None else 0)
        if world.is_first:
            self._tell(highest, restored, lost, origin)

    def _tell(self, highest: int, restored: int, lost: int, origin: str) -> None:
        cause = read_cause(self.directory, self.restart)
        where = f"step {restored} of {origin}" if restored else origin
        text = "the workers were started again" if cause is None else f"{cause.text} after step {highest}"
        took = ""
        if cause is not None and math.isfinite(cause.time):
            took = f" after {time.time() - cause.time:.2f} s"
        gone = f"; {lost} steps are done again" if lost else ""
        with open(self.directory / _HISTORY, "a", encoding="utf-8") as file:
            file.write(json.dumps({"restart": self.restart, "step": restored, "lost": lost}) + "\n")
        if restored or highest:
            logger.warning("{}; went on from {}{}{}", text, where, took, gone)


def doing(world: World, phase: Phase) -> contextlib.AbstractContextManager[None]:
    """Show in the heartbeat what goes on inside a ``with`` block."""
    recovery: Recovery | None = world.recovery
    return contextlib.nullcontext() if recovery is None else recovery.doing(phase)


def end_process(code: int) -> NoReturn:
    """End this process without waiting for anything; worker processes of DataLoaders end with it."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def write_cause(directory: Path, restart: int, cause: Cause) -> None:
    """Leave word for the workers of the next start why there is one."""
    (directory / f"cause-{restart}.json").write_text(json.dumps(vars(cause)), encoding="utf-8")


def read_cause(directory: Path, restart: int) -> Cause | None:
    """Return why the workers were started again; None if nobody has left word."""
    try:
        return Cause(**json.loads((directory / f"cause-{restart}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _first_start(directory: Path) -> float:
    """Return when the first process of this launch began, as ``time.time()``."""
    path = directory / "began"
    with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8"):
        pass
    return path.stat().st_mtime


def _history(directory: Path) -> Sequence[dict[str, Any]]:
    try:
        lines = (directory / _HISTORY).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    return [json.loads(line) for line in lines]


def _differ(content: Path, world: World) -> bool:
    """Whether the machines' own snapshots of the same step differ. Collective if there are several."""
    if world.world_size == world.local_world_size:
        return False
    everybody = gathered(torch.tensor([snapshot.read(content).digest()]), world)
    return bool((everybody != everybody[0]).any())


def _sent(content: Path | None, holder: int, world: World) -> bytes:
    """Send a snapshot from the machine that has it to the others. Collective."""
    data = torch.empty(0, dtype=torch.uint8)
    if world.rank == holder:
        assert content is not None
        data = torch.frombuffer(bytearray(content.read_bytes()), dtype=torch.uint8)
    size = torch.tensor([data.numel()], device=world.device)
    dist.broadcast(size, src=holder)
    data = (
        data.to(world.device)
        if world.rank == holder
        else torch.empty(int(size), dtype=torch.uint8, device=world.device)
    )
    dist.broadcast(data, src=holder)
    return data.cpu().numpy().tobytes()
