"""What all processes must have in common to train together, and a block that one of them runs alone."""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.errors import ConfigError
from evenstep.precision import PRECISIONS
from evenstep.world import World, current

_VERY_LONG = datetime.timedelta(days=365)


def check_same_model(module: nn.Module, world: World) -> None:
    """Raise ConfigError if the processes have built different models. Collective: every rank must call.

    torch DDP finds some of these differences, and says that a rank has inconsistent parameters. Buffers that
    no checkpoint keeps (``persistent=False``) may differ: an evaluation before may have cached a table in
    them, on the ranks that had something to evaluate.

    Args:
        module: the model.
        world: this process.

    Raises:
        ConfigError: on every rank; names the first parameter or buffer that differs.
    """
    everybody = _unless_alike(_described(module), world)
    if everybody is not None:
        raise _different(everybody)


def shared_tensors(module: nn.Module, world: World) -> list[Tensor]:
    """Return what parameters and buffers all processes have, in one order. Collective: every rank must call.

    A table that is cached on some ranks only (None in the module of others) is given to the others first.
    Else those would make it in each step anew, because after the step buffers are those of the last lane,
    and that one has changed none.

    Args:
        module: the model, which has passed ``check_same_model``.
        world: this process.
    """
    caches = _caches(module)
    everybody = _unless_alike(list(caches), world)
    if everybody is not None:
        _give_caches(module, world)
        caches = _caches(module)
        dist.all_gather_object(everybody, list(caches))
    common = set(caches).intersection(*(everybody or [caches]))
    missing = {id(caches[line]) for line in caches if line not in common}
    return [*module.parameters(), *(b for b in module.buffers() if id(b) not in missing)]


def check_same_precision(precision: str, reason: str, world: World) -> None:
    """Raise ConfigError if the processes compute in different precisions. Collective: every rank must call.

    Each sees its own device alone when it chooses (``--precision auto``), and several machines may have been
    given different options.

    Args:
        precision: this process's, one of ``precision.PRECISIONS``.
        reason: why it has this one.
        world: this process.

    Raises:
        ConfigError: on every rank; names two ranks that differ, and their reasons.
    """
    everybody = _unless_equal(PRECISIONS.index(precision), (precision, reason), world)
    if everybody is None:
        return
    rank = next(rank for rank, (name, _) in enumerate(everybody) if name != everybody[0][0])
    each = " and ".join(f"rank {r} in {everybody[r][0]} ({everybody[r][1]})" for r in (0, rank))
    raise ConfigError(
        f"the ranks would compute in different precisions: {each}. It changes the bits, so it must be the "
        "same everywhere. Give all of them the same --precision; every device computes --precision fp32."
    )


def gathered(mine: Tensor, world: World) -> Tensor:
    """Return everybody's whole numbers, one row a rank. Collective."""
    mine = mine.to(world.device)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    if world.world_size > 1:
        dist.all_gather(rows, mine)
    else:
        rows = [mine]
    return torch.stack(rows).cpu()


def _unless_alike(lines: Sequence[str], world: World) -> list[Any] | None:
    """Return the lines of each rank if they are not the same on all, else None. Collective."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return _unless_equal(int.from_bytes(digest[:7], "little"), lines, world)


def _unless_equal(number: int, mine: Any, world: World) -> list[Any] | None:
    """Return what each rank calls its own if their numbers are not all equal, else None. Collective."""
    numbers = gathered(torch.tensor([number]), world)
    if bool((numbers == numbers[0]).all()):
        return None
    everybody: list[Any] = [None] * world.world_size
    dist.all_gather_object(everybody, mine)
    return everybody


def _described(module: nn.Module) -> list[str]:
    """Return a line for each parameter and buffer."""
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    ]
    caches = {id(b) for b in _caches(module).values()}
    kept = [(name, b) for name, b in module.named_buffers() if id(b) not in caches]
    return [*lines, *(f"{name} {tuple(b.shape)} {b.dtype}" for name, b in kept)]


def _caches(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint keeps, by a line for each."""
    return {
        f"{prefix}.{name} {tuple(b.shape)} {b.dtype}": b
        for prefix, layer in module.named_modules()
        for name, b in layer._buffers.items()
        if b is not None and name in layer._non_persistent_buffers_set
    }


def _give_caches(module: nn.Module, world: World) -> None:
    """Put what the first rank that has it has cached where others have None. Collective: all ranks."""
    mine = {
        f"{prefix}.{name}": (layer, name)
        for prefix, layer in module.named_modules()
        for name in layer._buffers
        if name in layer._non_persistent_buffers_set
    }
    empty = {key for key, (layer, name) in mine.items() if layer._buffers[name] is None}
    everybody: list[Any] = [None] * world.world_size
    dist.all_gather_object(everybody, (set(mine), empty))
    lacked = set().union(*(lacks for _, lacks in everybody))
    givers = {
        key: next(
            (rank for rank, (names, lacks) in enumerate(everybody) if key in names and key not in lacks), None
        )
        for key in lacked
    }
    own = {key: mine[key] for key, rank in givers.items() if rank == world.rank}
    given: list[Any] = [None] * world.world_size
    dist.all_gather_object(
        given, {key: layer._buffers[name].detach().cpu().clone() for key, (layer, name) in own.items()}
    )
    for values in given:
        for key in values.keys() & empty:
            layer, name = mine[key]
            layer._buffers[name] = values[key].to(world.device)


def _different(everybody: Sequence[Sequence[str]]) -> ConfigError:
    rank = next(rank for rank, lines in enumerate(everybody) if lines != everybody[0])
    pairs = itertools.zip_longest(everybody[0], everybody[rank], fillvalue="nothing")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    return ConfigError(
        f"the ranks have built different models: rank 0 has {first} where rank {rank} has {other}. Their "
        "gradients cannot be added up. Build the model from the same options on every rank, and look for "
        "anything that depends on world.rank, or on a file that one of them does not see."
    )


def on_first(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn(*args)`` on rank 0 alone while the others wait; return its value on every rank.

    For what takes long and only one process should do: prepare data, validate, upload. In an
    ``if world.rank == 0`` block the other ranks get to their next collective, which fails after
    ``--timeout-s``; here they wait as long as it takes. Collective: every rank must call.

    Args:
        fn: what rank 0 runs; nothing in it may be collective.
        args: its arguments.

    Returns:
        What ``fn`` returned on rank 0; it must be something that pickle knows.

    Example:
        >>> on_first(sum, [1, 2, 3])
        6
    """
    world = current()
    if world.world_size == 1:
        return fn(*args)
    group = dist.new_group(backend="gloo", timeout=_VERY_LONG)
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    try:
        value = [fn(*args) if world.is_first else None]
        dist.broadcast_object_list(value, src=0, group=group, device=torch.device("cpu"))
        return value[0]
    finally:
        dist.destroy_process_group(group)
