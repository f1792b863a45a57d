"""One run of torch's elastic agent on this machine, from its private directory to the removal of it."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep import (
    devices,
    errors,
    failure,
    health,
    log,
    machines,
    owners,
    rendezvous,
    sharedmem,
    worker,
    world,
)
from evenstep.channel import Peer, Server
from evenstep.errors import EvenstepError, MachineError, StoppedError, WorkerError
from evenstep.heartbeat import Heartbeats, Phase
from evenstep.machines import Machines
from evenstep.recovery import Cause, write_cause
from evenstep.relay import Relay
from evenstep.rescue import save_as_checkpoint

MONITOR_INTERVAL_S = 0.02
_MANY = 1_000_000  # on several machines the restarts are counted for all of them together, by us
_LEAVE_S = 15.0
_WORD_S = 5.0
_BACKEND = "evenstep-one-machine"
_SPEC_LOCK = threading.Lock()
MAX_RESTARTS = 3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_OF_TORCH = signal.SIGURG
"""torch's agent wants to handle at least one. Nobody sends this one."""
_SAME_S = 0.2
"""A second SIGINT within so many seconds is the first one: sent to every process, it comes here twice."""


class _FewerError(Exception):
    """The run goes on with one process less."""


class _NoRestartError(Exception):
    """Thrown through torch's agent when the workers must not be started again."""


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


