"""Random numbers that depend on what is computed, and never on which process computes it.

Every random stream has its own number, so that the permutation of an epoch, a sample's transform, a lane's
dropout and an image's crop never share random numbers although all come from the one seed of the run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from evenstep import world

STREAM_STEP = 1
STREAM_SAMPLE = 2
STREAM_ORDER = 3
STREAM_AUGMENT = 4
STREAM_LOOP = 5
STREAM_COMMIT = 6
STREAM_CHUNK = 7
STREAM_TURN = 8

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(*numbers: int) -> int:
    """Return a 63-bit hash of whole numbers, the same on every machine and for ever.

    Each number is xored into the state, which then takes one step of splitmix64 (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014). Numbers are taken modulo 2**64.
    """
    state = _GOLDEN
    for number in numbers:
        state = ((state ^ (number & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state >> 1


def mix_array(*parts: int | np.ndarray) -> np.ndarray:
    """Return :func:`mix` element by element.

    Args:
        parts: whole numbers or arrays of whole numbers, broadcast against each other.

    Returns:
        uint64 array of the broadcast shape; every value is below 2**63.
    """
    state = np.array(_GOLDEN, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            number = np.uint64(part & _MASK) if isinstance(part, int) else np.asarray(part).astype(np.uint64)
            state = (state ^ number) + np.uint64(_GOLDEN)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state >> np.uint64(1))


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order of the samples in an epoch: a permutation of ``range(n)`` as int64 array (n,).

    The samples are sorted by a hash of (seed, epoch, sample), so the order depends on no library's random
    generator and is the same with every version of numpy and torch.
    """
    keys = mix_array(seed, STREAM_ORDER, epoch, np.arange(n, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def seed_all(seed: int, *, deterministic: bool) -> None:
    """Seed Python, numpy, torch and all CUDA devices, and choose between reproducible and fast kernels.

    Args:
        seed: the seed of the run.
        deterministic: True (exact mode): deterministic algorithms only, no cuDNN autotuning, no TF32. False
            (fast mode): cuDNN autotuning and TF32.
    """
    _seed_host(mix(seed))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(mix(seed))
        if deterministic and world.variable("CUBLAS_WORKSPACE_CONFIG") is None:
            # cuBLAS reads it when its first handle is made; without it deterministic mode raises.
            world.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.use_deterministic_algorithms(deterministic)
    # In deterministic mode torch fills all memory that it hands out, against code that reads what it has not
    # written. No operator does, and the filling costs 2 % of a step of net.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.allow_tf32 = not deterministic
    torch.set_float32_matmul_precision("highest" if deterministic else "high")


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed for one of the steps that are done with the same batch, as a GAN's are.

    Args:
        seed: the seed of the run.
        turn: how many steps have been done with the batch before; the first one has the seed of the run.
    """
    return mix(seed, STREAM_TURN, turn) if turn else seed


def seed_step(seed: int, step: int, lane: int, device: Any) -> None:
    """Seed the model's random numbers (dropout) before the forward pass of one lane.

    Args:
        seed: the seed of the run.
        step: the optimizer step.
        lane: the lane whose forward pass comes next.
        device: the device of the model, as text or ``torch.device``.
    """
    _seed(mix(seed, STREAM_STEP, step, lane), device)


def seed_loop(seed: int, step: int, device: Any) -> None:
    """Seed the random numbers of the loop's body before a batch is handed out, alike on every rank.

    Args:
        seed: the seed of the run.
        step: the batch's optimizer step.
        device: the device of the model, as text or ``torch.device``.
    """
    _seed(mix(seed, STREAM_LOOP, step), device)


def seed_commit(seed: int, step: int, device: Any) -> None:
    """Seed the random numbers of the optimizer, and of what follows it in the loop, alike on every rank.

    Without it they would go on from the last lane of this rank, and the weights of an optimizer that adds
    noise would differ. The arguments are those of :func:`seed_loop`.
    """
    _seed(mix(seed, STREAM_COMMIT, step), device)


def seed_chunk(seed: int, chunk: int, device: Any) -> None:
    """Seed the model's random numbers before a chunk is evaluated.

    Args:
        seed: the seed of the run.
        chunk: the number of the chunk.
        device: the device of the model, as text or ``torch.device``.
    """
    _seed(mix(seed, STREAM_CHUNK, chunk), device)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed Python, numpy and torch (CPU) before sample ``index`` is read, for random transforms.

    It overwrites the random states of this process; see :func:`preserved_rng`.
    """
    _seed_host(mix(seed, STREAM_SAMPLE, epoch, index))


def _seed(state: int, device: Any) -> None:
    _seed_host(state)
    generator = _cuda_generator(device)
    if generator is not None:
        generator.manual_seed(state)


def _seed_host(state: int) -> None:
    random.seed(state)
    np.random.seed(state & 0xFFFFFFFF)
    torch.default_generator.manual_seed(state)


def _cuda_generator(device: Any) -> torch.Generator | None:
    """Return the default generator of a GPU; None for a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[index]


def random_states() -> tuple[Any, Any, torch.Tensor]:
    """Return the random states of Python, numpy and torch (CPU)."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def set_random_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    """Put back what :func:`random_states` returned."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(torch_state)


@contextlib.contextmanager
def preserved_rng(device: Any = "cpu") -> Iterator[None]:
    """Put the random states of Python, numpy, torch (CPU) and a GPU back at the end of a ``with`` block.

    Args:
        device: the GPU whose state is put back, too; a CPU stands for none.
    """
    generator = _cuda_generator(device)
    states = random_states()
    on_gpu = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        set_random_states(states)
        if generator is not None and on_gpu is not None:
            generator.set_state(on_gpu)
