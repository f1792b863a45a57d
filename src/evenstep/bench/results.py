"""The arithmetic of ``evenstep bench``, its table and its JSON. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.bench.plan import Row

BUSY = 0.25
"""Load of the machine, as a share of its cores, from which on the numbers are called unreliable."""


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """What one row came to.

    Attributes:
        row: the way to train.
        images_per_s: samples a second over all processes, for each round.
        samples: samples trained in a round, over all processes.
        loss: the loss of the last step, the mean over the processes.
        shares: the share of a step's time of each part, the mean over the processes; they add up to 1.
        matmul_flops_per_s: of matrix products, all processes of this row together, in the best round.
        convolution_flops_per_s: of convolutions, likewise.
    """

    row: Row
    images_per_s: tuple[float, ...]
    samples: int
    loss: float
    shares: Mapping[str, float]
    matmul_flops_per_s: float
    convolution_flops_per_s: float

    @property
    def median(self) -> float:
        """The median of the rounds, images a second."""
        return statistics.median(self.images_per_s)

    @property
    def spread(self) -> float:
        """The largest minus the smallest round, as a share of the median."""
        return (max(self.images_per_s) - min(self.images_per_s)) / self.median


@dataclass(frozen=True, kw_only=True)
class Report:
    """The comparison.

    Attributes:
        rows: the rows; the first is plain PyTorch on one process.
        steps: steps of each training, the dropped ones included.
        drop: how many of the first steps do not count.
        rounds: how often each row was trained.
        model: ``--model``.
        data: ``--data``.
        batch_size: samples in a global batch.
        precision: ``--precision``, or what auto stands for on this device.
        device: the device's name.
        flops_per_image: what the model needs for one sample, forward and backward; None if torch's counter
            knows none of its operations.
        cores: CPU cores that may be used.
        load: the load of the machine before the first training; None where it is not known.
        versions: of Python and the libraries.
    """

    rows: tuple[RowResult, ...]
    steps: int
    drop: int
    rounds: int
    model: str
    data: str
    batch_size: int
    precision: str
    device: str
    flops_per_image: float | None
    cores: int
    load: float | None
    versions: Mapping[str, str]

    @property
    def one(self) -> RowResult:
        """Plain PyTorch on one process."""
        return self.rows[0]

    @property
    def baseline(self) -> RowResult:
        """Plain DDP; with one process, plain PyTorch."""
        return next((r for r in self.rows if r.row.kind == "ddp"), self.one)

    def ratio(self, result: RowResult) -> float:
        """The row's speed as a multiple of the baseline's."""
        return result.median / self.baseline.median

    def efficiency(self, result: RowResult) -> float:
        """The row's speed as a share of what its processes would do at the speed of plain PyTorch on one."""
        return result.median / (self.one.median * result.row.units)

    def peak(self, result: RowResult) -> float:
        """The most operations a second that any row with as many processes and threads reached."""
        place = _place(result.row)
        return max(
            max(r.matmul_flops_per_s, r.convolution_flops_per_s) for r in self.rows if _place(r.row) == place
        )

    def bound(self, result: RowResult) -> float | None:
        """The images a second that the peak would allow if there were nothing but the model's arithmetic."""
        if not self.flops_per_image or result.row.kind == "data_parallel":  # its one process saw one GPU
            return None
        return self.peak(result) / self.flops_per_image

    @property
    def is_busy(self) -> bool:
        """Whether something else was running before the first training."""
        return self.load is not None and self.load > BUSY * self.cores

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON can hold."""
        names = ("model", "data", "batch_size", "precision", "device", "steps", "rounds")
        return {
            **{name: getattr(self, name) for name in names},
            "dropped_steps": self.drop,
            "baseline": self.baseline.row.name,
            "flops_per_image": self.flops_per_image,
            "cores": self.cores,
            "load_before": self.load,
            "versions": dict(self.versions),
            "rows": [self._row(result) for result in self.rows],
        }

    def _row(self, result: RowResult) -> dict[str, Any]:
        row, bound = result.row, self.bound(result)
        return {
            "name": row.name,
            "processes": row.processes,
            "threads": row.threads,
            "lanes": row.lanes if row.kind == "evenstep" else None,
            "mode": row.mode if row.kind == "evenstep" else None,
            "images_per_s": result.median,
            "images_per_s_of_rounds": list(result.images_per_s),
            "spread": result.spread,
            "ratio_to_baseline": self.ratio(result),
            "efficiency": self.efficiency(result),
            "shares": dict(result.shares),
            "samples": result.samples,
            "last_loss": result.loss,
            "matmul_flops_per_s": result.matmul_flops_per_s,
            "convolution_flops_per_s": result.convolution_flops_per_s,
            "bound_images_per_s": bound,
            "share_of_bound": None if bound is None else result.median / bound,
        }


def table(report: Report) -> str:
    """Return the comparison as aligned text."""
    against = "x DDP" if report.baseline.row.kind == "ddp" else "x plain"
    head = ["", "proc", "thr", "images/s", "spread", against, "effic.", "data", "fwd", "bwd", "wait", "other"]
    lines = [[*head, "bound", "of it"]]
    for result in report.rows:
        row, bound = result.row, report.bound(result)
        lines.append(
            [
                row.label,
                str(row.processes),
                str(row.threads),
                f"{result.median:.0f}",
                _percent(result.spread),
                f"{report.ratio(result):.2f}",
                _percent(report.efficiency(result)),
                *(_percent(share) for share in result.shares.values()),
                *(["-", "-"] if bound is None else [f"{bound:.0f}", _percent(result.median / bound)]),
            ]
        )
    return "\n".join([_about(report), "", *_aligned(lines), "", *_notes(report)])


def _about(report: Report) -> str:
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    return (
        f"{report.model} on {report.data}, batch size {report.batch_size}, {report.precision}, "
        f"{report.device}; {rounds} of {report.steps} steps, the first {report.drop} dropped"
    )


def _notes(report: Report) -> list[str]:
    notes = []
    if report.flops_per_image:
        notes.append(
            f"bound: {report.flops_per_image / 1e6:.1f} Mflop an image, and the measured peak of as many "
            "processes and threads"
        )
        for r in {_place(r.row): r for r in report.rows if report.bound(r) is not None}.values():
            notes.append(
                f"  {r.row.processes} x {r.row.threads} threads: {report.peak(r) / 1e9:.0f} Gflop/s, "
                f"so {report.bound(r):.0f} images/s at most"
            )
    else:
        notes.append("bound: none; torch's counter knows no operation of this model")
    if report.is_busy:
        notes.append(
            f"warning: before the first training the load was {report.load:.1f} on {report.cores} cores. "
            "Something else is running, so do not trust these numbers."
        )
    return notes


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, wide, strict=True))
        ).rstrip()
        for line in lines
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _place(row: Row) -> tuple[int, int]:
    return row.processes, row.threads
