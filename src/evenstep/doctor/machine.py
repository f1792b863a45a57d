"""What ``evenstep doctor`` checks on this machine: one function for each check."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evenstep import world
from evenstep.devices import GpuUse, holders, query_nvml, visible_only
from evenstep.errors import ConfigError, EvenstepError
from evenstep.launcher import port_owner
from evenstep.precision import PRECISIONS, Support, advice, support

MIB, GIB = 2**20, 2**30
LEAST_TORCH = (2, 9)
FILES_PER_PROCESS = 100
RESOLVE_S = 2.0


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: what was looked at.
        status: ``green``: fine. ``yellow``: it runs, but slower or not as meant. ``red``: it will fail.
        found: what there is.
        fix: what to do; None if there is nothing to do.
    """

    name: str
    status: Literal["green", "yellow", "red"]
    found: str
    fix: str | None = None


def versions() -> dict[str, str]:
    """Return the versions of what a run depends on; importing none of it."""
    found = {"python": platform.python_version()}
    for name in ("evenstep", "torch", "torchvision", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def check_torch(have: dict[str, str] | None = None) -> Check:
    """Whether torch is there, new enough, and of one release with torchvision."""
    have = have or versions()
    text = ", ".join(f"{name} {version}" for name, version in have.items())
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways
        return Check(
            "torch",
            "red",
            f"torch cannot be imported: {error}; {text}",
            "Install it again: pip install --force-reinstall torch torchvision",
        )
    text += f"; built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    release = _release(have["torch"])
    if release < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return Check("torch", "red", text, f"evenstep needs torch {least}: pip install -U torch torchvision")
    # torch 2.N is released together with torchvision 0.(N + 15).
    vision = _release(have["torchvision"])
    if release[0] == 2 and vision != (0, release[1] + 15):
        fix = f"It goes with torchvision 0.{release[1] + 15}: pip install -U torch torchvision"
        return Check("torch", "yellow", text, fix)
    return Check("torch", "green", text)


def _release(version: str) -> tuple[int, int]:
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) if version[:1].isdigit() and len(parts) > 1 else (0, 0)


def check_backends(num_gpus: int) -> Check:
    """Whether the backends of torch.distributed that a run takes are built in."""
    import torch.distributed as dist

    names = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    text = ", ".join(names) or "none"
    if "gloo" not in names:
        return Check("backends", "red", text, "This torch has no gloo: install torch from pytorch.org.")
    if num_gpus and "nccl" not in names:
        return Check("backends", "red", f"{text}, but no nccl for the GPUs", "Use --backend gloo (slow).")
    return Check("backends", "green", text)


def check_gpus(num_gpus: int, query: Callable[[], Sequence[GpuUse]] = query_nvml) -> Check:
    """Which GPUs there are, and who uses them."""
    try:
        uses = list(query())
    except EvenstepError as error:
        if num_gpus == 0:
            return Check("GPUs", "green", "none; runs train on the CPU")
        return Check("GPUs", "yellow", f"{num_gpus}, in use by whom is not known", str(error))
    if num_gpus == 0:
        found = f"the driver shows {len(uses)}, torch sees none"
        fix = "Unset CUDA_VISIBLE_DEVICES, or install a torch that is built for CUDA (pytorch.org)."
        return Check("GPUs", "red" if uses else "green", found, fix if uses else None)
    seen = visible_only(uses, num_gpus)
    busy = [holders(number, use) for number, use in enumerate(seen) if not use.is_idle]
    if busy:
        fix = "Take GPUs that nobody uses with --gpus idle, or share with --gpu-memory-fraction 0.5."
        return Check("GPUs", "yellow", f"{len(seen) - len(busy)} of {len(seen)} idle; {'; '.join(busy)}", fix)
    return Check("GPUs", "green", f"{len(seen)}, all idle")


@dataclass(frozen=True)
class Driver:
    """The GPU driver: its version, and the newest CUDA that it can run, as (major, minor)."""

    version: str
    cuda: tuple[int, int]


