"""What runs in a worker process: its world, log, seeds, device and process group, then the user's main."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from loguru import logger
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from evenstep import (
    allocator,
    devices,
    failure,
    health,
    log,
    machines,
    memory,
    relay,
    seeding,
    sharedmem,
    stacks,
    stopping,
    world,
)
from evenstep.channel import Line
from evenstep.errors import ConfigError, EvenstepError, MachineError
from evenstep.machines import Machines
from evenstep.recovery import Recovery
from evenstep.world import World

_PR_SET_PDEATHSIG = 1
_AGREED = "agreed.json"
_LOOK_EVERY_S = 0.1
_GONE_S = 30.0
# What torch's agent sets for each worker; all else comes from the launching process's environment.
_AGENT_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all workers of a run have in common."""

    lanes: int
    seed: int
    mode: str
    devices: devices.Devices
    backend: str
    threads: int
    timeout_s: float
    run_dir: str | None
    resume: bool
    log_level: str
    log_rotation: str
    log_diagnose: bool
    started: float
    """When the run was launched, as ``time.time()``."""
    watch: health.Watch
    """What to do about hangs."""
    fault: bytes | None = None
    """Pickled: called as fault(rank, restart, point, step) at named points; for tests (testing.kill_at)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launching process hands to a worker that it starts.

    Attributes:
        setting: what all workers have in common.
        directory: the private directory of the run, in which ``program.pkl`` holds main and its arguments.
        shared: the launch's directory in shared memory, for snapshots.
        key: the secret of the channel.
        environment: the environment variables of the launching process.
        all_values: whether each rank's value goes back, and not rank 0's alone.
        machines: where the machines of the run meet; None for one machine, whose workers meet in a file.
        relayed: which of stdout and stderr go through a pipe of the launching process (relay.py).
    """

    setting: Setting
    directory: str
    shared: str
    key: bytes
    environment: dict[str, str]
    all_values: bool
    machines: Machines | None = None
    relayed: tuple[str, ...] = ()


def entry(job: Job) -> None:
    """Run a job's main in a process that torch's agent has started; the end is an exit code."""
    _die_with_parent()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the fork server ignores them (preload.py)
        signal.signal(number, signal.SIG_DFL)
    # Ctrl-\ comes to all. The launching process ends this one then, which does not die of it by itself, so
    # that nobody takes it for a failure; a program that main starts gets the signal's own action.
    signal.signal(signal.SIGQUIT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT})
    agents = {
        name: value
        for name, value in world.environment().items()
        if name in _AGENT_VARIABLES or name.startswith(("TORCHELASTIC_", "TORCH_NCCL_"))
    }
    world.replace_environment({**job.environment, **agents})
    _quiet()
    relay.attach(job.directory, job.relayed)
    place = world.placement()
    assert place is not None
    line = Line(job.directory, job.key, place.rank, place.restart)
    store: Callable[[], Any] = functools.partial(
        FileStore, os.path.join(job.directory, f"store-{place.restart}"), place.world_size
    )
    if job.machines is not None:
        job = _agreed(job, place.restart)
        store = functools.partial(_shared_store, job, place.restart)
    code = 0
    value: bytes | None = None
    try:
        recovery = _recovery(Path(job.shared), place, job.setting)
        with _prepared(job.setting, place, line, store, recovery) as here:
            line.wait_for_go(job.setting.timeout_s)
            log.moment("go")
            try:
                value = _call(job, here)
                recovery.done()
                if job.machines is not None:
                    _wait_for_all(job, place)
            except BaseException as error:
                log.moment("main failed")
                if place.num_nodes == 1 and failure.is_consequence(error):
                    recovery.leave_with_others()
                # Before the process group is destroyed: that may wait for a peer that never comes.
                _save_for_restart(recovery, error)
                if not failure.record(error, place.rank).secondary:
                    _finish(here)  # the launching process soon ends a worker that has told of its failure
                _note(job, place, line, error)
                raise
    except BaseException as error:
        code = failure.exit_code_of(error)
        _note(job, place, line, error)
    with contextlib.suppress(OSError):
        line.finish(value)
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        raise SystemExit(code)


def write_agreed(directory: str, restart: int, values: Mapping[str, Any]) -> None:
    """Leave word for the workers of a start what several machines have settled: fields of the Setting."""
    (Path(directory) / f"start-{restart}" / _AGREED).write_text(json.dumps(dict(values)), encoding="utf-8")


