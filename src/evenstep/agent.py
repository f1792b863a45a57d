"""One run of torch's elastic agent on this machine, from its private directory to the removal of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import multiprocessing
import multiprocessing.process
import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep import (
    alone,
    devices,
    health,
    log,
    machines,
    mainmodule,
    owners,
    rendezvous,
    sharedmem,
    worker,
    world,
)
from evenstep.channel import Server
from evenstep.course import Course
from evenstep.course import Plan as Plan
from evenstep.errors import EvenstepError, MachineError, StoppedError
from evenstep.heartbeat import Heartbeats
from evenstep.recovery import Cause
from evenstep.relay import Relay
from evenstep.rescue import save_as_checkpoint
from evenstep.verdict import Verdict

MONITOR_INTERVAL_S = 0.02
_MANY = 1_000_000  # on several machines the restarts are counted for all of them together, by us
_LEAVE_S = 15.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_OF_TORCH = signal.SIGURG
"""torch's agent wants to handle at least one. Nobody sends this one."""
_SAME_S = 0.2
"""A second SIGINT within so many seconds is the first one: sent to every process, it comes here twice."""


class _FewerError(Exception):
    """The run goes on with one process less."""


class _NoRestartError(Exception):
    """Thrown through torch's agent when the workers must not be started again."""