def query_driver() -> Driver | None:
    """Ask the driver for its version; None if there is none or nvidia-ml-py is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVMLError, of a module that may be missing
        return None
    try:
        version, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
        text = version.decode() if isinstance(version, bytes) else str(version)
        return Driver(text, (cuda // 1000, cuda % 1000 // 10))
    finally:
        pynvml.nvmlShutdown()


def check_driver(
    built_for: str | None, num_gpus: int, query: Callable[[], Driver | None] = query_driver
) -> Check:
    """Whether the GPU driver can run what torch was built for.

    Args:
        built_for: torch.version.cuda.
        num_gpus: GPUs that torch sees.
        query: asks the driver.
    """
    driver = query()
    if driver is None:
        found = "not asked: nvidia-ml-py or the driver is missing" if num_gpus else "none; none needed"
        fix = "pip install 'evenstep[gpu]'" if num_gpus else None
        return Check("driver", "yellow" if num_gpus else "green", found, fix)
    text = f"{driver.version}, good for CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    if built_for is None:
        fix = "This torch is built for the CPU; to train on the GPU, install one for CUDA (pytorch.org)."
        return Check("driver", "yellow", text, fix)
    if _release(built_for)[0] > driver.cuda[0]:
        fix = f"torch is built for CUDA {built_for}: update the driver, or install an older torch."
        return Check("driver", "red", text, fix)
    return Check("driver", "green", text)


def check_precision(precision: str, num_gpus: int, ask: Callable[[str, str], Support] = support) -> Check:
    """Which precisions the devices compute themselves, and whether the one of the run is among them.

    Args:
        precision: ``--precision``.
        num_gpus: GPUs that a run takes; 0 for the CPU.
        ask: as precision.support.
    """
    devices = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    found = {(name, device): ask(name, device) for name in PRECISIONS for device in devices}
    lacking = {name: device for (name, device), its in reversed(found.items()) if not its.is_native}
    own = ", ".join(name for name in PRECISIONS if name not in lacking)
    reasons = dict.fromkeys(its.reason for (name, _), its in found.items() if name != "fp32")
    text = "; ".join([f"{own} natively", *reasons])
    if precision in lacking:
        return Check("precision", "yellow", text, advice(precision, lacking[precision]))
    return Check("precision", "green", text)


def check_cores(nproc: int, threads: int, cores: int | None = None, quota: float | None = None) -> Check:
    """Whether there are cores for all processes and threads.

    Args:
        nproc: processes on this machine.
        threads: CPU threads each.
        cores: cores that this process may use; by default asked.
        quota: cores that the container may use at a time; by default asked.
    """
    cores = cores or world.num_cores()
    quota = quota or cpu_quota()
    usable = cores if quota is None else min(cores, max(1, int(quota)))
    limit = f" (the container's limit is {quota:g})" if quota is not None and quota < cores else ""
    text = f"{nproc} x {threads} threads on {cores} cores{limit}"
    if nproc * threads > usable:
        fix = f"More threads than cores slow each other down: --nproc {min(nproc, usable)}"
        return Check("cores", "yellow", text, f"{fix} --threads {max(1, usable // min(nproc, usable))}")
    return Check("cores", "green", text)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores the control group may use at a time, or None without a limit."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def check_shared_memory(need: int, statvfs: Callable[[str], Any] = os.statvfs) -> Check:
    """Whether /dev/shm holds the batches of DataLoader workers and the snapshots of all processes.

    Args:
        need: bytes.
        statvfs: as os.statvfs.
    """
    try:
        stat = statvfs("/dev/shm")
    except OSError as error:
        found = f"cannot be looked at: {error.strerror}"
        return Check("/dev/shm", "yellow", found, "Mount it: mount -t tmpfs -o size=8g tmpfs /dev/shm")
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    text = f"{size(free)} free of {size(total)}, this run may need {size(need)}"
    fix = "In a container: docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8g /dev/shm"
    if free < need:
        return Check("/dev/shm", "red", text, f"{fix}; or use fewer --workers.")
    if total <= 64 * MIB:
        return Check("/dev/shm", "yellow", text, f"{fix}. 64 MiB is Docker's default, and soon too little.")
    return Check("/dev/shm", "green", text)


def check_disk(run_dir: str, num_bytes: int, keep: int, statvfs: Callable[[str], Any] = os.statvfs) -> Check:
    """Whether the checkpoints fit on the disk: those that are kept, the best one, and one being written.

    Args:
        run_dir: the run's directory, which need not exist.
        num_bytes: of one checkpoint.
        keep: how many are kept.
        statvfs: as os.statvfs.
    """
    path = Path(run_dir).absolute()
    while not path.exists():
        path = path.parent
    if not os.access(path, os.W_OK):
        return Check("disk", "red", f"{path} cannot be written", "Choose another --run-dir.")
    stat = statvfs(str(path))
    free, need = stat.f_bavail * stat.f_frsize, num_bytes * (keep + 2)
    text = f"{size(free)} free in {path}; {keep} + 2 checkpoints of {size(num_bytes)} need {size(need)}"
    if free < need:
        fix = f"Free {size(need - free)}, choose another --run-dir, or keep fewer with --keep 1."
        return Check("disk", "red", text, fix)
    return Check(
        "disk",
        "green" if free >= 2 * need else "yellow",
        text,
        None
        if free >= 2 * need
        else "Less than twice what is needed is left: logs and caches take some, too.",
    )


def check_port(port: int | None, host: str | None = None) -> Check:
    """Whether the port for meeting is free; without one, MASTER_PORT's."""
    text = str(port) if port is not None else world.variable("MASTER_PORT")
    if text is None:
        return Check("port", "green", "none given; one machine needs none")
    if not (text.isdigit() and 0 < int(text) < 65536):
        return Check(
            "port", "red", f"MASTER_PORT is {text!r}", "Set it to a number from 1 to 65535, or unset it."
        )
    number = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", number))
        except OSError as error:
            pid = port_owner(number)
            owner = f", held by process {pid}" if pid is not None else ""
            fix = "Choose another one; on one machine unset MASTER_PORT: it needs none."
            return Check("port", "red", f"{number}: {error.strerror}{owner}", fix)
    return Check("port", "green", f"{number} is free")


