"""What a worker's death or error means for the run: start again, go on with fewer, or end, and how."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from evenstep import errors, failure, health, log
from evenstep.channel import Peer, Server
from evenstep.course import Course
from evenstep.errors import EvenstepError, StoppedError, WorkerError
from evenstep.recovery import Cause, write_cause

_WORD_S = 5.0
_LOOK_EVERY_S = 0.02


class Verdict:
    """Judges the failures of one launch.

    Args:
        course: what has happened.
        server: the lines to the workers.
        directory: the private directory of the run, where they leave their records of errors.
        shared: its directory in shared memory.
    """

    def __init__(self, course: Course, server: Server, directory: str, shared: Path) -> None:
        self._course = course
        self._server = server
        self._directory = directory
        self._shared = shared
        self._retried: tuple[str, str, int] | None = None
        self._note = ""
        self._oom_kills = failure.oom_kills()

    def _records(self) -> list[failure.Record]:
        return failure.read_records(Path(self._directory, f"start-{self._course.restart}"))

    def _exits(self, peers: dict[int, Peer]) -> dict[int, int]:
        """Return the exit codes of the workers that have ended without finishing, by rank."""
        codes = {child.pid: child.exitcode for child in self._course.children}
        found = ((rank, codes.get(peer.pid), peer.done) for rank, peer in peers.items() if not peer.killed)
        return {rank: code for rank, code, done in found if code is not None and not (done and code == 0)}

    def may_restart(self) -> bool:
        """Whether a new start can help: after a death or a lost peer.

        It cannot after an error that evenstep raises, and is not wanted after a stop that was asked for. Any
        other error may have been bad luck (a file system that was away): after it the workers start again,
        but once, and only if they had got on before it. A main that has made no TrainState would begin again
        from nothing: that is done only if a number of restarts was asked for.
        """
        first = self._first({})
        asked = self._course.stopped or self._course.signal is not None
        if self._course.is_killed or self._server.is_ending:
            return False
        if not self._course.has_states() and (asked or self._course.plan.max_restarts is None):
            return False
        if first is None or first.record is None:
            return True
        if first.record.secondary:
            return first.record.kind != StoppedError.__name__
        if _own_class(first.record.kind) is not None:
            return False
        step = max(
            (beat.step for beat in self._course.beats.read() if beat.restart == self._course.restart),
            default=0,
        )
        error = first.record.kind, first.record.message, step
        if self._retried is not None:
            if error == self._retried:
                self._note = (
                    f"\nthe same error at step {step} again, after a new start of all processes: it is in "
                    "the code or the data, not bad luck"
                )
            return False
        self._retried = error
        return step > 0 and self._course.has_states()

    def _first(self, exits: dict[int, int]) -> failure.First | None:
        peers = self._server.peers
        return failure.first_failure(self._records(), {**exits, **self._exits(peers)}, _deaths(peers))

    def leave_word(self, restart: int) -> None:
        """Tell the workers of the next start why there is one."""
        first = self._first({})
        if self._course.meeting is not None and self._course.meeting.change:
            times = [self._course.lost.time] if self._course.lost is not None else []
            times += [first.time] if first is not None else []
            cause = Cause(self._course.meeting.change, min(times, default=time.time()))
            write_cause(self._shared, restart, cause)
            return
        if first is None:
            return
        peer = self._server.peers.get(first.rank)
        died_at = first.time if peer is None or peer.ended is None else peer.ended
        write_cause(self._shared, restart, Cause(failure.headline(first), died_at))

    def can_go_on_with_fewer(self, exits: dict[int, int]) -> bool:
        """Whether the run goes on with one worker less, now that it cannot keep all alive."""
        first = self._first(exits)
        least = self._course.plan.nproc_min
        return (
            least is not None
            and self._course.nproc > least
            and not (self._course.stopped or self._course.is_killed)
            and first is not None
            and (
                first.record is None
                or (first.record.secondary and first.record.kind != StoppedError.__name__)
            )
        )

    def error(self, exits: dict[int, int]) -> BaseException:
        """Return what the launch raises, now that it cannot go on."""
        records, peers = self._records(), self._server.peers
        saved = [record for record in records if record.kind == StoppedError.__name__]
        if self._course.signal is not None:
            return self.signalled(self._course.signal, saved)
        if self._course.stopped:
            return StoppedError(saved[0].message if saved else "the run was stopped with handle.stop().")
        if self._course.hang is not None:
            return health.aborted(self._course.hang)
        exits = {**exits, **self._exits(peers)}
        deaths = _deaths(peers)
        first = failure.first_failure(records, exits, deaths)
        elsewhere = self._failure_elsewhere(first)
        if elsewhere is not None:
            return elsewhere
        path = None
        if first is not None and self._course.plan.setting.run_dir is not None:
            path = log.path_of(self._course.plan.setting.run_dir, first.rank)
        text = failure.report(
            records,
            exits,
            deaths,
            world_size=self._course.nproc,
            log_path=path,
            out_of_memory=failure.oom_kills() > self._oom_kills,
        )
        text += self._note
        if first is not None and first.record is not None and first.record.secondary:
            text += health.remembered(self._course.told, self._course.restart)
        error = WorkerError(
            text, exit_code=first.exit_code if first else 1, rank=first.rank if first else None
        )
        if first is None or first.record is None:
            return error
        kind = _own_class(first.record.kind)
        if kind is not None:
            own: EvenstepError = kind(first.record.message)
            own.__cause__ = error  # the report: where in the code it was raised
            own._render_traceback_ = error._render_traceback_  # type: ignore[attr-defined]
            return own
        return error

    def _failure_elsewhere(self, first: failure.First | None) -> WorkerError | None:
        """Return what happened on another machine, if what failed here is only its consequence."""
        if self._course.meeting is None or self._course.stopped:
            return None
        if first is not None and first.record is not None and first.record.kind == StoppedError.__name__:
            return None  # asked for on another machine, and done here, too
        peers = self._server.peers
        was_ended = first is None or (first.rank in peers and peers[first.rank].killed)
        if not was_ended and (first is None or first.record is None or not first.record.secondary):
            return None
        end = time.monotonic() + self._course.plan.grace_s + _WORD_S
        while time.monotonic() < end:
            told = self._course.meeting.failure_elsewhere()
            if told is not None:
                return told
            if self._course.meeting.lost_machine is not None:
                return WorkerError(
                    f"{self._course.meeting.lost_machine}, and main has made no TrainState to go on from. "
                    "Start the run again when the machine is back, or without it (--nnodes)."
                )
            time.sleep(_LOOK_EVERY_S)
        return None

    def signalled(self, number: signal.Signals, saved: Sequence[failure.Record]) -> BaseException:
        """Return what ends this process after a signal to it; the workers have ended by now."""
        if saved and not self._course.is_killed:
            stopped = StoppedError(saved[0].message)
            if number == signal.SIGINT:
                stopped.exit_code = 130
            return stopped
        return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _own_class(kind: str) -> type[EvenstepError] | None:
    """Return evenstep's class of errors with this name, if there is one."""
    found = getattr(errors, kind, None)
    is_own = isinstance(found, type) and issubclass(found, EvenstepError) and found is not WorkerError
    return found if is_own else None


def _deaths(peers: dict[int, Peer]) -> dict[int, float]:
    return {rank: peer.ended for rank, peer in peers.items() if peer.ended is not None}