class Run:
    """The state of one launch in the launching process.

    Args:
        plan: what to start.
        on_message: called as ``on_message(rank, obj)`` for each message of a worker.
    """

    def __init__(self, plan: Plan, on_message: Any) -> None:
        self._lock = threading.Lock()
        self._hidden = contextlib.ExitStack()
        self._key = secrets.token_bytes(32)
        try:
            with contextlib.ExitStack() as opened:
                self.shared = sharedmem.Owned(plan.setting.run_dir)
                opened.callback(self.shared.close)
                self._private = owners.Directory()
                opened.callback(self._private.close)
                self._open(plan, on_message, opened)
                opened.pop_all()
        except OSError as error:
            raise MachineError(
                f"cannot make the files of a launch in {sharedmem.SHARED_MEMORY} and {owners.temporary()}: "
                f"{error.strerror}. Free some space there, or set TMPDIR to another directory."
            ) from error

    def _open(self, plan: Plan, on_message: Any, opened: contextlib.ExitStack) -> None:
        self.directory = str(self._private.path)
        beats = Heartbeats(self.shared.path, plan.nproc)
        self._course = Course(plan=plan, beats=beats, nproc=plan.nproc)
        self._relay = Relay(self.directory)
        opened.callback(self._relay.close)
        Path(self.directory, "program.pkl").write_bytes(plan.payload)
        self.server = Server(
            self.directory,
            self._key,
            plan.nproc,
            on_message,
            plan.grace_s,
            on_connected=self._on_connected,
            is_saving=self._course.is_saving,
        )
        opened.callback(self.server.close)
        self._verdict = Verdict(self._course, self.server, self.directory, self.shared.path)

    def run(self) -> Any:
        """Start the workers, wait for their end, and return the value or raise what went wrong."""
        try:
            with (
                log.launcher(self._course.plan.setting.run_dir) as logger,
                self._signals_handled(),
                self._watchdog(logger),
            ):
                try:
                    while True:
                        try:
                            return self._run_agent()
                        except _FewerError as fewer:
                            logger.warning("%s", fewer)
                except EvenstepError as error:
                    logger.error("%s", error)
                    if self._course.meeting is not None:
                        self._course.meeting.tell_failure(error)
                    raise
        finally:
            if self._course.meeting is not None:
                self._course.meeting.shutdown()
            self._unhide_main()
            self.server.close()
            self._relay.close()
            self.shared.close()
            self._private.close()

    def _watchdog(self, logger: Any) -> health.Watchdog:
        """Return the thread that reports hangs, and ends the workers if that is wished."""

        def tell(hang: health.Hang) -> None:
            self._course.told = self._course.restart, hang
            logger.warning("%s", hang.text)
            sys.stderr.write(hang.text + "\n")
            sys.stderr.flush()

        def abort(hang: health.Hang) -> None:
            self._course.hang = hang
            self._course.is_killed = True
            self.server.kill()

        return health.Watchdog(
            self._course.beats,
            self.shared.path,
            self._course.plan.setting.watch,
            restart=lambda: self._course.restart,
            tell=tell,
            abort=abort,
        )

    def stop(self) -> None:
        """Have the workers stop after the same step and save; :meth:`run` raises StoppedError then."""
        self._course.stopped = True
        self.server.ask_to_stop(signal.SIGTERM, self._time_to_stop_s, self._course.is_saving)

    @property
    def _time_to_stop_s(self) -> float:
        return self._course.plan.stop_grace_s if self._course.has_states() else self._course.plan.grace_s

    def begin(self, environments: Iterable[dict[str, str]]) -> None:
        """Get ready for a start of the workers; torch's agent is about to make their processes.

        Args:
            environments: the workers' variables; a start with fewer workers goes on counting restarts.
        """
        restart = self._course.restarts_before
        for environment in environments:
            restart = self._course.restarts_before + int(environment["TORCHELASTIC_RESTART_COUNT"])
            if self._course.meeting is not None:
                restart = self._course.meeting.start
                environment["MASTER_ADDR"] = self._course.meeting.address
            environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
        if restart > self._course.restarts_before:
            if self._course.meeting is None and not self._verdict.may_restart():
                raise _NoRestartError
            if self._course.meeting is not None and self._course.meeting.restarts > self._course.max_restarts:
                raise _NoRestartError
            self._verdict.leave_word(restart)
        elif self._course.stopped:
            raise _NoRestartError
        self._course.restart = restart
        self._course.lost = None
        Path(self.directory, f"start-{restart}").mkdir()
        if self._course.meeting is not None and self._course.meeting.agreed is not None:
            worker.write_agreed(self.directory, restart, vars(self._course.meeting.agreed))
        self.server.begin(restart)
        log.moment("the agent starts the workers", launching=True)
        with self._lock:
            self._hidden.enter_context(mainmodule.main_hidden())
            self._hidden.enter_context(sharedmem.semaphores(self.shared.path))

    def _meet(self) -> None:
        """Reach the other machines, if there are to be several."""
        if self._course.plan.machines is None or self._course.meeting is not None:
            return
        setting, asked = self._course.plan.setting, self._course.plan.asked

        def offer(address: str, is_host: bool) -> rendezvous.Offer:
            return rendezvous.Offer(
                address=address,
                agent=os.getpid(),
                nproc=self._course.nproc,
                is_host=is_host,
                lanes=setting.lanes if "lanes" in asked else None,
                threads=setting.threads,
                threads_asked="threads" in asked,
                resume=setting.resume,
                run={"mode": setting.mode, "seed": str(setting.seed), "backend": setting.backend},
            )

        self._course.meeting = rendezvous.meet(
            self._course.plan.machines,
            offer,
            timeout_s=setting.timeout_s,
            calls=rendezvous.Calls(
                before=self._before_meeting, may_admit=self._course.has_states, on_lost=self._machine_lost
            ),
            interrupted=lambda: self._course.signal is not None or self._course.stopped,
        )

    def _before_meeting(self) -> None:
        """Called by the agent's rendezvous before each but the first; the workers have ended."""
        if not self._verdict.may_restart():
            raise _NoRestartError

    def _machine_lost(self, text: str, wait: bool) -> None:
        """Have the workers save and leave: a machine is gone, or one has come."""
        self._course.lost = self._course.lost or Cause(text, time.time())
        logging.getLogger("evenstep.launcher").warning("%s", text)
        self.server.let_go()
        end = time.monotonic() + _LEAVE_S
        while wait and time.monotonic() < end and any(p.ended is None for p in self.server.peers.values()):
            time.sleep(MONITOR_INTERVAL_S)

    def _saved_after(self, lost: rendezvous.HostLostError) -> BaseException:
        """Return what ends this process when the machines cannot go on together."""
        run_dir = self._course.plan.setting.run_dir
        if run_dir is None:
            return MachineError(f"{lost}. Nothing is saved: the run has no run_dir (--run-dir DIR).")
        saved = save_as_checkpoint([self.shared.path, sharedmem.fallback(self.shared.path, run_dir)], run_dir)
        if saved is None and self._course.signal is not None:
            return self._verdict.signalled(self._course.signal, ())
        if saved is None:
            return MachineError(f"{lost}, before there was a step to save. Start the run again.")
        step, path = saved
        return StoppedError(
            f"{lost}. Step {step} is saved in {path}. To go on from there, start the run again with --resume "
            f"--run-dir {run_dir} on the machines that are left."
        )

    def _on_connected(self) -> None:
        self._unhide_main()
        # For the exit codes, which only the parent of a process can know.
        self._course.children = list(multiprocessing.active_children())

    def _unhide_main(self) -> None:
        with self._lock:
            self._hidden.close()

    def _run_agent(self) -> Any:
        try:
            self._meet()
        except rendezvous.HostLostError as lost:
            raise self._saved_after(lost) from None
        job = worker.Job(
            setting=self._course.plan.setting,
            directory=self.directory,
            shared=str(self.shared.path),
            key=self._key,
            environment=self._environment(),
            all_values=self._course.plan.all_values,
            machines=self._course.plan.machines,
            relayed=self._relay.names,
        )
        exits: dict[int, int] = {}
        rendezvous_handler_registry.register(alone.BACKEND, alone.Alone)
        rendezvous_handler_registry.register(rendezvous.BACKEND, rendezvous.create)
        try:
            # The agent sets the first. Without the second, torch keeps one address over all meetings, and a
            # machine that comes later waits for it in vain.
            names = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with world.variables(names):
                elastic_launch(self._config(), worker.entry)(job)
            self.server.wait_until_heard()
            return self._value()
        except rendezvous.HostLostError as lost:
            raise self._saved_after(lost) from None
        except ChildFailedError as error:
            exits = {rank: child.exitcode for rank, child in error.failures.items()}
        except _NoRestartError:
            pass
        if self._verdict.can_go_on_with_fewer(exits):
            self._verdict.leave_word(self._course.restart + 1)
            self._course.restarts_before = self._course.restart + 1
            self._course.nproc -= 1
            self.server.num_workers = self._course.nproc
            raise _FewerError(f"going on with {self._course.nproc} processes: one could not be kept alive")
        failed = self._verdict.error(exits)
        raise failed from failed.__cause__

    def _config(self) -> LaunchConfig:
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._course.nproc,
            run_id=uuid.uuid4().hex,
            role="evenstep",
            rdzv_backend=alone.BACKEND if self._course.meeting is None else rendezvous.BACKEND,
            rdzv_configs={} if self._course.meeting is None else {"meeting": self._course.meeting},
            max_restarts=self._course.max_restarts if self._course.meeting is None else _MANY,
            monitor_interval=MONITOR_INTERVAL_S,
            start_method=self._course.plan.start_method,
            local_addr="127.0.0.1",
            logs_specs=_Starts(self),
            signals_to_handle=_OF_TORCH.name,
            shutdown_timeout=max(1, math.ceil(self._course.plan.grace_s)),
        )

    def _environment(self) -> dict[str, str]:
        setting = self._course.plan.setting
        return {
            **world.environment(),
            **devices.variables(setting.devices, self._course.nproc),
            "OMP_NUM_THREADS": str(setting.threads),
            **({"GLOO_SOCKET_IFNAME": "lo"} if self._course.meeting is None else {}),
            **({} if self._course.meeting is None else machines.gloo_interface(self._course.meeting.address)),
        }

    def _value(self) -> Any:
        values = self.server.values
        if not self._course.plan.all_values:
            return cloudpickle.loads(values[0]) if 0 in values else None
        ranks = range(self._course.nproc) if self._course.meeting is None else sorted(values)
        return [cloudpickle.loads(values[rank]) if rank in values else None for rank in ranks]

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Pass a wish to stop on to the workers in this block; SIGQUIT or a second SIGINT ends them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*_SIGNALS, _OF_TORCH)}
        for number in _SIGNALS:
            # Left alone: what nohup or a shell's & ignores, and two that may have another meaning here.
            is_own = number in (signal.SIGUSR1, signal.SIGQUIT) and (
                before[number] != signal.SIG_DFL or _is_caught(number)
            )
            if before[number] == signal.SIG_IGN or is_own:
                del before[number]
            else:
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # None: it was not set from Python
                    signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        # No lock may be taken here: the main thread may hold it.
        if number == signal.SIGQUIT:  # Ctrl-\: at once, whatever came before
            self._course.signal, self._course.is_killed = signal.SIGQUIT, True
            work: Callable[[], None] = self.server.kill
        elif self._course.signal is None:
            self._course.signal, self._course.signal_at = signal.Signals(number), time.monotonic()
            grace_s = self._time_to_stop_s
            work = functools.partial(self.server.ask_to_stop, number, grace_s, self._course.is_saving)
        elif (
            number == self._course.signal == signal.SIGINT
            and time.monotonic() - self._course.signal_at > _SAME_S
        ):
            self._course.is_killed = True
            work = self.server.kill
        else:  # Slurm and others send SIGTERM after SIGUSR1; it is the same wish
            return
        threading.Thread(target=work, daemon=True).start()


class _Starts(LogsSpecs):
    """Tells a run when the agent starts its workers.

    torch's agent asks for the places of the workers' output before each start, which is the one public hook
    at that point. The workers write to the console, and their records of errors are ours.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return that no output is redirected."""
        self._run.begin(envs.values())
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        """The private directory of the run."""
        return self._run.directory


def _is_caught(number: int) -> bool:
    """Return whether this process has a handler for a signal; Python does not know of faulthandler's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
