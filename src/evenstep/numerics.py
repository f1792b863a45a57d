"""The numerics key: what bits depend on besides options and seed; and the precision of a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Numerics:
    """The numerics key: what the bits of a run depend on besides its options and its seed.

    It is stored in every checkpoint. A run that goes on under another key may get other bits from there on.
    """

    lanes: int
    threads: int
    mode: str
    precision: str
    compile: bool
    batchnorm: str
    device: str
    torch: str

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return a line for each field in which ``other`` differs."""
        return [
            f"{name}: {other.get(name)!r} in the checkpoint, {value!r} now"
            for name, value in asdict(self).items()
            if other.get(name) != value
        ]


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a forward pass of ``precision`` runs."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[precision])


def device_name(device: torch.device) -> str:
    """Return what of a device changes bits: the GPU's name, or the instruction set of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
