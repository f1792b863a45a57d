"""Start a function on several processes of this machine, stay in charge of them, and return its value.

The engine is torch.distributed.elastic. Around it: workers that start in milliseconds because a fork server
has imported torch already, workers that meet through files in a private directory (no port; nothing listens
but gloo's loopback sockets), main and its arguments pickled by value (lambdas, closures, notebook cells), and
errors that name the failing line of the user's code.

torch is not imported before the fork server has been told to import it, too: the two imports overlap.
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle

from evenstep import machines, program, sharedmem, world
from evenstep.errors import ConfigError, MachineError, did_you_mean

if TYPE_CHECKING:
    from evenstep.agent import Run
    from evenstep.worker import Setting


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of :func:`launch`."""

    nproc: int | Literal["auto"] = "auto"
    """Processes on this machine. auto: one per GPU; without GPUs one per CPU core, at most 4."""
    lanes: int | None = None
    """Logical workers. Default: the number of processes."""
    device: str = "auto"
    """auto (cuda if there is a GPU), cpu or cuda."""
    gpus: str | None = None
    """GPUs to use: numbers (0,1), or idle or idle:N for GPUs that nobody uses."""
    gpu_memory_fraction: float | None = None
    """Share of each GPU's memory that this run may take, 0 to 1."""
    backend: str | None = None
    """Backend of torch.distributed. Default: nccl on cuda, gloo on cpu."""
    threads: int | None = None
    """CPU threads per process. Default: cores // lanes; in fast mode cores // processes; at least 1."""
    seed: int = 0
    """Seed of python, numpy and torch in every worker, and of the run."""
    mode: str = "exact"
    """exact or fast."""
    run_dir: str | None = None
    """Directory of the run; log files go to its folder logs."""
    resume: bool = False
    """Whether the run goes on from what is in run_dir."""
    timeout_s: float = 300.0
    """Seconds that a process waits for the others in one collective."""
    max_restarts: int | None = None
    """How often the workers are started again after one died. main runs again from its beginning, and its
    TrainState goes on from the last committed step. Default: 3 once main has made a TrainState; a main
    without one is not run twice unless a number is given here."""
    nproc_min: int | None = None
    """Go on with fewer processes, down to this, when the restarts are used up. Default: no fewer."""
    nnodes: int | str = 1
    """Machines: a number, or MIN:MAX. Call launch on each of them, with the same main and options."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the machine where several machines meet; rank 0 runs there."""
    rdzv_id: str | None = None
    """Name under which the machines meet, if several runs share an endpoint."""
    on_message: Callable[[int, Any], None] | None = None
    """Called as on_message(rank, obj) in this process for each world.send(obj)."""
    join: bool = True
    """Wait for the end and return the value; otherwise return a Handle at once."""
    all_values: bool = False
    """Return the list of every rank's value, not rank 0's value."""
    grace_s: float = 5.0
    """Seconds from a failure to SIGKILL for the workers that have not ended by themselves."""
    stop_grace_s: float = 30.0
    """Seconds that the workers have to end the step and save when the run is asked to stop; then SIGKILL."""
    hang_after: float | None = 60.0
    """Seconds that a process may keep others waiting until it is said who waits where; None or 0: never."""
    on_hang: Literal["wait", "abort"] = "wait"
    """After the report: go on waiting, or end the run with a WorkerError that holds the report."""
    fault: Callable[[int, int, str, int], None] | None = None
    """For tests: called in the workers at named points of a step, see evenstep.testing.kill_at."""
    started: float | None = None
    """When the run began, as ``time.time()`` gives it; by default when launch is called."""
    log_level: str = "INFO"
    """Least severe level that goes into the log files."""
    log_rotation: str = "12:00"
    """When a log file is rotated: a time of day, a size (10 MB) or an age (1 week)."""
    log_diagnose: bool = False
    """Write the values of variables into logged tracebacks."""

    def __post_init__(self) -> None:
        if self.nproc != "auto" and (not isinstance(self.nproc, int) or self.nproc < 1):
            raise ConfigError(
                f"nproc is {self.nproc!r}; expected auto or a whole number above 0 (--nproc 2)."
            )
        if self.mode not in ("exact", "fast"):
            raise ConfigError(f"mode is {self.mode!r}; expected exact or fast. Correct --mode.")
        if self.on_hang not in ("wait", "abort"):
            raise ConfigError(f"on_hang is {self.on_hang!r}; expected wait or abort. Correct --on-hang.")
        if (self.hang_after or 0) < 0:
            raise ConfigError(
                f"hang_after is {self.hang_after}; it must be 0 or more seconds. Correct --hang-after."
            )
        for name in ("lanes", "threads", "timeout_s", "gpu_memory_fraction"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(
                    f"{name} is {value}; it must be above 0. Correct --{name.replace('_', '-')}."
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LaunchOptions:
        """Return the options given as keyword arguments.

        Args:
            values: the options by name.

        Raises:
            ConfigError: one does not exist, or cannot be.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"launch has no option {name!r}.{did_you_mean(name, names)} Arguments for main go "
                    f"in front, by position. The options are {', '.join(names)}."
                )
        return cls(**values)


def launch(main: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run ``main(world, *args)`` on several processes and return rank 0's value.

    Works from scripts with or without an ``if __name__ == "__main__"`` guard around the call, from notebooks
    and from standard input: ``main`` and ``args`` travel by value. Under torchrun this process is a worker
    already: main runs right here, and its value is returned on every rank.

    Args:
        main: what each process runs; gets its :class:`evenstep.world.World` first.
        args: further arguments for main.
        options: the fields of :class:`LaunchOptions`, such as ``nproc=4``.

    Returns:
        Rank 0's value, and None on the machines where rank 0 is not; with ``join=False`` a :class:`Handle`,
        at once.

    Raises:
        ConfigError: an option does not exist or cannot be, or main or an argument cannot be pickled.
        MachineError: the machine lacks what was asked for.
        WorkerError: a worker failed; the text is the report. An EvenstepError that a worker raised is raised
            here with its own class and text.
        StoppedError: the workers were stopped and saved their state.

    Example:
        >>> launch(lambda world: world.world_size, nproc=2)
        2
    """
    opts = LaunchOptions.of(options)
    started = opts.started or time.time()
    place = world.placement()
    if place is not None:
        from evenstep import worker

        if not opts.join:
            raise ConfigError(
                "launch: join=False needs this process to launch the workers, but it is a worker itself, "
                "started by torchrun. Leave out join=False, or start the script with python."
            )
        if place.meeting is not None and place.rank == 0:
            _check_port(*place.meeting)
        return worker.run_here(main, args, _setting(opts, started)[0])
    where = machines.machines_of(opts.nnodes, opts.rdzv_endpoint, opts.rdzv_id)
    if where is not None and opts.nproc_min is not None:
        raise ConfigError(
            "nproc_min is for one machine: on several, a machine that cannot keep its processes alive ends, "
            "and the others go on. Leave out --nproc-min, and give --nnodes MIN:MAX."
        )
    if where is None:
        _check_master_port()
    warm_up(opts.threads)
    payload = program.dumps(main, args)
    # torch reads this when it is imported; its sockets would complain of machines without a name.
    with world.variables({"TORCH_CPP_LOG_LEVEL": "ERROR"} if where is not None else {}):
        from evenstep import agent

    setting, nproc = _setting(opts, started)
    plan = agent.Plan(
        setting=setting,
        nproc=nproc,
        payload=payload,
        max_restarts=opts.max_restarts,
        grace_s=opts.grace_s,
        stop_grace_s=opts.stop_grace_s,
        nproc_min=opts.nproc_min,
        all_values=opts.all_values,
        start_method=_start_method(),
        machines=where,
        asked=frozenset(name for name in ("lanes", "threads") if getattr(_kept(opts), name) is not None),
    )
    run = agent.Run(plan, opts.on_message)
    return run.run() if opts.join else Handle(run)


def warm_up(threads: int | None = None) -> None:
    """Start the fork server, which imports torch while this process goes on with its own imports.

    Does nothing if one runs already, or where there is none (then workers are spawned).

    Args:
        threads: OMP_NUM_THREADS for the fork server, and so for what it imports.
    """
    if _start_method() != "forkserver" or world.placement() is not None:
        return
    multiprocessing.set_forkserver_preload(["evenstep.preload"])
    variables = {"OMP_NUM_THREADS": str(threads or 1), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # A signal to the whole group is for this process, which passes it on; the helpers must outlive it. What
    # is blocked here stays blocked in them.
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        multiprocessing.resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM when it has begun
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        with world.variables(variables), sharedmem.sockets():
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Handle:
    """A run in the background; see :func:`launch` with ``join=False``. Leaving a ``with`` block stops it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._value: Any = None
        self._error: BaseException | None = None
        # A daemon, so that a parent that ends, maybe with an error of its own, gets to atexit.
        self._thread = threading.Thread(target=self._work, name="evenstep-launch", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end; return rank 0's value or raise what :func:`launch` raises.

        Args:
            timeout_s: how long to wait, in seconds; None for as long as it takes.

        Raises:
            TimeoutError: the run has not ended after ``timeout_s`` seconds; it goes on.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the run has not ended after {timeout_s} s; it goes on.")
        if self._error is not None:
            raise self._error
        return self._value

    def poll(self) -> bool | None:
        """Return None while the run goes on, True if it ended well, False if it failed or was stopped."""
        return None if self._thread.is_alive() else self._error is None

    def stop(self) -> None:
        """Have the workers stop after the same step and save, and wait until they are gone.

        Workers whose main has made no TrainState get SIGTERM. Those that have not ended after
        ``stop_grace_s`` seconds (``grace_s`` without a TrainState) are killed. :meth:`wait` raises
        StoppedError then. Does nothing after the end of the run.
        """
        self._run.stop()
        self._thread.join()

    def send(self, obj: Any) -> None:
        """Send an object to all workers; ``world.receive()`` gets it there.

        Args:
            obj: anything that pickle knows.
        """
        self._run.server.send(obj)

    def _work(self) -> None:
        try:
            self._value = self._run.run()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self.stop)


def _start_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _setting(opts: LaunchOptions, started: float) -> tuple[Setting, int]:
    """Return what all workers have in common, and how many this machine runs."""
    from evenstep import devices, health, log, worker

    place = world.placement()
    if place is not None and (opts.gpus or "").startswith("idle"):
        raise ConfigError(
            f"--gpus {opts.gpus} under {place.launcher}: each process would choose for itself, and see the "
            "others as users of their GPUs. Name the GPUs (--gpus 0,1), or let evenstep start the processes."
        )
    log.check_rotation(opts.log_rotation)
    opts = _kept(opts)
    chosen = devices.choose(opts.device, opts.gpus, opts.gpu_memory_fraction)
    nproc = place.local_world_size if place else _nproc(opts, len(chosen.gpus))
    world_size = place.world_size if place else nproc
    lanes = opts.lanes or world_size
    world.World(world_size=world_size, lanes=lanes)  # raises if there are fewer lanes than processes
    backend = opts.backend or chosen.backend
    worker.check_backend(backend)
    if backend == "nccl" and nproc > len(chosen.gpus):
        fewer = f"--nproc {len(chosen.gpus)}, or " if chosen.gpus else ""
        raise MachineError(
            f"nproc {nproc} is above the number of GPUs, {len(chosen.gpus)}: nccl wants a GPU for each "
            f"process. Use {fewer}--backend gloo."
        )
    # On several machines lanes and threads are settled when they meet; this is the offer.
    is_alone = place.num_nodes == 1 if place else opts.rdzv_endpoint is None
    is_exact = opts.mode == "exact" and is_alone
    threads = opts.threads or (
        world.default_threads(lanes) if is_exact else max(1, world.num_cores() // nproc)
    )
    setting = worker.Setting(
        lanes=lanes,
        seed=opts.seed,
        mode=opts.mode,
        devices=chosen,
        backend=backend,
        threads=threads,
        timeout_s=opts.timeout_s,
        run_dir=None if opts.run_dir is None else str(Path(opts.run_dir).absolute()),
        resume=opts.resume,
        log_level=opts.log_level,
        log_rotation=opts.log_rotation,
        log_diagnose=opts.log_diagnose,
        watch=health.Watch(hang_after=opts.hang_after or 0.0, on_hang=opts.on_hang, timeout_s=opts.timeout_s),
        started=started,
        fault=None if opts.fault is None else bytes(cloudpickle.dumps(opts.fault)),
    )
    return setting, nproc


def _kept(opts: LaunchOptions) -> LaunchOptions:
    """Return the options with what a resumed run keeps unless told otherwise: its lanes and threads."""
    if not (opts.resume and opts.run_dir):
        return opts
    from evenstep import checkpoint

    path = checkpoint.latest(opts.run_dir)
    if path is None:
        return opts
    meta = checkpoint.read_meta(path)
    threads = meta.get("numerics", {}).get("threads") if opts.mode == "exact" else None
    return dataclasses.replace(opts, lanes=opts.lanes or meta.get("lanes"), threads=opts.threads or threads)


def _nproc(opts: LaunchOptions, num_gpus: int) -> int:
    if opts.nproc != "auto":
        return opts.nproc
    found = num_gpus or min(world.num_cores(), 4)
    return min(found, opts.lanes or found)  # a run resumed on a larger machine keeps its lanes


def _check_master_port() -> None:
    """Raise MachineError if MASTER_PORT is set and of no use, before anything starts.

    One machine needs no port; but who sets one means it, and would find out late that it is taken.
    """
    text = world.variable("MASTER_PORT")
    if text is None:
        return
    if not (text.isdigit() and 0 <= int(text) < 65536):
        raise MachineError(
            f"environment variable MASTER_PORT is {text!r}; expected a port number from 0 to 65535. Set it "
            "right, or unset it: a run on one machine needs no port."
        )
    host = world.variable("MASTER_ADDR", "127.0.0.1") or "127.0.0.1"
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, int(text), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MachineError(
            f"environment variable MASTER_ADDR is {host!r}, which cannot be resolved: {error}. Set it right, "
            "or unset it: a run on one machine needs no address."
        ) from None
    with socket.socket(family, kind, number) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            pid = port_owner(int(text))
            owner = f", held by process {pid}" if pid is not None else ""
            raise MachineError(
                f"{host}:{text} (MASTER_ADDR, MASTER_PORT) cannot be used: {error.strerror}{owner}. Unset "
                "MASTER_PORT (a run on one machine needs no port), or set it to a free one."
            ) from None


def _check_port(host: str, port: int) -> None:
    """Raise MachineError if the port at which the processes are to meet is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            pid = port_owner(port)
            owner = f", held by process {pid}" if pid is not None else ""
            raise MachineError(
                f"{host}:{port}, where the processes were to meet, cannot be used: {error.strerror}{owner}. "
                "Set MASTER_PORT to a free port in the script of the job."
            ) from None


def port_owner(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine, if /proc tells."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, rows):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            if str(link.readlink()) in inodes:
                return int(link.parts[2])
        except OSError:  # gone, or another user's
            continue
    return None
