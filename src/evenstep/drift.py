"""The drift alarm: do all processes still hold the same weights?

Every process makes each step's update by itself, from a gradient that is the same everywhere, so the
weights stay the same. A flipped bit in a memory, a kernel that is not deterministic, or a line of the user's
loop that changes the model on one rank breaks that, and nothing would tell: the losses stay plausible, and
the checkpoint is whatever rank 0 holds.

So now and then every process makes one 64-bit number of each parameter and buffer, and the numbers are
compared. The sums are over whole numbers, so their order does not matter, and every position has a factor of
its own, so two values that changed places are noticed.

Cost, measured on two processes of one CPU thread each (benchmarks/drift.py): one check takes 1.0% of the time
of one step of net (157,578 parameters, 128 images), and 5% of that of a model of 10 million parameters that
has little else to compute. So a check every 100 steps, the default, costs 0.01% and 0.05%.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.errors import DriftError
from evenstep.heartbeat import Activity, now
from evenstep.world import World

_ROW = 1024
_LEVELS = 4
_WORD_BYTES = 8


def factors(device: torch.device) -> Tensor:
    """Return the factors of the positions: odd numbers, int64, one row for each level of folding."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (_LEVELS, _ROW), generator=generator)
    return (numbers * 2 + 1).to(device)


def checksum(tensor: Tensor, position_factors: Tensor) -> Tensor:
    """Return a 64-bit number made of the bits of a tensor: a 0-dimensional int64 tensor on its device.

    It changes with every changed value, and (but for a chance of about 2**-50) with every two values that
    change places.

    Args:
        tensor: of any shape and dtype.
        position_factors: what ``factors`` returns.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // _WORD_BYTES * _WORD_BYTES
    words = octets[:whole].view(torch.int64)
    if whole < octets.numel():
        last = octets.new_zeros(_WORD_BYTES)
        last[: octets.numel() - whole] = octets[whole:]
        words = torch.cat([words, last.view(torch.int64)])
    for row in position_factors:
        words = _fold(words, row)
        if words.numel() <= 1:
            break
    return words.sum()


def _fold(words: Tensor, row: Tensor) -> Tensor:
    """Return one word for each row of 1,024 words: the sum of the words times the factors, modulo 2**64."""
    rows, rest = divmod(words.numel(), _ROW)
    table = words[: rows * _ROW].view(rows, _ROW)
    # On a CPU in one pass that stores nothing in between; GPUs have no matrix product of whole numbers.
    sums = torch.mv(table, row) if words.device.type == "cpu" else (table * row).sum(1)
    if rest:
        sums = torch.cat([sums, (words[rows * _ROW :] * row[:rest]).sum().view(1)])
    return sums


def check_drift(model: nn.Module, step: int, world: World) -> None:
    """Compare the parameters and buffers of all processes. Collective: every rank must call, between steps.

    Args:
        model: the model itself, not DDP.
        step: committed steps, for the message.
        world: the world; with one process there is nothing to compare.

    Raises:
        DriftError: they differ. Raised on every rank; names the first tensor and the ranks.
    """
    tensors = model.state_dict()
    if world.world_size == 1 or not tensors:
        return
    row_factors = {device: factors(device) for device in {tensor.device for tensor in tensors.values()}}
    sums = [checksum(tensor, row_factors[tensor.device]).to(world.device) for tensor in tensors.values()]
    mine = torch.stack(sums)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    now(world, Activity.CHECK)
    dist.all_gather(rows, mine)
    table = torch.stack(rows)
    now(world, Activity.USER)
    if bool((table == table[0]).all()):
        return
    raise _drifted(list(tensors), table.tolist(), step)


def _drifted(names: Sequence[str], table: list[list[int]], step: int) -> DriftError:
    """Return the error: the ranks that are not with the majority, and the tensors in which they differ."""
    columns = list(zip(*table, strict=True))
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    first = columns[differing[0]]
    # Ties go to the value of the lower rank, because most_common keeps the order of appearance.
    usual = Counter(first).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(first) if value != usual]
    others = [rank for rank, value in enumerate(first) if value == usual]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return DriftError(
        f"after step {step}, {names[differing[0]]}{more} on {_ranks(odd)} differs from {_ranks(others)}; "
        "the weights must have the same bits on all ranks. From here on the gradients are of different "
        "models, so the run stops before the next checkpoint; the last one may be older than the fault. "
        "`evenstep verify` finds the cause if it is in the code; if it finds none, suspect the memory or "
        "the GPU of that rank. Go on from the last checkpoint with --resume; --check-every 0 turns this off."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