def _agreed(job: Job, restart: int) -> Job:
    """Return the job with what the machines have settled."""
    path = Path(job.directory) / f"start-{restart}" / _AGREED
    setting = dataclasses.replace(job.setting, **json.loads(path.read_text(encoding="utf-8")))
    return dataclasses.replace(job, setting=setting)


def _shared_store(job: Job, restart: int) -> Any:
    """Return the store of the machines' meeting, under a name that no other start uses."""
    where = job.machines
    assert where is not None
    timeout = datetime.timedelta(seconds=job.setting.timeout_s)
    shared = TCPStore(where.host, where.port, is_master=False, timeout=timeout)
    return PrefixStore(f"evenstep/{where.run_id}/workers/{restart}", shared)


def _wait_for_all(job: Job, place: world.Placement) -> None:
    """Wait until main has returned on every rank of all machines.

    Until then any of them may die. This process then hands its state on, and starts again with the others; if
    its machine's agent had seen it end, the others would wait for that agent in vain.
    """
    with contextlib.suppress(RuntimeError):  # the machine of the endpoint is gone: the agent ends this one
        store = _shared_store(job, place.restart)
        store.add("ended", 1)
        while store.add("ended", 0) < place.world_size:
            time.sleep(_LOOK_EVERY_S)
        return
    time.sleep(_GONE_S)


def run_here(main: Callable[..., Any], args: tuple[Any, ...], setting: Setting) -> Any:
    """Run main in this very process, which another launcher (torchrun) has started as one of many.

    Returns:
        main's value, on every rank.

    Raises:
        SystemExit: main failed; the report of the first rank that failed is on stderr.
    """
    place = world.placement()
    assert place is not None
    timeout = datetime.timedelta(seconds=setting.timeout_s)
    stores: list[Any] = []

    def first_store() -> int:
        # torchrun keeps one store over its restarts, and this process may launch several times; the addresses
        # of an earlier process group would still be found under the same prefix.
        shared = next(rendezvous("env://", timeout=timeout))[0]
        launches = shared.add(f"evenstep/{place.restart}/launches/{place.rank}", 1)
        stores.append(PrefixStore(f"evenstep/{place.restart}/{launches}", shared))
        return int(launches)

    shared = world.variables(
        {**devices.variables(setting.devices, place.local_world_size), **place.variables(), **_gloo(place)}
    )
    try:
        with shared:
            shm = sharedmem.of_torchrun(place.run_id, os.getppid(), world.variable("MASTER_PORT") or "")
            directory = shm / f"launch-{first_store()}"
            directory.mkdir(exist_ok=True)
            recovery = _recovery(directory, place, setting)
            with (
                _prepared(setting, place, world.NoParent(), lambda: stores[0], recovery) as here,
                health.watched_here(recovery, setting.watch, place.local_rank),
            ):
                try:
                    with memory.explained(here):
                        value = main(here, *args)
                    here.finish()
                    recovery.done()
                    return value
                except BaseException as error:
                    _save_for_restart(recovery, error)
                    raise
    except stopping.TerminatedError:
        raise
    except Exception as error:
        record = failure.record(error, place.rank)
        if not record.secondary and _is_first_to_fail(stores):
            path = log.path_of(setting.run_dir, place.rank) if setting.run_dir else None
            text = failure.report([record], {}, world_size=place.world_size, log_path=path)
            sys.stderr.write(text + "\n")
        raise SystemExit(record.exit_code) from None


def _gloo(place: world.Placement) -> dict[str, str]:
    """Return the variable with the interface on which the machines reach each other, if there are several."""
    host = place.meeting[0] if place.meeting else world.variable("MASTER_ADDR")
    if place.num_nodes == 1 or not host:
        return {}
    return machines.gloo_interface(machines.local_address(host))


def _is_first_to_fail(stores: list[Any]) -> bool:
    try:
        return not stores or stores[0].add("failures", 1) == 1
    except RuntimeError:  # the store went with the process that held it
        return True


def _recovery(directory: Path, place: world.Placement, setting: Setting) -> Recovery:
    return Recovery(
        directory,
        setting.run_dir,
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        restart=place.restart,
    )


def _save_for_restart(recovery: Recovery, error: BaseException) -> None:
    """Save a snapshot if the workers may be started again: after a lost peer, or an unknown error."""
    if isinstance(error, Exception) and not isinstance(error, EvenstepError):
        recovery.save()


