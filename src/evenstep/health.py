"""Hangs: who waits for whom, and where the one that has not arrived stands.

A process that waits in a collective cannot say so: its main thread is in C++. So a thread outside looks at
the heartbeats (heartbeat.py) of this machine's processes. When one has not moved for some time it asks all of
them for their Python stacks, with a signal whose handler (faulthandler) is written in C and answers whatever
the main thread does. From heartbeats and stacks follow who waits, in what, and for whom.

With a launching process of ours, that is where the thread lives; under torchrun it is the first process of
each machine.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evenstep import failure
from evenstep.errors import WorkerError
from evenstep.failure import Frame
from evenstep.heartbeat import Activity, Beat, Heartbeats, Phase
from evenstep.recovery import Recovery, end_process
from evenstep.stacks import ask, children_of, stack_file, state_of

_JOIN_S = 2.0
_MOST_LINES = 16
_MOST_CALLERS = 3

_DOING = {
    Activity.USER: "in user code",
    Activity.DATA: "reading data",
    Activity.FORWARD: "in the forward pass",
    Activity.REDUCE: "in the backward pass",
    Activity.COMMIT: "in the optimizer's step",
    Activity.EVALUATE: "evaluating",
    Activity.GATHER: "at the end of evaluate",
    Activity.CHECK: "checking the weights",
    Activity.SAVE: "saving",
}
_NAMES = {
    "_wrap": "TrainState",
    "__init__": "TrainState",
    "check_same_model": "TrainState",
    "agree": "the agreement on where to go on",
    "check_drift": "the check of the weights",
}
"""What a user knows a function of ours by, if it is not its name."""

_DIFFERENT = (
    "nobody gets on, because they wait in different places: every rank must call a collective; look for one "
    "inside `if rank == ...`"
)
_NOBODY = (
    "no rank of this machine is missing: look at the other machines, if there are any, and at the network"
)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What to do about hangs.

    Attributes:
        hang_after: seconds without a move of some process until it is reported.
        on_hang: go on waiting, or end the run.
        timeout_s: how long a collective waits, for the text.
    """

    hang_after: float
    on_hang: Literal["wait", "abort"] = "wait"
    timeout_s: float | None = None


@dataclass(frozen=True)
class Place:
    """Where one process stands.

    Attributes:
        beat: its heartbeat.
        frames: its main thread's stack, the innermost frame first; empty if it is not known.
        note: why the stack is not known.
        helpers: the stacks of its DataLoader's workers, by process id.
    """

    beat: Beat
    frames: tuple[Frame, ...] = ()
    note: str = ""
    helpers: tuple[tuple[int, tuple[Frame, ...]], ...] = ()


@dataclass(frozen=True)
class Hang:
    """A hang: its report, and whether there is no doubt that it is one.

    Attributes:
        text: the report.
        missing: the ranks that have not arrived.
        is_sure: whether someone has waited in a collective all the time. For a collective in the user's own
            code that is not known: only that it is there now, and has not moved since.
        is_meant: whether everybody waits for rank 0 in ``on_first``, which may take long.
    """

    text: str
    missing: tuple[int, ...]
    is_sure: bool
    is_meant: bool = False