def check_hostname(
    needed: bool,
    name: str | None = None,
    resolve: Callable[[str, None], Any] = socket.getaddrinfo,
    timeout_s: float = RESOLVE_S,
) -> Check:
    """Whether this machine's own name leads to an address.

    Args:
        needed: several machines train together.
        name: the name; by default asked.
        resolve: as socket.getaddrinfo.
        timeout_s: how long to wait for an answer.
    """
    name = name or socket.gethostname()
    answers: list[Any] = []
    problem = [f"no answer within {timeout_s:g} s"]

    def ask() -> None:
        try:
            answers.extend(resolve(name, None))
        except OSError as error:
            problem[0] = str(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if answers:
        return Check("host name", "green", f"{name} is {answers[0][4][0]}")
    why = "the other machines cannot find this one" if needed else "torchrun may wait for ever"
    fix = f"Add a line to /etc/hosts: 127.0.0.1 {name} (or this machine's address); otherwise {why}."
    found = f"{name} does not resolve: {problem[0]}" + ("" if needed else "; one machine does not need it")
    return Check("host name", "red" if needed else "yellow", found, fix)


def check_peer(peer: str, timeout_s: float = RESOLVE_S) -> Check:
    """Whether another machine's port can be reached.

    Args:
        peer: ``host:port``.
        timeout_s: how long to wait.

    Raises:
        ConfigError: peer is not of that form.
    """
    host, colon, port = peer.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ConfigError(f"peer is {peer!r}; expected host:port, for example --peer node1:29500.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return Check("peer", "green", f"{peer} answers")
    except OSError as error:
        fix = (
            "Start the run on the first machine before, open the port in the firewall, or correct --peer. "
            "`getent hosts NAME` shows whether the name resolves."
        )
        return Check("peer", "red", f"{peer} cannot be reached: {error}", fix)


def check_limits(
    nproc: int,
    threads: int,
    workers: int,
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit,
    num_threads: int | None = None,
) -> Check:
    """Whether this user may open enough files and start enough processes.

    Args:
        nproc: processes on this machine.
        threads: CPU threads each.
        workers: DataLoader workers each.
        getrlimit: as resource.getrlimit.
        num_threads: how many threads this user has now; by default counted.
    """
    files, _ = getrlimit(resource.RLIMIT_NOFILE)
    tasks, _ = getrlimit(resource.RLIMIT_NPROC)
    need_files = FILES_PER_PROCESS * (1 + workers) + 10 * nproc
    need_tasks = (num_threads if num_threads is not None else _own_threads()) + nproc * (
        threads + 20 + workers * (threads + 4)
    )
    text = f"open files {_limit(files)}, processes {_limit(tasks)}"
    if files not in (-1, resource.RLIM_INFINITY) and files < need_files:
        return Check("limits", "red", f"{text}; about {need_files} files are needed", "ulimit -n 65536")
    if tasks not in (-1, resource.RLIM_INFINITY) and tasks < need_tasks:
        fix = "ulimit -u 65536 (threads count, too), or fewer --nproc, --threads, --workers"
        return Check("limits", "red", f"{text}; about {need_tasks} processes are needed", fix)
    return Check("limits", "green", text)


def _limit(value: int) -> str:
    return "unlimited" if value in (-1, resource.RLIM_INFINITY) else f"{value:,}"


def _own_threads() -> int:
    """Return how many threads of this user run on the machine, which is what RLIMIT_NPROC counts."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            if path.stat().st_uid == os.getuid():
                fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
                total += int(fields.get("Threads", "1"))
        except (OSError, ValueError):
            continue
    return total


def size(num_bytes: float) -> str:
    """Return a number of bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