class Run:
    """The state of one launch in the launching process.

    Args:
        plan: what to start.
        on_message: called as ``on_message(rank, obj)`` for each message of a worker.
    """

    def __init__(self, plan: Plan, on_message: Any) -> None:
        self._plan = plan
        self._stopped = False
        self._signal: signal.Signals | None = None
        self._signal_at = 0.0
        self._is_killed = False
        self._hang: health.Hang | None = None
        self._told: tuple[int, health.Hang] | None = None
        self._nproc = plan.nproc
        self._restart = 0
        self._restarts_before = 0
        self._retried: tuple[str, str, int] | None = None
        self._note = ""
        self._oom_kills = failure.oom_kills()
        self._lock = threading.Lock()
        self._children: list[multiprocessing.process.BaseProcess] = []
        self._hidden = contextlib.ExitStack()
        self._key = secrets.token_bytes(32)
        self.shared = sharedmem.Owned(plan.setting.run_dir)
        self._private = owners.Directory()
        self.directory = str(self._private.path)
        self._beats = Heartbeats(self.shared.path, plan.nproc)
        self._meeting: rendezvous.Meeting | None = None
        self._lost: Cause | None = None
        try:
            self._relay = Relay(self.directory)
            Path(self.directory, "program.pkl").write_bytes(plan.payload)
            self.server = Server(
                self.directory,
                self._key,
                plan.nproc,
                on_message,
                plan.grace_s,
                on_connected=self._on_connected,
                is_saving=self._is_saving,
            )
        except BaseException:
            self.shared.close()
            self._private.close()
            raise

    def run(self) -> Any:
        """Start the workers, wait for their end, and return the value or raise what went wrong."""
        try:
            with (
                log.launcher(self._plan.setting.run_dir) as logger,
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
                    if self._meeting is not None:
                        self._meeting.tell_failure(error)
                    raise
        finally:
            if self._meeting is not None:
                self._meeting.shutdown()
            self._unhide_main()
            self.server.close()
            self._relay.close()
            self.shared.close()
            self._private.close()

    def _watchdog(self, logger: Any) -> health.Watchdog:
        """Return the thread that reports hangs, and ends the workers if that is wished."""

        def tell(hang: health.Hang) -> None:
            self._told = self._restart, hang
            logger.warning("%s", hang.text)
            sys.stderr.write(hang.text + "\n")
            sys.stderr.flush()

        def abort(hang: health.Hang) -> None:
            self._hang = hang
            self._is_killed = True
            self.server.kill()

        return health.Watchdog(
            self._beats,
            self.shared.path,
            self._plan.setting.watch,
            restart=lambda: self._restart,
            tell=tell,
            abort=abort,
        )

    def stop(self) -> None:
        """Have the workers stop after the same step and save; :meth:`run` raises StoppedError then."""
        self._stopped = True
        self.server.ask_to_stop(signal.SIGTERM, self._time_to_stop_s, self._is_saving)

    @property
    def _time_to_stop_s(self) -> float:
        return self._plan.stop_grace_s if self._has_states() else self._plan.grace_s

    def begin(self, environments: Iterable[dict[str, str]]) -> None:
        """Get ready for a start of the workers; torch's agent is about to make their processes.

        Args:
            environments: the workers' variables; a start with fewer workers goes on counting restarts.
        """
        restart = self._restarts_before
        for environment in environments:
            restart = self._restarts_before + int(environment["TORCHELASTIC_RESTART_COUNT"])
            if self._meeting is not None:
                restart = self._meeting.start
                environment["MASTER_ADDR"] = self._meeting.address
            environment["TORCHELASTIC_RESTART_COUNT"] = str(restart)
        if restart > self._restarts_before:
            if self._meeting is None and not self._may_restart():
                raise _NoRestartError
            if self._meeting is not None and self._meeting.restarts > self._max_restarts:
                raise _NoRestartError
            self._leave_word(restart)
        elif self._stopped:
            raise _NoRestartError
        self._restart = restart
        self._lost = None
        Path(self.directory, f"start-{restart}").mkdir()
        if self._meeting is not None and self._meeting.agreed is not None:
            worker.write_agreed(self.directory, restart, vars(self._meeting.agreed))
        self.server.begin(restart)
        log.moment("the agent starts the workers", launching=True)
        with self._lock:
            self._hidden.enter_context(main_hidden())
            self._hidden.enter_context(sharedmem.semaphores(self.shared.path))

    def _meet(self) -> None:
        """Reach the other machines, if there are to be several."""
        if self._plan.machines is None or self._meeting is not None:
            return
        setting, asked = self._plan.setting, self._plan.asked

        def offer(address: str, is_host: bool) -> rendezvous.Offer:
            return rendezvous.Offer(
                address=address,
                agent=os.getpid(),
                nproc=self._nproc,
                is_host=is_host,
                lanes=setting.lanes if "lanes" in asked else None,
                threads=setting.threads,
                threads_asked="threads" in asked,
                resume=setting.resume,
                run={"mode": setting.mode, "seed": str(setting.seed), "backend": setting.backend},
            )

        self._meeting = rendezvous.meet(
            self._plan.machines,
            offer,
            timeout_s=setting.timeout_s,
            calls=rendezvous.Calls(
                before=self._before_meeting, may_admit=self._has_states, on_lost=self._machine_lost
            ),
            interrupted=lambda: self._signal is not None or self._stopped,
        )

    def _before_meeting(self) -> None:
        """Called by the agent's rendezvous before each but the first; the workers have ended."""
        if not self._may_restart():
            raise _NoRestartError

    def _machine_lost(self, text: str, wait: bool) -> None:
        """Have the workers save and leave: a machine is gone, or one has come."""
        self._lost = self._lost or Cause(text, time.time())
        logging.getLogger("evenstep.launcher").warning("%s", text)
        self.server.let_go()
        end = time.monotonic() + _LEAVE_S
        while wait and time.monotonic() < end and any(p.ended is None for p in self.server.peers.values()):
            time.sleep(MONITOR_INTERVAL_S)

    def _saved_after(self, lost: rendezvous.HostLostError) -> BaseException:
        """Return what ends this process when the machines cannot go on together."""
        run_dir = self._plan.setting.run_dir
        if run_dir is None:
            return MachineError(f"{lost}. Nothing is saved: the run has no run_dir (--run-dir DIR).")
        saved = save_as_checkpoint([self.shared.path, sharedmem.fallback(self.shared.path, run_dir)], run_dir)
        if saved is None and self._signal is not None:
            return self._signalled(self._signal, ())
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
        self._children = list(multiprocessing.active_children())

    def _unhide_main(self) -> None:
        with self._lock:
            self._hidden.close()

    def _run_agent(self) -> Any:
        try:
            self._meet()
        except rendezvous.HostLostError as lost:
            raise self._saved_after(lost) from None
        job = worker.Job(
            setting=self._plan.setting,
            directory=self.directory,
            shared=str(self.shared.path),
            key=self._key,
            environment=self._environment(),
            all_values=self._plan.all_values,
            machines=self._plan.machines,
            relayed=self._relay.names,
        )
        exits: dict[int, int] = {}
        rendezvous_handler_registry.register(_BACKEND, _OneMachine)
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
        if self._can_go_on_with_fewer(exits):
            self._leave_word(self._restart + 1)
            self._restarts_before = self._restart + 1
            self._nproc -= 1
            self.server.num_workers = self._nproc
            raise _FewerError(f"going on with {self._nproc} processes: one could not be kept alive")
        failed = self._error(exits)
        raise failed from failed.__cause__

    @property
    def _max_restarts(self) -> int:
        return MAX_RESTARTS if self._plan.max_restarts is None else self._plan.max_restarts

    def _config(self) -> LaunchConfig:
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._nproc,
            run_id=uuid.uuid4().hex,
            role="evenstep",
            rdzv_backend=_BACKEND if self._meeting is None else rendezvous.BACKEND,
            rdzv_configs={} if self._meeting is None else {"meeting": self._meeting},
            max_restarts=self._max_restarts if self._meeting is None else _MANY,
            monitor_interval=MONITOR_INTERVAL_S,
            start_method=self._plan.start_method,
            local_addr="127.0.0.1",
            logs_specs=_Starts(self),
            signals_to_handle=_OF_TORCH.name,
            shutdown_timeout=max(1, math.ceil(self._plan.grace_s)),
        )

    def _environment(self) -> dict[str, str]:
        setting = self._plan.setting
        return {
            **world.environment(),
            **devices.variables(setting.devices, self._nproc),
            "OMP_NUM_THREADS": str(setting.threads),
            **({"GLOO_SOCKET_IFNAME": "lo"} if self._meeting is None else {}),
            **({} if self._meeting is None else machines.gloo_interface(self._meeting.address)),
        }

    def _value(self) -> Any:
        values = self.server.values
        if not self._plan.all_values:
            return cloudpickle.loads(values[0]) if 0 in values else None
        ranks = range(self._nproc) if self._meeting is None else sorted(values)
        return [cloudpickle.loads(values[rank]) if rank in values else None for rank in ranks]

    def _records(self) -> list[failure.Record]:
        return failure.read_records(Path(self.directory, f"start-{self._restart}"))

    def _exits(self, peers: dict[int, Peer]) -> dict[int, int]:
        """Return the exit codes of the workers that have ended without finishing, by rank."""
        codes = {child.pid: child.exitcode for child in self._children}
        found = ((rank, codes.get(peer.pid), peer.done) for rank, peer in peers.items() if not peer.killed)
        return {rank: code for rank, code, done in found if code is not None and not (done and code == 0)}

    def _may_restart(self) -> bool:
        """Whether a new start can help: after a death or a lost peer.

        It cannot after an error that evenstep raises, and is not wanted after a stop that was asked for. Any
        other error may have been bad luck (a file system that was away): after it the workers start again,
        but once, and only if they had got on before it. A main that has made no TrainState would begin again
        from nothing: that is done only if a number of restarts was asked for.
        """
        first = self._first({})
        asked = self._stopped or self._signal is not None
        if self._is_killed or self.server.is_ending:
            return False
        if not self._has_states() and (asked or self._plan.max_restarts is None):
            return False
        if first is None or first.record is None:
            return True
        if first.record.secondary:
            return first.record.kind != StoppedError.__name__
        if _own_class(first.record.kind) is not None:
            return False
        step = max((beat.step for beat in self._beats.read() if beat.restart == self._restart), default=0)
        error = first.record.kind, first.record.message, step
        if self._retried is not None:
            if error == self._retried:
                self._note = (
                    f"\nthe same error at step {step} again, after a new start of all processes: it is in "
                    "the code or the data, not bad luck"
                )
            return False
        self._retried = error
        return step > 0 and self._has_states()

    def _first(self, exits: dict[int, int]) -> failure.First | None:
        peers = self.server.peers
        return failure.first_failure(self._records(), {**exits, **self._exits(peers)}, _deaths(peers))

    def _is_saving(self) -> bool:
        beats = [beat for beat in self._beats.read() if beat.restart == self._restart]
        return any(beat.phase == Phase.SAVING and sharedmem.is_alive(beat.pid) for beat in beats)

    def _has_states(self) -> bool:
        return any(beat.num_states for beat in self._beats.read() if beat.restart == self._restart)

    def _leave_word(self, restart: int) -> None:
        """Tell the workers of the next start why there is one."""
        first = self._first({})
        if self._meeting is not None and self._meeting.change:
            times = [self._lost.time] if self._lost is not None else []
            times += [first.time] if first is not None else []
            cause = Cause(self._meeting.change, min(times, default=time.time()))
            write_cause(self.shared.path, restart, cause)
            return
        if first is None:
            return
        peer = self.server.peers.get(first.rank)
        died_at = first.time if peer is None or peer.ended is None else peer.ended
        write_cause(self.shared.path, restart, Cause(failure.headline(first), died_at))

    def _can_go_on_with_fewer(self, exits: dict[int, int]) -> bool:
        first = self._first(exits)
        least = self._plan.nproc_min
        return (
            least is not None
            and self._nproc > least
            and not (self._stopped or self._is_killed)
            and first is not None
            and (
                first.record is None
                or (first.record.secondary and first.record.kind != StoppedError.__name__)
            )
        )

    def _error(self, exits: dict[int, int]) -> BaseException:
        records, peers = self._records(), self.server.peers
        saved = [record for record in records if record.kind == StoppedError.__name__]
        if self._signal is not None:
            return self._signalled(self._signal, saved)
        if self._stopped:
            return StoppedError(saved[0].message if saved else "the run was stopped with handle.stop().")
        if self._hang is not None:
            return health.aborted(self._hang)
        exits = {**exits, **self._exits(peers)}
        deaths = _deaths(peers)
        first = failure.first_failure(records, exits, deaths)
        elsewhere = self._failure_elsewhere(first)
        if elsewhere is not None:
            return elsewhere
        path = None
        if first is not None and self._plan.setting.run_dir is not None:
            path = log.path_of(self._plan.setting.run_dir, first.rank)
        text = failure.report(
            records,
            exits,
            deaths,
            world_size=self._nproc,
            log_path=path,
            out_of_memory=failure.oom_kills() > self._oom_kills,
        )
        text += self._note
        if first is not None and first.record is not None and first.record.secondary:
            text += health.remembered(self._told, self._restart)
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
        if self._meeting is None or self._stopped:
            return None
        if first is not None and first.record is not None and first.record.kind == StoppedError.__name__:
            return None  # asked for on another machine, and done here, too
        peers = self.server.peers
        was_ended = first is None or (first.rank in peers and peers[first.rank].killed)
        if not was_ended and (first is None or first.record is None or not first.record.secondary):
            return None
        end = time.monotonic() + self._plan.grace_s + _WORD_S
        while time.monotonic() < end:
            told = self._meeting.failure_elsewhere()
            if told is not None:
                return told
            if self._meeting.lost_machine is not None:
                return WorkerError(
                    f"{self._meeting.lost_machine}, and main has made no TrainState to go on from. Start the "
                    "run again when the machine is back, or without it (--nnodes)."
                )
            time.sleep(MONITOR_INTERVAL_S)
        return None

    def _signalled(self, number: signal.Signals, saved: Sequence[failure.Record]) -> BaseException:
        """Return what ends this process after a signal to it; the workers have ended by now."""
        if saved and not self._is_killed:
            stopped = StoppedError(saved[0].message)
            if number == signal.SIGINT:
                stopped.exit_code = 130
            return stopped
        return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Pass a wish to stop on to the workers in this block; SIGQUIT or a second SIGINT ends them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*_SIGNALS, _OF_TORCH)}
        for number in _SIGNALS:
            # Left alone: what nohup or a shell's & ignores, and two that may have another meaning here.
            is_own = number in (signal.SIGUSR1, signal.SIGQUIT) and before[number] != signal.SIG_DFL
            if before[number] != signal.SIG_IGN and not is_own:
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
            self._signal, self._is_killed = signal.SIGQUIT, True
            work: Callable[[], None] = self.server.kill
        elif self._signal is None:
            self._signal, self._signal_at = signal.Signals(number), time.monotonic()
            grace_s = self._time_to_stop_s
            work = functools.partial(self.server.ask_to_stop, number, grace_s, self._is_saving)
        elif number == self._signal == signal.SIGINT and time.monotonic() - self._signal_at > _SAME_S:
            self._is_killed = True
            work = self.server.kill
        else:  # Slurm and others send SIGTERM after SIGUSR1; it is the same wish
            return
        threading.Thread(target=work, daemon=True).start()


