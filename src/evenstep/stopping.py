"""Signals to a worker: stop after the same step as all others, or save and leave because another one died.

A Python signal handler runs in the main thread, between two of its instructions: never while it hangs in a
collective, in C++. So a second thread is told of each signal, too (``signal.set_wakeup_fd``), and does what
cannot wait.

* SIGTERM, SIGINT, SIGUSR1 are a wish to stop. With a TrainState all ranks stop after the same step. A main
  without one has nothing to stop after: it ends at once, as any Python program.
* torch's agent sends SIGTERM, too, to those that are left when a worker has died. They cannot take another
  step together, so the thread saves a snapshot and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

from evenstep.heartbeat import Phase
from evenstep.recovery import Recovery, end_process
from evenstep.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LOOK_EVERY_S = 0.01
_UNWIND_S = 0.5
_STALLED_S = 20.0


class TerminatedError(SystemExit):
    """A signal ends main, which has no TrainState to save. Not an error of main's."""


class Signals:
    """The handlers of this process; a context manager. Does nothing outside the main thread.

    Args:
        world: this process.
        recovery: its TrainStates.
        has_parent: whether a launching process of ours decides what a second signal means.
    """

    def __init__(self, world: World, recovery: Recovery, *, has_parent: bool) -> None:
        self._world = world
        self._recovery = recovery
        self._has_parent = has_parent
        self._raised = False
        self._signalled = False
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._watch, name="evenstep-signals", daemon=True).start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if not self._before:
            return
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._before.items():
            with contextlib.suppress(TypeError):  # it was not set from Python
                signal.signal(number, handler)
        if self._has_parent:
            signal.signal(signal.SIGTERM, self._after_main)
        self._writer.close()  # the thread ends
        if self._signalled and kind in (None, TerminatedError) and self._has_to_leave():
            # A thread may be saving right now, and the end of the main thread would cut it off.
            self._recovery.leave_if_possible()

    def _has_to_leave(self) -> bool:
        return self._recovery.is_leaving or self._recovery.peer_died(done_stay=self._has_parent)

    def _after_main(self, number: int, _: object) -> None:
        """End this process, whose main has ended before the others', and hand its state on if it has one."""
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return

        def end() -> None:
            self._recovery.leave_if_possible()
            end_process(128 + number)

        # On a thread, because the main thread may be saving right now.
        threading.Thread(target=end, daemon=True).start()

    def ask(self, number: int) -> None:
        """Do what a signal would do, from any thread: the launching process has passed it on."""
        if self._recovery.can_stop:
            self._world.stop.set()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _handle(self, number: int, _: object) -> None:
        if os.getpid() != self._pid:  # a process that main has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signalled = True
        second = self._world.stop.is_set() and not self._has_parent
        self._world.stop.set()
        if self._ended.is_set() or self._raised or (self._recovery.can_stop and not second):
            return
        self._raised = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise TerminatedError(128 + number)

    def _watch(self) -> None:
        while data := self._reader.recv(64):
            if signal.SIGTERM in data and os.getpid() == self._pid:
                self._after_sigterm()
        self._reader.close()

    def _after_sigterm(self) -> None:
        """Leave if the signal came because another process died, and this one cannot end by itself."""
        pulse = self._recovery.pulse
        seen, since = (pulse.step, pulse.phase), time.monotonic()
        died_at: float | None = None
        while not self._ended.wait(_LOOK_EVERY_S):
            if self._recovery.is_stopping:
                return  # the signal was that wish, or comes after a rank that has stopped already
            now = pulse.step, pulse.phase
            if now != seen or pulse.saving or pulse.phase == Phase.SAVING:
                seen, since = now, time.monotonic()
            if died_at is None and self._recovery.peer_died(done_stay=self._has_parent):
                died_at = time.monotonic()
            stalled = time.monotonic() - since > _STALLED_S  # one of another machine has died
            if died_at is not None or stalled:
                self._recovery.leave_if_possible()
            if died_at is not None and time.monotonic() - died_at > _UNWIND_S:
                end_process(128 + signal.SIGTERM)


def _forget() -> None:
    """Keep the signals of a forked process, such as a DataLoader's worker, from those of this one."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