def describe(places: Sequence[Place], now: float, watch: Watch) -> Hang | None:
    """Return what keeps the processes from going on; None if nobody waits for anybody.

    Args:
        places: where this machine's processes stand.
        now: ``time.monotonic()``.
        watch: from which time on a wait counts.
    """
    waits = {place.beat.rank: waits_in(place) for place in places}
    waiting = [place for place in places if waits[place.beat.rank] is not None]
    missing = [place for place in places if waits[place.beat.rank] is None]
    late = [p for p in waiting if now - p.beat.since >= watch.hang_after]
    if not late:
        # Nobody waits. Users may compute for as long as they like, but the data do not come.
        missing = [
            p for p in missing if p.beat.activity == Activity.DATA and now - p.beat.since >= watch.hang_after
        ]
        if not missing:
            return None
        waiting = []
    longest = max(now - p.beat.since for p in late or missing)
    lines = [f"no progress for {longest:.0f} s:"]
    for place in missing[:4]:
        lines += _missing_lines(place, now)
    if len(missing) > 4:
        lines.append(f"and {len(missing) - 4} more have not arrived")
    groups: dict[str, list[int]] = {}
    for place in waiting:
        groups.setdefault(f"{waits[place.beat.rank]}{_user_line(place)}", []).append(place.beat.rank)
    whom = "" if not missing else " for it" if len(missing) == 1 else " for them"
    for what, ranks in groups.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        lines.append(f"{failure.ranks_in_words(ranks)} {verb}{whom} in {what}")
    if not missing:
        lines.append(_DIFFERENT if len({waits[p.beat.rank] for p in waiting}) > 1 else _NOBODY)
    lines = [*lines[:_MOST_LINES], _what_next(watch, bool(late))]
    is_sure = any(p.beat.activity in (Activity.REDUCE, Activity.GATHER, Activity.CHECK) for p in late)
    is_meant = bool(late) and all(waits[p.beat.rank] == "on_first" for p in late)
    return Hang("\n".join(lines), tuple(p.beat.rank for p in missing), is_sure or not late, is_meant)


def waits_in(place: Place) -> str | None:
    """Return the collective in which a process waits, in words; None if it does not wait in any."""
    beat = place.beat
    if beat.phase == Phase.DONE:
        return None
    below = _below_user(place.frames)
    own = [frame for frame in place.frames if failure.is_own(frame.file)]
    # A user's frame inside ours: the user's model, loss, backward function or data set.
    is_called_back = bool(own) and any(f.is_user for f in place.frames[: place.frames.index(own[0])])
    if not is_called_back:
        if beat.activity == Activity.REDUCE:
            return f"the gradient sum of step {beat.step}"
        if beat.activity == Activity.GATHER:
            return f"evaluate after step {beat.step}"
        if beat.activity == Activity.CHECK:
            return f"the check of the weights after step {beat.step}"
    called = [frame for frame in below if _is_distributed(frame.file)]
    if not called:
        return None
    ours = [frame.function for frame in below if failure.is_own(frame.file)]
    return _NAMES.get(ours[0], ours[0]) if ours else called[-1].function