class _OneMachine(RendezvousHandler):
    """The rendezvous of an agent that is alone: itself, at once.

    torch's own waits up to 0.3 s at random before it joins, so that many machines do not come all at once,
    and keeps a thread that outlives an interrupted run.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """The name under which torch's registry knows this class."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a group of one agent. Workers meet through files, so address and port go unused."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        """Return False: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """The id that the agent gave."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: nothing is held."""
        return True


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


def _own_class(kind: str) -> type[EvenstepError] | None:
    """Return evenstep's class of errors with this name, if there is one."""
    found = getattr(errors, kind, None)
    is_own = isinstance(found, type) and issubclass(found, EvenstepError) and found is not WorkerError
    return found if is_own else None


def _deaths(peers: dict[int, Peer]) -> dict[int, float]:
    return {rank: peer.ended for rank, peer in peers.items() if peer.ended is not None}


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Keep the workers from importing this process's ``__main__`` while they are started.

    multiprocessing has each child run the parent's main script again under another name. That fails for
    standard input and notebooks, and for a script that calls launch without a guard it would launch from
    within each worker. Here nothing needs it: main travels by value. multiprocessing leaves a main module
    alone whose spec is named ``*.__main__`` (as with ``python -m package``), so it gets such a spec for the
    time being.
    """
    main = sys.modules["__main__"]
    with _SPEC_LOCK:
        spec = getattr(main, "__spec__", None)
        if not isinstance(spec, _HiddenSpec):
            spec = main.__spec__ = _HiddenSpec(spec)
        spec.uses += 1
    try:
        yield
    finally:
        with _SPEC_LOCK:
            spec.uses -= 1
            if spec.uses == 0:
                main.__spec__ = spec.original


class _HiddenSpec(importlib.machinery.ModuleSpec):
    def __init__(self, original: importlib.machinery.ModuleSpec | None) -> None:
        super().__init__("evenstep.__main__", None)
        self.original = original
        self.uses = 0
