"""What ``evenstep bench`` compares: one row for each way to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "data_parallel", "ddp", "evenstep"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train the same model on the same samples.

    Attributes:
        name: the row's name in the JSON.
        label: what the table calls it.
        kind: which loop trains: torch's own ones, or evenstep's step.
        processes: processes.
        threads: CPU threads of each process.
        lanes: lanes; torch's own loops have one for each process.
        mode: ``exact`` or ``fast``; torch's own loops may use the kernels of fast.
        units: how many times the hardware of the first row it uses: processes, GPUs or groups of threads.
    """

    name: str
    label: str
    kind: Kind
    processes: int
    threads: int
    lanes: int
    mode: Literal["exact", "fast"]
    units: int


def rows(nproc: int, threads: int, lanes: int | None, num_gpus: int) -> tuple[Row, ...]:
    """Return the rows for a machine.

    Args:
        nproc: the number of processes to compare with one.
        threads: CPU threads of each process.
        lanes: lanes of evenstep's rows; None: one for each process.
        num_gpus: GPUs that the run may use; 0 on the CPU.
    """

    def row(name: str, label: str, kind: Kind, processes: int, units: int, wide: int = 1) -> Row:
        own_lanes = processes if kind != "evenstep" else lanes or processes
        return Row(
            name=name,
            label=label,
            kind=kind,
            processes=processes,
            threads=threads * wide,
            lanes=own_lanes,
            mode="exact" if name.startswith("exact") else "fast",
            units=units,
        )

    found = [row("plain", "plain PyTorch", "plain", 1, 1)]
    if nproc > 1 and not num_gpus:
        found.append(row("plain_all_threads", "plain PyTorch, all threads", "plain", 1, nproc, nproc))
    if num_gpus >= 2:
        used = min(nproc, num_gpus)
        if used >= 2:
            found.append(row("data_parallel", "DataParallel", "data_parallel", 1, used))
    found.append(row("exact_1", "evenstep exact", "evenstep", 1, 1))
    if nproc > 1:
        found += [
            row("ddp", "plain DDP", "ddp", nproc, nproc),
            row("exact", "evenstep exact", "evenstep", nproc, nproc),
        ]
    found.append(row("fast", "evenstep fast", "evenstep", nproc, nproc))
    return tuple(found)
