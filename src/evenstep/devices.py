"""Which devices a run takes: the choice, GPUs that nobody uses, and the share of a GPU's memory."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep import guests, world
from evenstep.errors import ConfigError, MachineError

IDLE_MEMORY_SHARE = 0.05
IDLE_MEMORY_BYTES = 600 * 2**20
"""A GPU without a process counts as idle below this much memory in use, or below the share above: the driver
itself takes some hundred MiB, whatever the size of the GPU."""


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU."""

    pid: int
    user: str
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuUse:
    """Who uses a GPU, as the driver sees it.

    Attributes:
        index: the driver's number of the GPU.
        uuid: the driver's name of the GPU, such as ``GPU-8f...``.
        total_bytes, used_bytes: its memory.
        processes: the processes on it.
    """

    index: int
    uuid: str
    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it."""
        limit = max(IDLE_MEMORY_BYTES, IDLE_MEMORY_SHARE * self.total_bytes)
        return not self.processes and self.used_bytes < limit


@dataclass(frozen=True)
class Devices:
    """The devices of a run on this machine.

    Attributes:
        type: ``cpu`` or ``cuda``.
        gpus: the GPUs' numbers as torch counts them, that is, within CUDA_VISIBLE_DEVICES.
        reason: why these, in words.
        memory_fraction: the share of each GPU's memory that the run may take, or None.
    """

    type: str
    gpus: tuple[int, ...]
    reason: str
    memory_fraction: float | None = None

    def of(self, local_rank: int) -> str:
        """Return the device of a process in torch's notation, such as ``cuda:1``."""
        return f"cuda:{self.gpus[local_rank % len(self.gpus)]}" if self.type == "cuda" else "cpu"

    def share_of(self, local_rank: int, local_world_size: int) -> float | None:
        """Return the share of its GPU that a process may take: processes on one GPU divide the run's."""
        if self.memory_fraction is None or self.type != "cuda":
            return self.memory_fraction
        place, num = local_rank % len(self.gpus), len(self.gpus)
        return self.memory_fraction / len(range(place, max(local_world_size, place + 1), num))

    @property
    def backend(self) -> str:
        """The backend of torch.distributed that fits the device."""
        return "nccl" if self.type == "cuda" else "gloo"