def _below_user(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames from the innermost up to the first of the user's."""
    below: list[Frame] = []
    for frame in frames:
        if frame.is_user:
            break
        below.append(frame)
    return below


def _is_distributed(file: str) -> bool:
    parts = Path(file).parts
    return "torch" in parts and "distributed" in parts and not file.endswith("c10d_logger.py")


def _user_line(place: Place) -> str:
    for frame in place.frames:
        if frame.is_user:
            return f" at {failure.short(frame.file)}:{frame.line}"
    return ""


def _missing_lines(place: Place, now: float) -> list[str]:
    beat = place.beat
    start = f"rank {beat.rank} has not arrived: "
    if beat.phase == Phase.DONE:
        return [start + "its main has returned"]
    step = f"step {beat.step}, " if beat.num_states else ""
    start += f"{step}{_DOING[beat.activity]} since {now - beat.since:.0f} s"
    if not place.frames:
        return [f"{start}; {place.note}"]
    users = [frame for frame in place.frames if frame.is_user]
    innermost, *callers = users or place.frames[:1]
    lines = [f"{start}, at {failure.line_of(innermost).strip()}"]
    lines += [failure.line_of(frame) for frame in callers[:_MOST_CALLERS]]
    for pid, frames in place.helpers[:2]:
        found = next((frame for frame in frames if frame.is_user), None)
        if found is not None:
            lines.append(f"  its DataLoader worker (pid {pid}) is at {failure.line_of(found).strip()}")
    return lines


def _what_next(watch: Watch, is_wait: bool) -> str:
    if watch.on_hang == "abort":
        return "--on-hang abort ends a run that does not get on"
    limit = (
        f", at most {watch.timeout_s:g} s (--timeout-s)" if watch.timeout_s is not None and is_wait else ""
    )
    return f"the run goes on waiting{limit}; --on-hang abort would end it"


class Watchdog:
    """The thread that looks at the heartbeats; a context manager.

    Args:
        beats: the heartbeats of this machine.
        directory: where the processes write their stacks.
        watch: what to do.
        restart: returns the number of the present start.
        tell: called with each report.
        abort: called with a report instead if the run is to end.
    """

    def __init__(
        self,
        beats: Heartbeats,
        directory: str | Path,
        watch: Watch,
        *,
        restart: Callable[[], int],
        tell: Callable[[Hang], None],
        abort: Callable[[Hang], None],
    ) -> None:
        self._beats = beats
        self._directory = Path(directory)
        self._watch = watch
        self._restart = restart
        self._tell = tell
        self._abort = abort
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenstep-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._watch.hang_after > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        hang_after = self._watch.hang_after
        pause_s = min(1.0, max(0.02, hang_after / 20))
        seen: object = None
        next_look_s, interval_s, told = hang_after, hang_after, 0
        while not self._ended.wait(pause_s):
            beats = self._living()
            # The one that has stood still the longest: while it does, it is one and the same hang.
            moving = [beat for beat in beats if beat.phase != Phase.DONE]
            if not moving:
                continue
            oldest = min(moving, key=lambda beat: beat.since)
            if (oldest.rank, oldest.since) != seen:
                seen = oldest.rank, oldest.since
                next_look_s, interval_s, told = hang_after, hang_after, 0
            now = time.monotonic()
            if now - oldest.since < next_look_s:
                continue
            hang = describe(self._places(beats), now, self._watch)
            if hang is None:  # somebody computes for long, and nobody waits yet: look again soon
                next_look_s = now - oldest.since + max(pause_s, hang_after / 4)
                continue
            if self._ended.is_set():
                return
            told += 1
            if self._watch.on_hang == "abort" and not hang.is_meant and (hang.is_sure or told > 1):
                self._abort(hang)
                return
            self._tell(hang)
            next_look_s = now - oldest.since + interval_s
            interval_s *= 2

    def _living(self) -> list[Beat]:
        restart = self._restart()
        beats = self._beats.read()
        return [beat for beat in beats if beat.pid and beat.restart == restart and state_of(beat.pid) != "Z"]

    def _places(self, beats: Sequence[Beat]) -> list[Place]:
        return [self._place(beat) for beat in beats]

    def _place(self, beat: Beat) -> Place:
        if beat.phase == Phase.DONE:
            return Place(beat)
        path = stack_file(self._directory, beat.rank, beat.restart)
        frames, note = ask(beat.pid, path)
        helpers: Mapping[int, tuple[Frame, ...]] = {}
        if any("/torch/utils/data/" in frame.file for frame in _below_user(frames)):
            helpers = {child: ask(child, path)[0] for child in children_of(beat.pid)[:4]}
        return Place(beat, frames, note, tuple(helpers.items()))


def aborted(hang: Hang) -> WorkerError:
    """Return the error of a run that a hang has ended."""
    report = hang.text.rpartition("\n")[0]
    rank = hang.missing[0] if hang.missing else None
    return WorkerError(f"{report}\nthe run was ended (--on-hang abort)", rank=rank)


def remembered(told: tuple[int, Hang] | None, restart: int) -> str:
    """Return what a report of a failure adds when the ranks of this start were seen to hang before it."""
    if told is None or told[0] != restart:
        return ""
    return "\nbefore that, " + told[1].text.rpartition("\n")[0]


def watched_here(
    recovery: Recovery, watch: Watch, local_rank: int
) -> contextlib.AbstractContextManager[object]:
    """Watch the processes of this machine from its first one, where no process of ours has launched them."""
    if local_rank != 0:
        return contextlib.nullcontext()

    def tell(hang: Hang) -> None:
        sys.stderr.write(hang.text + "\n")
        sys.stderr.flush()

    def abort(hang: Hang) -> None:
        sys.stderr.write(f"{aborted(hang)}\n")
        end_process(1)

    return Watchdog(
        recovery.pulse.beats,
        recovery.directory,
        watch,
        restart=lambda: recovery.restart,
        tell=tell,
        abort=abort,
    )
