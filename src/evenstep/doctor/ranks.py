"""What ``evenstep doctor`` checks between processes: versions, clocks, and the speed of every link."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evenstep.doctor.machine import Check
from evenstep.world import World

LINK_BYTES = 4 * 2**20
SLOW_SHARE = 1 / 3
"""A link is slow if it has less than this share of the median link's bandwidth."""
SKEW_S = 0.5
ROUNDS = 5


@dataclass(frozen=True)
class Link:
    """The all-reduce bandwidth between two ranks, in bytes a second."""

    first: int
    second: int
    bytes_per_s: float


def gather(world: World, value: Any) -> list[Any]:
    """Return every rank's value, by rank. Collective: every rank must call."""
    values: list[Any] = [value]
    if world.world_size > 1:
        values = [None] * world.world_size
        dist.all_gather_object(values, value)
    return values


def measure_links(world: World, num_bytes: int = LINK_BYTES, repeats: int = 3) -> list[Link]:
    """Time an all-reduce between every pair of ranks, one pair after the other. Collective.

    Args:
        world: this process.
        num_bytes: size of the tensor.
        repeats: how often; the fastest counts, since others may use the machine.

    Returns:
        All pairs, on every rank.
    """
    tensor = torch.zeros(num_bytes // 4, device=world.device)
    found: list[Link] = []
    for first, second in itertools.combinations(range(world.world_size), 2):
        group = dist.new_group([first, second])
        if world.rank in (first, second):
            times = [_timed_s(tensor, group) for _ in range(repeats + 1)][1:]
            if world.rank == first:
                found.append(Link(first, second, num_bytes / min(times)))
            dist.destroy_process_group(group)
        dist.barrier()
    return [link for part in gather(world, found) for link in part]


def _timed_s(tensor: torch.Tensor, group: Any) -> float:
    begun = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begun


def clock_offsets(world: World, clock: Callable[[], float] = time.time) -> list[float]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds. Collective.

    Rank 0 asks each rank for the time and takes the middle of question and answer; of some rounds, the
    fastest one (Cristian's algorithm), so the error is below half of that round's time.
    """
    here = torch.zeros(1, dtype=torch.float64, device=world.device)
    offsets = [0.0] * world.world_size
    for rank in range(1, world.world_size):
        if world.rank == 0:
            rounds = []
            for _ in range(ROUNDS):
                asked = clock()
                dist.send(here, rank)
                dist.recv(here, rank)
                answered = clock()
                rounds.append((answered - asked, float(here) - (asked + answered) / 2))
            offsets[rank] = min(rounds)[1]
        elif world.rank == rank:
            for _ in range(ROUNDS):
                dist.recv(here, 0)
                dist.send(here.fill_(clock()), 0)
    every: list[list[float]] = gather(world, offsets)
    return every[0]


def check_versions(found: Sequence[Mapping[str, str]]) -> Check:
    """Whether all ranks have the same versions.

    Args:
        found: ``{name: version}`` of every rank, by rank.
    """
    differ = {
        name: {rank: versions.get(name, "missing") for rank, versions in enumerate(found)}
        for name in found[0]
        if len({versions.get(name, "missing") for versions in found}) > 1
    }
    if not differ:
        count = f"all {len(found)} processes" if len(found) > 1 else "one process"
        return Check("versions", "green", f"{count}: torch {found[0]['torch']}")
    texts = []
    for name, by_rank in differ.items():
        ranks = {
            version: [r for r, v in by_rank.items() if v == version]
            for version in sorted(set(by_rank.values()))
        }
        texts.append(f"{name} " + ", ".join(f"{v} on rank {_list(r)}" for v, r in ranks.items()))
    serious = {"torch", "python", "evenstep"} & differ.keys()
    fix = "Install the same on every machine: pip install " + " ".join(
        f"{name}=={found[0][name]}" for name in differ if name != "python"
    )
    if "python" in differ:
        fix = (
            f"Use the same Python on every machine. {fix}"
            if len(differ) > 1
            else "Use the same Python on all."
        )
    why = " Other versions give other bits, and may not understand each other."
    return Check("versions", "red" if serious else "yellow", "; ".join(texts), fix + why)


def check_clocks(offsets: Sequence[float], num_nodes: int) -> Check:
    """Whether the machines' clocks agree.

    Args:
        offsets: of every rank's clock, in seconds.
        num_nodes: machines.
    """
    if num_nodes == 1:
        return Check("clocks", "green", "not checked: one machine has one clock")
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    found = f"rank {worst} is {offsets[worst]:+.3f} s from rank 0" if worst else "all as rank 0's"
    if abs(offsets[worst]) > SKEW_S:
        fix = (
            "Switch on time synchronisation (timedatectl set-ntp true): reports order failures by the clock."
        )
        return Check("clocks", "yellow", found, fix)
    return Check("clocks", "green", found)


def check_links(links: Sequence[Link]) -> Check:
    """Which link is the slowest, and whether it holds the others up."""
    if not links:
        return Check("links", "green", "not measured: one process has none")
    slowest = min(links, key=lambda link: link.bytes_per_s)
    median = statistics.median(link.bytes_per_s for link in links)
    pairs = f"{len(links)} pairs" if len(links) > 1 else "one pair"
    found = (
        f"all-reduce of {LINK_BYTES // 2**20} MiB over {pairs}: median {median / 1e9:.2f} GB/s, "
        f"slowest {slowest.bytes_per_s / 1e9:.2f} GB/s between ranks {slowest.first} and {slowest.second}"
    )
    if slowest.bytes_per_s < SLOW_SHARE * median:
        fix = (
            "Every step waits for this link. Look at what else uses the cores or GPUs of ranks "
            f"{slowest.first} and {slowest.second} (top, nvidia-smi topo -m), and at their network."
        )
        return Check("links", "yellow", found, fix)
    return Check("links", "green", found)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
