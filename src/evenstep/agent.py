"""One run of torch's elastic agent on this machine, from its private directory to the removal of it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import math
import multiprocessing
import multiprocessing.process
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
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

from evenstep import devices, errors, failure, log, worker, world
from evenstep.channel import Peer, Server
from evenstep.errors import EvenstepError, StoppedError, WorkerError

MONITOR_INTERVAL_S = 0.02
_BACKEND = "evenstep-one-machine"
_MAX_PARENT = 70  # a socket's path may have 107 characters on Linux, 103 elsewhere
_SPEC_LOCK = threading.Lock()
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


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
        all_values: return every rank's value.
        start_method: of the processes: ``forkserver``, or ``spawn`` where there is none.
    """

    setting: worker.Setting
    nproc: int
    payload: bytes
    max_restarts: int
    grace_s: float
    all_values: bool
    start_method: str


class Run:
    """The state of one launch in the launching process.

    Args:
        plan: what to start.
        on_message: called as ``on_message(rank, obj)`` for each message of a worker.
    """

    def __init__(self, plan: Plan, on_message: Any) -> None:
        self._plan = plan
        self._stopped = False
        self._restart = 0
        self._oom_kills = failure.oom_kills()
        self._lock = threading.Lock()
        self._children: list[multiprocessing.process.BaseProcess] = []
        self._hidden = contextlib.ExitStack()
        self._key = secrets.token_bytes(32)
        self.directory = private_directory()
        try:
            Path(self.directory, "program.pkl").write_bytes(plan.payload)
            self.server = Server(
                self.directory, self._key, plan.nproc, on_message, plan.grace_s, self._on_connected
            )
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def run(self) -> Any:
        """Start the workers, wait for their end, and return the value or raise what went wrong."""
        try:
            with log.launcher(self._plan.setting.run_dir) as logger, _signal_handlers_kept():
                try:
                    return self._run_agent()
                except EvenstepError as error:
                    logger.error("%s", error)
                    raise
        finally:
            self._unhide_main()
            self.server.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def stop(self) -> None:
        """End the workers; :meth:`run` raises StoppedError then."""
        self._stopped = True
        self.server.stop()

    def begin(self, restart: int) -> None:
        """Get ready for a start of the workers; torch's agent is about to make their processes."""
        if self._stopped or (restart > 0 and not self._may_restart()):
            raise _NoRestartError
        self._restart = restart
        Path(self.directory, f"start-{restart}").mkdir()
        self.server.begin(restart)
        with self._lock:
            self._hidden.enter_context(main_hidden())

    def _on_connected(self) -> None:
        self._unhide_main()
        # For the exit codes, which only the parent of a process can know.
        self._children = list(multiprocessing.active_children())

    def _unhide_main(self) -> None:
        with self._lock:
            self._hidden.close()

    def _run_agent(self) -> Any:
        job = worker.Job(
            setting=self._plan.setting,
            directory=self.directory,
            key=self._key,
            environment=self._environment(),
            all_values=self._plan.all_values,
        )
        exits: dict[int, int] = {}
        rendezvous_handler_registry.register(_BACKEND, _OneMachine)
        try:
            with world.variables({"TORCHELASTIC_SIGNALS_TO_HANDLE": ""}):  # the agent sets it
                elastic_launch(self._config(), worker.entry)(job)
            return self._value()
        except ChildFailedError as error:
            exits = {rank: child.exitcode for rank, child in error.failures.items()}
        except _NoRestartError:
            pass
        except SignalException as error:
            raise self._signalled(error.sigval) from None
        failed = self._error(exits)
        raise failed from failed.__cause__

    def _config(self) -> LaunchConfig:
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._plan.nproc,
            run_id=uuid.uuid4().hex,
            role="evenstep",
            rdzv_backend=_BACKEND,
            max_restarts=self._plan.max_restarts,
            monitor_interval=MONITOR_INTERVAL_S,
            start_method=self._plan.start_method,
            local_addr="127.0.0.1",
            logs_specs=_Starts(self),
            signals_to_handle=",".join(_SIGNALS),
            shutdown_timeout=max(1, math.ceil(self._plan.grace_s)),
        )

    def _environment(self) -> dict[str, str]:
        setting = self._plan.setting
        return {
            **world.environment(),
            **devices.variables(setting.devices, self._plan.nproc),
            "OMP_NUM_THREADS": str(setting.threads),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _value(self) -> Any:
        values = self.server.values
        if not self._plan.all_values:
            return cloudpickle.loads(values[0]) if 0 in values else None
        return [
            cloudpickle.loads(values[rank]) if rank in values else None for rank in range(self._plan.nproc)
        ]

    def _records(self) -> list[failure.Record]:
        return failure.read_records(Path(self.directory, f"start-{self._restart}"))

    def _exits(self, peers: dict[int, Peer]) -> dict[int, int]:
        """Return the exit codes of the workers that have ended without finishing, by rank."""
        codes = {child.pid: child.exitcode for child in self._children}
        found = ((rank, codes.get(peer.pid), peer.done) for rank, peer in peers.items())
        return {rank: code for rank, code, done in found if code is not None and not (done and code == 0)}

    def _may_restart(self) -> bool:
        """Whether a new start can help: after a death or a lost peer.

        It cannot after an error in the code, and is not wanted after a stop that was asked for.
        """
        records = self._records()
        peers = self.server.peers
        first = failure.first_failure(records, self._exits(peers), _deaths(peers))
        if first is None or first.record is None:
            return True
        return first.record.secondary and first.record.kind != StoppedError.__name__

    def _error(self, exits: dict[int, int]) -> EvenstepError:
        if self._stopped:
            return StoppedError("the run was stopped with handle.stop().")
        records, peers = self._records(), self.server.peers
        exits = {**exits, **self._exits(peers)}
        deaths = _deaths(peers)
        first = failure.first_failure(records, exits, deaths)
        path = None
        if first is not None and self._plan.setting.run_dir is not None:
            path = log.path_of(self._plan.setting.run_dir, first.rank)
        text = failure.report(
            records,
            exits,
            deaths,
            world_size=self._plan.nproc,
            log_path=path,
            out_of_memory=failure.oom_kills() > self._oom_kills,
        )
        error = WorkerError(
            text, exit_code=first.exit_code if first else 1, rank=first.rank if first else None
        )
        if first is None or first.record is None:
            return error
        kind = getattr(errors, first.record.kind, None)
        if isinstance(kind, type) and issubclass(kind, EvenstepError) and kind is not WorkerError:
            own: EvenstepError = kind(first.record.message)
            own.__cause__ = error  # the report: where in the code it was raised
            return own
        return error

    def _signalled(self, number: signal.Signals) -> BaseException:
        """Return what ends this process after a signal to it; the workers have ended by now."""
        saved = [record for record in self._records() if record.kind == StoppedError.__name__]
        if saved:
            return StoppedError(saved[0].message)
        return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


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


def private_directory() -> str:
    """Make a directory that only this user can enter, with a name short enough for a Unix socket in it."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="evenstep-", dir=parent if len(parent) <= _MAX_PARENT else "/tmp")


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
        self._run.begin(int(envs[0]["TORCHELASTIC_RESTART_COUNT"]))
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        """The private directory of the run."""
        return self._run.directory


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put the signal handlers back that torch's agent replaces in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


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