@contextlib.contextmanager
def _prepared(
    setting: Setting,
    place: world.Placement,
    channel: world.Channel,
    store: Callable[[], Any],
    recovery: Recovery,
) -> Iterator[World]:
    """Make this process a worker: enter its world, and leave no process group behind."""
    here = World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        lanes=setting.lanes,
        seed=setting.seed,
        mode=setting.mode,
        device=setting.devices.of(place.local_rank),
        backend=setting.backend,
        threads=setting.threads,
        run_dir=setting.run_dir,
        resume=setting.resume,
        restart=place.restart,
        started=setting.started,
        channel=channel,
        recovery=recovery,
        fault=None
        if setting.fault is None
        else functools.partial(cloudpickle.loads(setting.fault), place.rank, place.restart),
    )
    recovery.finish = here.finish
    has_parent = isinstance(channel, Line)
    signals = stopping.Signals(here, recovery, has_parent=has_parent)
    logs = log.setup(
        setting.run_dir,
        place.rank,
        level=setting.log_level,
        rotation=setting.log_rotation,
        diagnose=setting.log_diagnose,
        exclusive=True,
    )
    answering = stacks.answering(recovery.directory, place.rank, place.restart)
    with logs, world.entered(here), signals, answering:
        log.moment("log open")
        if isinstance(channel, Line):
            channel.listen(on_stop=signals.ask, on_death=recovery.leave_if_possible)
        try:
            torch.set_num_threads(setting.threads)
            allocator.keep_pages()
            devices.apply(setting.devices, place.local_rank, place.local_world_size)
            seeding.seed_all(setting.seed, deterministic=setting.mode == "exact")
            log.moment("ready to meet")
            dist.init_process_group(
                setting.backend,
                store=store(),
                rank=place.rank,
                world_size=place.world_size,
                timeout=datetime.timedelta(seconds=setting.timeout_s),
            )
            logger.info("rank {} of {} runs, pid {}", place.rank, place.world_size, os.getpid())
            log.moment("process group made")
            if place.num_nodes > 1 and not isinstance(channel, Line):
                _check_threads(here)
            if place.restart > 0:
                recovery.agree(here)
                log.moment("agreed")
            yield here
        except Exception:
            logger.bind(file_only=True).exception("main failed")
            raise
        finally:
            _finish(here)
            if dist.is_initialized():
                dist.destroy_process_group()


def _check_threads(here: World) -> None:
    """Raise ConfigError if the machines of another launcher differ in their threads. Collective."""
    threads: list[Any] = [None] * here.world_size
    dist.all_gather_object(threads, here.threads)
    if len(set(threads)) > 1:
        rank = next(rank for rank, number in enumerate(threads) if number != threads[0])
        raise ConfigError(
            f"rank 0 has {threads[0]} threads and rank {rank}, on another machine, {threads[rank]}: their "
            "number changes bits, so it must be the same everywhere. Give all processes "
            f"--threads {min(threads)}."
        )


def _call(job: Job, here: World) -> bytes | None:
    """Call main and return its value, pickled, if it goes back."""
    main, args = cloudpickle.loads((Path(job.directory) / "program.pkl").read_bytes())
    with memory.explained(here):
        value = main(here, *args)
    here.finish()
    if not (here.is_first or job.all_values):
        return None
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ConfigError(
            f"main returned a {type(value).__name__}, which cannot be sent to the launching process: "
            f"{error}. Return numbers, strings, arrays or tensors, or the path of a file."
        ) from None


def _finish(here: World) -> None:
    """Let a checkpoint that is being written get to the disk; what goes wrong is in the log already."""
    with contextlib.suppress(Exception):
        here.finish()


def _note(job: Job, place: world.Placement, line: Line, error: BaseException) -> None:
    """Write the record of the error, once, and tell the parent that this worker is about to end."""
    directory = Path(job.directory) / f"start-{place.restart}"
    if (
        isinstance(error, stopping.TerminatedError)
        or failure.exit_code_of(error) == 0
        or (directory / failure.file_name(place.rank)).exists()
    ):
        return
    failure.write_record(directory, failure.record(error, place.rank))
    with contextlib.suppress(OSError):
        line.failing()


def _die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it (the fork server) dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _quiet() -> None:
    """Keep torch's agent code in this process off the console; what it would say is in the report."""
    logging.getLogger("torch.distributed.elastic").propagate = False


def check_backend(backend: str) -> None:
    """Raise MachineError if this torch cannot use a backend."""
    if not dist.is_backend_available(backend):
        raise MachineError(
            f"this torch has no backend {backend!r}. Use --backend gloo, which every torch build has, or "
            "leave --backend out."
        )
