"""The bound that arithmetic sets: what this machine reaches, and what the model needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """Floating-point operations a second that were measured.

    Attributes:
        matmul: of a square matrix product.
        convolution: of a 3x3 convolution.
    """

    matmul: float
    convolution: float


def peak_of(device: torch.device, precision: str, seconds: float) -> Peak:
    """Measure the arithmetic that this process reaches while the others do the same.

    Collective: every rank must call, so that all of them work at the same time.

    Args:
        device: where.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seconds: for how long each operation is repeated.
    """
    options: dict[str, Any] = {"device": device, "dtype": _DTYPES[precision]}
    n = 8192 if device.type == "cuda" else 1024
    left, right = torch.randn(n, n, **options), torch.randn(n, n, **options)
    images, channels, size = (256, 256, 32) if device.type == "cuda" else (32, 64, 32)
    convolution = nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False, **options)
    layout = {"memory_format": torch.channels_last}
    convolution = convolution.to(**layout)
    inputs = torch.randn(images, channels, size, size, **options).to(**layout)  # type: ignore[call-overload]
    with torch.no_grad():
        return Peak(
            rate(lambda: left @ right, 2.0 * n**3, device, seconds),
            rate(
                lambda: convolution(inputs),
                2.0 * images * size * size * channels * 2 * channels * 9,
                device,
                seconds,
            ),
        )


def rate(work: Callable[[], Any], flops: float, device: torch.device, seconds: float) -> float:
    """Return the operations a second of ``work``, which does ``flops`` of them, over some seconds."""

    def done() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    done()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    calls, begun = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begun < seconds:
        work()
        done()
        calls += 1
    return flops * calls / (time.perf_counter() - begun)


def flops_of(forward: Callable[[], Any]) -> int:
    """Return the operations of a forward pass, which gives a loss, and of its backward pass.

    torch counts matrix products, convolutions and attention, a multiplication and an addition as two.
    """
    with FlopCounterMode(display=False) as counter:
        loss = forward()
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
