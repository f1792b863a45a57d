"""Run the rows of ``evenstep bench`` in turn, round after round, and put together what they measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from evenstep import world as worlds
from evenstep.bench.measure import PARTS, Measured, Task, measure
from evenstep.bench.plan import Row
from evenstep.bench.results import Report, RowResult
from evenstep.config import TrainConfig
from evenstep.errors import EvenstepError
from evenstep.launcher import launch
from evenstep.precision import warning_of


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is to be compared.

    Attributes:
        rows: the ways to train.
        config: the training, the same for all.
        options: further options of ``launch``.
        steps: steps of each training, the first ones included.
        drop: how many of the first steps do not count.
        rounds: how often each row is trained.
        gpus: the GPUs of DataParallel.
        peak_s: seconds to measure each peak for.
        tell: is given a line before each training.
    """

    rows: Sequence[Row]
    config: TrainConfig
    options: Mapping[str, Any]
    steps: int
    drop: int
    rounds: int
    gpus: tuple[int, ...] = ()
    peak_s: float = 0.3
    tell: Callable[[str], None] = lambda text: None


def run(bench: Bench) -> Report:
    """Train every row once a round and return the comparison.

    Every second round goes backwards through the rows, so that a machine that gets slower or faster on the
    way favours none. The last round also has the steps in which each part is timed.

    Raises:
        EvenstepError: two rows did not train the same samples; or what ``launch`` raises.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    # A TrainState says it, too, but torch's own loops come first. To ask a GPU would take some of its memory.
    slow = None if bench.gpus else warning_of(bench.config.model.precision, "cpu")
    if slow is not None:
        bench.tell(slow)
    found: dict[str, list[list[Measured]]] = {row.name: [] for row in bench.rows}
    for number in range(bench.rounds):
        for row in bench.rows if number % 2 == 0 else reversed(bench.rows):
            bench.tell(f"round {number + 1} of {bench.rounds}: {row.label}, {row.processes} x {row.threads}")
            task = Task(
                row=row,
                steps=bench.steps,
                drop=bench.drop,
                profile=number == bench.rounds - 1,
                gpus=bench.gpus,
                peak_s=bench.peak_s,
            )
            # A launch with all_values gives the list of what each rank measured.
            found[row.name].append(launch(measure, bench.config, task, **_launch_options(bench, row)))
    check_same_samples(bench.rows, found)
    return _report(bench, found, load)


def check_same_samples(rows: Sequence[Row], found: Mapping[str, Sequence[Sequence[Measured]]]) -> None:
    """Raise EvenstepError unless all rows trained the same samples in all rounds.

    Of a stream only the number is compared: its lanes may read parts of their own.

    Args:
        rows: the rows.
        found: for each row, for each round, what each rank measured.
    """
    totals = {
        (f"{row.label}, {row.processes} x {row.threads}", number): (
            sum(m.samples for m in ranks),
            _digest_of(ranks),
        )
        for row in rows
        for number, ranks in enumerate(found[row.name])
    }
    (first_label, _), first = next(iter(totals.items()))
    for (label, number), total in totals.items():
        if total != first:
            what = f"{total[0]}" if total[0] != first[0] else "other"
            raise EvenstepError(
                f"bench: in round {number + 1} {label}, trained {what} samples, and {first_label} trained "
                f"{first[0]}: their speeds cannot be compared. If --data is your own, let its length and its "
                "items depend on the index alone; if it is not, please report this."
            )


def _digest_of(ranks: Sequence[Measured]) -> int | None:
    digests = [m.digest for m in ranks if m.digest is not None]
    return sum(digests) % (1 << 64) if len(digests) == len(ranks) else None


def _launch_options(bench: Bench, row: Row) -> dict[str, Any]:
    return {
        **bench.options,
        "nproc": row.processes,
        "lanes": row.lanes,
        "threads": row.threads,
        "mode": row.mode,
        # A row whose worker dies has no speed. What a step does for recovery does not depend on this: each
        # committed step is noted in shared memory, with the record of its batch, as in evenstep train.
        "max_restarts": 0,
        "all_values": True,
    }


def _report(bench: Bench, found: Mapping[str, list[list[Measured]]], load: float | None) -> Report:
    config = bench.config
    one = found[bench.rows[0].name][-1][0]
    return Report(
        rows=tuple(_row_result(row, found[row.name]) for row in bench.rows),
        steps=bench.steps,
        drop=bench.drop,
        rounds=bench.rounds,
        model=config.model.model,
        data=config.data.data,
        batch_size=config.optim.batch_size,
        precision=one.precision,
        device=one.device,
        flops_per_image=one.flops_per_image,
        cores=worlds.num_cores(),
        load=load,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("evenstep", "torch", "numpy")},
        },
    )


def _row_result(row: Row, rounds: Sequence[Sequence[Measured]]) -> RowResult:
    last = rounds[-1]
    shares = []
    for measured in last:
        total = sum((measured.parts or {}).values())
        if measured.parts is not None and total:
            shares.append({part: measured.parts[part] / total for part in PARTS})
    return RowResult(
        row=row,
        images_per_s=tuple(ranks[0].images / max(m.wall_s for m in ranks) for ranks in rounds),
        samples=sum(m.samples for m in last),
        loss=sum(m.loss for m in last) / len(last),
        shares={part: sum(s[part] for s in shares) / len(shares) for part in PARTS} if shares else {},
        matmul_flops_per_s=max(sum(m.peak.matmul for m in ranks) for ranks in rounds),
        convolution_flops_per_s=max(sum(m.peak.convolution for m in ranks) for ranks in rounds),
    )
