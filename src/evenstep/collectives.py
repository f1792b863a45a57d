"""Sums over all lanes of all processes, with bits that do not depend on the number of processes.

Each process brings the sums of the subtrees it owns (tree.cover); together the processes add up the rest of
the tree. Three ways, all with the same bits:

* pair: two processes with one subtree each. A plain all-reduce adds a + b on both sides, and a + b = b + a.
* gather: every process gets all subtrees and folds them itself. One collective, the quickest for small sums.
* two-phase: process i gets chunk i of all subtrees (all-to-all), folds it, and an all-gather hands the chunks
  round. When the lanes divide evenly this moves what a ring all-reduce moves, ``2 n (W-1) / W`` values.

Sums are taken per element, so cutting values into chunks or DDP buckets cannot change a bit.

gloo waits for ever when a second collective is started inside ``future.then()`` of the first
(https://github.com/pytorch/pytorch/issues/48478), so stages are chained on one thread of our own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.tree import Node, cover, fold
from evenstep.world import World

# Sums smaller than this are gathered, larger ones go the two-phase way; the key is the world size. From this
# size on two-phase had the lower median at every size measured, in the lower of two runs of
# benchmarks/reduce.py: gloo over loopback, 2 cores. Bits do not depend on it.
GATHER_BELOW_BYTES = {3: 2 * 1024 * 1024, 4: 2 * 1024 * 1024, 8: 512 * 1024}


def gather_below_bytes(world_size: int) -> int:
    """Return below which size a sum is gathered: measured, or from the next smaller measured world size.

    Beyond the largest one, what a rank receives (size times processes) stays what it is there.
    """
    measured = max((n for n in GATHER_BELOW_BYTES if n <= world_size), default=min(GATHER_BELOW_BYTES))
    largest = max(GATHER_BELOW_BYTES)
    below = GATHER_BELOW_BYTES[measured]
    return below if world_size <= largest else below * largest // world_size


@dataclass(frozen=True)
class Exchange:
    """Who brings which subtrees.

    Attributes:
        rank: this process.
        lanes: lanes of the run.
        covers: the subtrees of each rank, in lane order.
        group: the process group; None for the default one.
    """

    rank: int
    lanes: int
    covers: tuple[tuple[Node, ...], ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, world: World, group: dist.ProcessGroup | None = None) -> Exchange:
        """Return the exchange of a world."""
        covers = tuple(cover(world.lanes_of(rank), world.lanes) for rank in range(world.world_size))
        return cls(world.rank, world.lanes, covers, group)

    @property
    def is_pair(self) -> bool:
        """Whether a plain all-reduce has the tree's bits: at most two processes with a subtree each."""
        return len(self.covers) <= 2 and all(len(nodes) == 1 for nodes in self.covers)


def _gather_into(out: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    # all_gather_into_tensor is deprecated where all_gather_single exists (torch 2.14).
    gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(out, part, group=group)


def _fold_rows(rows: Sequence[Tensor], exchange: Exchange) -> Tensor:
    """Fold rows that stand in the order of ranks and their subtrees; the rows' memory is used up."""
    nodes = [node for nodes in exchange.covers for node in nodes]
    return fold(dict(zip(nodes, rows, strict=True)), exchange.lanes, _add_into)


def _add_into(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def reduce_by_gather(nodes: Sequence[Tensor], exchange: Exchange) -> Tensor:
    """Return the whole tree's sum from a single all-gather. Collective: every rank must call.

    This is also the naive twin of ``reduce_two_phase``: everybody gets everything and adds it in order.

    Args:
        nodes: this rank's subtree sums, each of shape (n,), in the order of its cover.
        exchange: who brings what.

    Returns:
        Tensor of shape (n,), the same bits on every rank.
    """
    most = max(len(cover) for cover in exchange.covers)
    n = nodes[0].numel()
    mine = nodes[0].new_zeros(most, n)
    for row, node in enumerate(nodes):
        mine[row] = node
    everything = mine.new_empty(len(exchange.covers), most, n)
    _gather_into(everything.view(-1), mine.view(-1), exchange.group)
    return _fold_rows(
        [everything[r, row] for r, cover in enumerate(exchange.covers) for row in range(len(cover))], exchange
    )


def reduce_two_phase(nodes: Sequence[Tensor], exchange: Exchange, out: Tensor) -> None:
    """Write the whole tree's sum into ``out``. Collective: every rank must call.

    Args:
        nodes: this rank's subtree sums, each contiguous and of shape (n,), in the order of its cover. One of
            them may share its memory with ``out``.
        exchange: who brings what.
        out: tensor of shape (n,).
    """
    world_size, n = len(exchange.covers), out.numel()
    chunk = -(-n // world_size)
    bounds = [(min(n, r * chunk), min(n, (r + 1) * chunk)) for r in range(world_size)]
    sizes = [hi - lo for lo, hi in bounds]
    # The chunks of a single subtree already lie in the order of ranks.
    send = nodes[0] if len(nodes) == 1 else torch.cat([node[lo:hi] for lo, hi in bounds for node in nodes])
    own = sizes[exchange.rank]
    num_nodes = [len(cover) for cover in exchange.covers]
    received = send.new_empty(sum(num_nodes) * own)
    dist.all_to_all_single(
        received,
        send,
        output_split_sizes=[count * own for count in num_nodes],
        input_split_sizes=[size * len(nodes) for size in sizes],
        group=exchange.group,
    )
    folded = _fold_rows(received.view(-1, own).unbind(), exchange) if own else received
    if n % world_size == 0:
        _gather_into(out, folded, exchange.group)
        return
    padded = folded.new_zeros(chunk)
    padded[:own] = folded
    everything = folded.new_empty(chunk * world_size)
    _gather_into(everything, padded, exchange.group)
    out.copy_(everything[:n])


def reduce_nodes(nodes: Sequence[Tensor], exchange: Exchange, out: Tensor) -> None:
    """Write the whole tree's sum into ``out`` in the quickest way. Collective: every rank must call.

    Arguments as for ``reduce_two_phase``.
    """
    if exchange.is_pair:
        if out is not nodes[0]:
            out.copy_(nodes[0])
        if len(exchange.covers) == 2:
            dist.all_reduce(out, group=exchange.group)
    elif out.numel() * out.element_size() < gather_below_bytes(len(exchange.covers)):
        out.copy_(reduce_by_gather(nodes, exchange))
    else:
        reduce_two_phase(nodes, exchange, out)


class CommunicationThread:
    """One thread that runs collectives in the order in which they were handed in.

    All ranks must hand in the same collectives in the same order, and none may run outside this thread
    while some are pending.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Tensor], torch.futures.Future[Tensor]] | None] = (
            queue.SimpleQueue()
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="evenstep-communication", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Run ``job`` after those before it; the future gets its value or its exception."""
        devices: list[int | str | torch.device] | None = (
            [self._device] if self._device.type == "cuda" else None
        )
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """End the thread after the pending jobs, and wait for it."""
        self.end()
        self._thread.join(timeout=5)

    def end(self) -> None:
        """Let the thread end after the pending jobs; any thread may call."""
        self._jobs.put(None)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                if self.error is not None:  # after one failure the group's order is lost
                    raise self.error
                future.set_result(job())
            except Exception as error:  # handed to whoever waits for the future
                self.error = self.error or error
                future.set_exception(error)  # type: ignore[arg-type]
            del item, job, future  # they hold the gradients, and would while the thread waits