def choose(
    device: str = "auto",
    gpus: str | None = None,
    fraction: float | None = None,
    *,
    count: Callable[[], int] | None = None,
    query: Callable[[], Sequence[GpuUse]] | None = None,
) -> Devices:
    """Choose the devices of a run on this machine.

    Args:
        device: ``auto`` (cuda if there is a GPU), ``cpu`` or ``cuda``.
        gpus: numbers within CUDA_VISIBLE_DEVICES (``0,1``), or ``idle`` or ``idle:N`` for GPUs nobody uses.
        fraction: the share of each GPU's memory that the run may take.
        count: returns the number of visible GPUs; by default torch's.
        query: returns the use of each GPU; by default the driver's (NVML).

    Raises:
        ConfigError: an option is wrong.
        MachineError: there is no such GPU, or none is idle.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; expected auto, cpu or cuda. Correct --device.")
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(
            f"gpu_memory_fraction is {fraction}; it is a share of each GPU's memory, so it must be above 0 "
            "and at most 1, for example --gpu-memory-fraction 0.7."
        )
    if device == "cpu":
        if gpus is not None:
            raise ConfigError(f"--gpus {gpus} contradicts --device cpu. Leave one of the two out.")
        return Devices("cpu", (), "asked for with --device cpu", fraction)
    num = (count or _count)()
    if num == 0:
        if device == "cuda" or gpus is not None:
            raise MachineError(_no_gpu(f"--gpus {gpus}" if gpus else "--device cuda"))
        return Devices("cpu", (), "there is no GPU that torch can use", fraction)
    if gpus is None:
        return Devices("cuda", tuple(range(num)), f"{num} visible to torch", fraction)
    if gpus.startswith("idle"):
        return Devices("cuda", _idle(gpus, num, query or query_nvml), f"idle now (--gpus {gpus})", fraction)
    return Devices("cuda", _listed(gpus, num), f"asked for with --gpus {gpus}", fraction)


def apply(devices: Devices, local_rank: int, local_world_size: int = 1) -> None:
    """Make this worker use its GPU, and no more of its memory than its share.

    TensorFlow is kept to the same share when the user's code imports it (guests.py); what it and JAX read
    from the environment is in :func:`variables`.

    Args:
        devices: the run's.
        local_rank: which of this machine's processes this is.
        local_world_size: how many there are: those on one GPU divide the run's share of it.
    """
    if devices.type != "cuda":
        return
    import torch

    torch.cuda.set_device(devices.of(local_rank))
    share = devices.share_of(local_rank, local_world_size)
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(share)
        guests.limit_tensorflow(share, _totals)


def variables(devices: Devices, nproc: int = 1) -> dict[str, str]:
    """Return the workers' environment variables that keep other libraries from taking a whole GPU.

    TensorFlow and JAX, which take a whole GPU when they start, read them when they are imported, and without
    them nothing happens. A run on the CPU sets them as well: its guests would still find the GPUs. What the
    user has set stays.

    Args:
        devices: the run's.
        nproc: processes on this machine.
    """
    values = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if "idle" in devices.reason:
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which the driver counts
    share = devices.share_of(0, nproc)
    # JAX refuses both the old and the new name at once.
    if share is not None and world.variable("XLA_CLIENT_MEM_FRACTION") is None:
        values["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:g}"
    own = {name for name in values if world.variable(name) is not None and name != "CUDA_DEVICE_ORDER"}
    return {name: value for name, value in values.items() if name not in own}


def _totals() -> list[int]:
    """Return the memory of the visible GPUs in bytes, in CUDA's order."""
    import torch

    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def query_nvml() -> list[GpuUse]:
    """Ask the driver who uses each GPU.

    Raises:
        MachineError: nvidia-ml-py is missing, or the driver does not answer.
    """
    try:
        import pynvml
    except ImportError:
        raise MachineError(
            "--gpus idle asks the driver which GPUs are in use, and needs the package nvidia-ml-py, which is "
            "not installed. Install it with `pip install 'evenstep[gpu]'`, or name the GPUs with --gpus 0,1."
        ) from None
    try:
        pynvml.nvmlInit()
        try:
            return [_use(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise MachineError(
            f"--gpus idle: the GPU driver does not answer ({error}). See whether `nvidia-smi` works, or name "
            "the GPUs with --gpus 0,1."
        ) from None


def _use(nvml: Any, index: int) -> GpuUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    found: dict[int, GpuProcess] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(nvml.NVMLError):  # some drivers do not tell
            for process in ask(handle):
                found[process.pid] = GpuProcess(process.pid, _user(process.pid), process.usedGpuMemory)
    return GpuUse(
        index=index,
        uuid=uuid.decode() if isinstance(uuid, bytes) else uuid,
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        processes=tuple(found.values()),
    )


def _user(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "unknown user"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _count() -> int:
    import torch

    return torch.cuda.device_count()


def _no_gpu(asked: str) -> str:
    visible = world.variable("CUDA_VISIBLE_DEVICES")
    hidden = (
        f" CUDA_VISIBLE_DEVICES is {visible!r}; unset it, or name the GPUs in it."
        if visible is not None
        else " See whether `nvidia-smi` shows one and whether this torch was built for CUDA."
    )
    return f"{asked}, but torch sees no GPU on this machine.{hidden} To train without one, use --device cpu."


def _listed(gpus: str, num: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in gpus.split(","))
    except ValueError:
        raise ConfigError(
            f"gpus is {gpus!r}; expected numbers such as 0,1, or idle or idle:N. Correct --gpus."
        ) from None
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"gpus is {gpus!r}: a GPU is named twice. Name each once with --gpus.")
    bad = [number for number in numbers if not 0 <= number < num]
    if bad:
        visible = world.variable("CUDA_VISIBLE_DEVICES")
        within = f" within CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
        raise MachineError(
            f"--gpus {gpus}: there is no GPU {bad[0]}; torch sees {num}, numbered 0 to {num - 1}{within}."
        )
    return numbers


def _idle(gpus: str, num: int, query: Callable[[], Sequence[GpuUse]]) -> tuple[int, ...]:
    word, _, text = gpus.partition(":")
    if word != "idle" or (":" in gpus and not (text.isdigit() and int(text) > 0)):
        raise ConfigError(f"gpus is {gpus!r}; expected idle or idle:N with a whole number N above 0.")
    uses = visible_only(query(), num)
    idle = [number for number, use in enumerate(uses) if use.is_idle]
    wanted = int(text) if text else None
    if not idle or (wanted is not None and len(idle) < wanted):
        held = "; ".join(holders(number, use) for number, use in enumerate(uses) if not use.is_idle)
        raise MachineError(
            f"--gpus {gpus}: {len(idle)} of {len(uses)} GPUs are idle, and {wanted or 'at least 1'} needed. "
            f"{held}. Wait until they are free, or share one with --gpus N --gpu-memory-fraction 0.5."
        )
    return tuple(idle[:wanted])


def visible_only(uses: Sequence[GpuUse], num: int) -> list[GpuUse]:
    """Return the GPUs that torch sees, in its order."""
    visible = world.variable("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(uses)[:num]
    by_name = {str(use.index): use for use in uses}
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        match = by_name.get(name) or next((use for use in uses if name and use.uuid.startswith(name)), None)
        if match is None:
            break  # CUDA, too, ignores everything after the first name that it does not know
        chosen.append(match)
    return chosen[:num]


def holders(number: int, use: GpuUse) -> str:
    """Return in words who holds a GPU's memory: ``GPU 0 (40.0 of 80.0 GiB in use) is held by ...``."""
    used = f"GPU {number} ({use.used_bytes / 2**30:.1f} of {use.total_bytes / 2**30:.1f} GiB in use)"
    if not use.processes:
        return f"{used} is held by a process that the driver does not show"
    who = ", ".join(
        f"pid {p.pid} of {p.user}" + (f" with {p.memory_bytes / 2**30:.1f} GiB" if p.memory_bytes else "")
        for p in use.processes
    )
    return f"{used} is held by {who}"


def own_share(device: str) -> float | None:
    """Return this process's share of a GPU's memory (``--gpu-memory-fraction``); None if it is not known."""
    import torch

    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    with contextlib.suppress(RuntimeError, AssertionError):
        return None if ask is None else float(ask(device))
    return None
