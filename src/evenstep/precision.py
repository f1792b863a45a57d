"""Which precision a device computes with arithmetic of its own, and what ``--precision auto`` means there.

For a CPU two things must come together: instructions for the precision, of which the kernel tells, and
oneDNN, with which torch computes convolutions and matrix products there. oneDNN alone says too much: with
AVX-512 it computes bf16 without instructions for it. Where it refuses, torch falls back on loops that are
about ten times as slow as fp32.

torch is imported only when it has to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from evenstep.errors import ConfigError, did_you_mean
from evenstep.world import World

if TYPE_CHECKING:
    import torch

PRECISIONS = ("fp32", "bf16", "fp16")
"""What a run computes its forward pass in."""
CHOICES = ("auto", *PRECISIONS)
ASKED = "asked for"

# As /proc/cpuinfo calls them, the fastest first: x86, then ARM.
_INSTRUCTIONS = {
    "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
    "fp16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
_FP16_GPUS = (5, 3)
"""The first compute capability with fp16 arithmetic (CUDA C++ Programming Guide, arithmetic instructions)."""


@dataclass(frozen=True)
class Support:
    """How a device computes in a precision.

    Attributes:
        is_native: with arithmetic made for it.
        reason: what the device has or lacks, such as ``this CPU has amx_bf16``.
        cost: what it costs where it is not native.
    """

    is_native: bool
    reason: str
    cost: str = ""


def cpu_instructions(precision: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of the CPU's instructions for a precision, the fastest first; None if it has none.

    A virtual machine may hide some; they count as missing then. Takes no time, and no torch.

    Args:
        precision: ``bf16`` or ``fp16``.
        cpuinfo: where the kernel tells of its CPUs.
    """
    try:
        with cpuinfo.open(encoding="utf-8") as file:  # line by line: it takes long on many cores
            flags = next((line.split() for line in file if line.startswith(("flags", "Features"))), [])
    except OSError:  # not Linux
        return None
    return next((name for name in _INSTRUCTIONS[precision] if name in flags), None)


def support(precision: str, device: torch.device | str) -> Support:
    """Return how a device computes in a precision.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        device: as torch writes it, such as ``cpu`` or ``cuda:1``.
    """
    kind = str(device).partition(":")[0]
    if precision == "fp32":
        return Support(True, "every device computes fp32")
    return _of_gpu(precision, device) if kind == "cuda" else _of_cpu(precision)


def _of_cpu(precision: str) -> Support:
    name, is_in_onednn = cpu_instructions(precision), _is_in_onednn(precision)
    if name is not None and is_in_onednn:
        return Support(True, f"this CPU has {name}")
    reason = (
        f"this CPU has no instructions for {precision}"
        if name is None
        else f"this CPU has {name}, but torch's oneDNN does not compute {precision} here"
    )
    if is_in_onednn:
        return Support(False, reason, "oneDNN puts it together from fp32, which is slower or no faster")
    return Support(False, reason, "training net took about ten times as long as in fp32")


def _is_in_onednn(precision: str) -> bool:
    import torch

    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")())
    except (AttributeError, RuntimeError):  # a torch that is built without it
        return False


def _of_gpu(precision: str, device: torch.device | str) -> Support:
    import torch

    found = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        is_native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if precision == "bf16"
            else torch.version.hip is not None or (found.major, found.minor) >= _FP16_GPUS
        )
    if is_native:
        return Support(True, f"{found.name} computes {precision} itself")
    lacks = f"{found.name} (compute capability {found.major}.{found.minor}) has no {precision} arithmetic"
    return Support(False, lacks, "torch emulates it, which is slower or no faster than fp32")


def settle(asked: str, device: torch.device | str) -> tuple[str, str]:
    """Return the precision that an option means on a device, and why.

    Args:
        asked: ``auto`` (bf16 where the device computes it itself, else fp32), or a precision, which stays.
        device: as torch writes it.

    Raises:
        ConfigError: there is no such precision.
    """
    if asked not in CHOICES:
        raise ConfigError(
            f"precision is {asked!r}; choose {', '.join(CHOICES[:-1])} or {CHOICES[-1]}."
            f"{did_you_mean(asked, CHOICES)} The flag is --precision auto."
        )
    if asked != "auto":
        return asked, ASKED
    found = support("bf16", device)
    return "bf16" if found.is_native else "fp32", found.reason


def warning_of(asked: str, device: torch.device | str) -> str | None:
    """Return what to say of a precision that a device does not compute itself; None if it does.

    Args:
        asked: a precision, or ``auto``, which needs no warning.
        device: as torch writes it.
    """
    precision = settle(asked, device)[0]
    found = support(precision, device)
    if found.is_native:
        return None
    return (
        f"precision {precision} is slow here: {found.reason}; {found.cost}. It stays {precision}, since "
        f"another precision gives other bits. {advice(precision, device)}"
    )


def tell(precision: str, reason: str, world: World) -> None:
    """Write into the log what this process computes in; warn if its device does not do that itself.

    Each machine shows the warning once, at the first start; the other processes have it in their files.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        reason: why.
        world: this process.
    """
    logger.info("precision {}: {}", precision, reason)
    text = warning_of(precision, world.device)
    if text is not None and not world.restart:
        logger.bind(file_only=world.local_rank > 0).warning("{}", text)


def advice(precision: str, device: torch.device | str) -> str:
    """Return what to do about a precision that a device does not compute itself."""
    others = ("fp16", "fp32") if precision == "bf16" and support("fp16", device).is_native else ("fp32",)
    return (
        f"Use {' or '.join(f'--precision {other}' for other in others)}, or begin with --precision auto, "
        "which takes bf16 only where the device computes it itself."
    )
