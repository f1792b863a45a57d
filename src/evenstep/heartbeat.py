"""Heartbeats: where each process of this machine is, in a small file that all of them map into memory.

A process writes its row after each committed step, and some times within one what it is about to do. That
takes about a microsecond each time: no system call but for the clock, no lock. The file outlives the
processes, so it also says how far the run had come before they died.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "heartbeats"
_ROW = struct.Struct("=qqqqqqqd")
_ACTIVITY = struct.Struct("=qdq")
_ROW_BYTES = 128


class Phase(enum.IntEnum):
    """What a process does between two beats."""

    STARTING = 0
    TRAINING = 1
    EVALUATING = 2
    SAVING = 3
    DONE = 4
    STOPPED = 5
    """All ranks stop after the same step, as asked: the end of this process is no death."""


class Activity(enum.IntEnum):
    """What the main thread of a process is about: finer than the phase, for the report on a hang."""

    USER = 0
    DATA = 1
    FORWARD = 2
    REDUCE = 3
    COMMIT = 4
    EVALUATE = 5
    GATHER = 6
    CHECK = 7
    SAVE = 8


@dataclass(frozen=True)
class Beat:
    """A process's row.

    Attributes:
        rank: its rank.
        pid: its process id; 0 if it has not begun yet.
        restart: the number of its start.
        num_states: how many TrainStates it has made.
        step: steps that it has committed, over all its TrainStates.
        highest: the most that this row's process had committed in any start.
        phase: what it does.
        time: when it wrote this, as ``time.time()``.
        activity: what its main thread is about.
        since: since when, as ``time.monotonic()``, which all processes of a machine share.
        evaluations: how many evaluations it has come to the end of.
    """

    rank: int
    pid: int
    restart: int
    num_states: int
    step: int
    highest: int
    phase: Phase
    time: float
    activity: Activity = Activity.USER
    since: float = 0.0
    evaluations: int = 0


class Heartbeats:
    """The rows of all processes of this machine.

    Args:
        directory: the directory of the launch (sharedmem.py).
        num_rows: how many processes this machine has at most.
    """

    def __init__(self, directory: str | Path, num_rows: int) -> None:
        descriptor = os.open(Path(directory) / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Truncating to the size it has changes nothing, so any process may be the first.
            size = max(num_rows * _ROW_BYTES, os.fstat(descriptor).st_size)
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.num_rows = size // _ROW_BYTES

    def write(self, row: int, beat: Beat) -> None:
        """Write one row."""
        _ROW.pack_into(
            self._map,
            row * _ROW_BYTES,
            *(beat.rank, beat.pid, beat.restart, beat.num_states, beat.step, beat.highest, beat.phase),
            beat.time,
        )
        self.write_activity(row, beat.activity, beat.since, beat.evaluations)

    def write_activity(self, row: int, activity: Activity, since: float, evaluations: int) -> None:
        """Write what a process is about into its row."""
        _ACTIVITY.pack_into(self._map, row * _ROW_BYTES + _ROW.size, activity, since, evaluations)

    def read(self) -> list[Beat]:
        """Return all rows, by local rank."""
        beats = []
        for row in range(self.num_rows):
            rank, pid, restart, num_states, step, highest, phase, at = _ROW.unpack_from(
                self._map, row * _ROW_BYTES
            )
            activity, since, evaluations = _ACTIVITY.unpack_from(self._map, row * _ROW_BYTES + _ROW.size)
            beats.append(
                Beat(
                    *(rank, pid, restart, num_states, step, highest, Phase(phase), at),
                    *(Activity(activity), since, evaluations),
                )
            )
        return beats


class Pulse:
    """One process's own row.

    Args:
        beats: all rows.
        row: the number of its row: the local rank.
        rank: the rank.
        restart: the number of this start.
    """

    def __init__(self, beats: Heartbeats, row: int, rank: int, restart: int) -> None:
        self.beats = beats
        self.row = row
        self.rank = rank
        self.restart = restart
        self.num_states = 0
        self.step = 0
        self.highest = beats.read()[row].highest
        self.phase = Phase.STARTING
        self.saving = False
        self.activity = Activity.USER
        self.evaluations = 0
        self._pid = os.getpid()
        self.beat()
        self.now(Activity.USER)

    def now(self, activity: Activity) -> None:
        """Show what the main thread is about from now on."""
        self.activity = activity
        self.beats.write_activity(self.row, activity, time.monotonic(), self.evaluations)

    def beat(self) -> None:
        """Write the row as it is now."""
        if self.step > self.highest:
            self.highest = self.step
        _ROW.pack_into(
            self.beats._map,
            self.row * _ROW_BYTES,
            self.rank,
            self._pid,
            self.restart,
            self.num_states,
            self.step,
            self.highest,
            Phase.SAVING if self.saving else self.phase,
            time.time(),
        )

    def show_saving(self, saving: bool) -> None:
        """Show that a snapshot is made, on any thread, whatever phase the main thread comes to meanwhile."""
        self.saving = saving
        self.beat()

    def go_back_to(self, step: int) -> None:
        """Take up from a step, for good: what lies beyond it is lost and has been counted."""
        self.step = self.highest = step
        if self.row == 0:  # the rows of processes that have not come back
            for row, beat in enumerate(self.beats.read()):
                if beat.restart != self.restart:
                    gone = Beat(beat.rank, 0, beat.restart, 0, 0, 0, Phase.DONE, beat.time)
                    self.beats.write(row, gone)
        self.beat()


def now(world: Any, activity: Activity) -> None:
    """Show in the heartbeat of this process what its main thread is about from now on.

    Args:
        world: the World; does nothing in one that nobody launched.
        activity: what it is about.
    """
    if world.recovery is not None:
        world.recovery.pulse.now(activity)
