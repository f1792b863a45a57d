"""``evenstep verify``: does this training have the same bits on any number of processes, and if not, why?

The same few steps are run on several numbers of processes, and in fresh interpreters under other hash seeds,
with the same lanes. After every step each rank notes digests of all tensors of its state, of the loss, of the
sample ids and of the data of its lanes (recording.py). The first difference is found by comparing these; then
the two runs are done again up to that step to measure it, and a third time to find the cause (probes.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.errors import ConfigError, WorkerError
from evenstep.launcher import launch
from evenstep.verify.diagnosis import Cause, Evidence, diagnose
from evenstep.verify.fresh import Call, run_fresh
from evenstep.verify.plain import varying_advice
from evenstep.verify.probes import Finding, first_unequal, probe_job
from evenstep.verify.recording import (
    Difference,
    Keep,
    Main,
    Recording,
    first_difference,
    merged,
    record_job,
    tensor_digest,
    ulps_between,
)
from evenstep.world import default_threads

EXIT_CODE = 6
"""Of the command, if not all runs are the same."""
_SECOND_SEEDS = (3, 4)
_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of the table.

    Attributes:
        world_size: its processes.
        steps: the steps that were compared.
        result: ``reference``, ``same``, ``differs``, ``refused`` (torch has no deterministic kernel for an
            operator), or ``within tolerance`` and ``outside tolerance`` for the plain loop.
        hash_seed: PYTHONHASHSEED of a fresh interpreter; None for workers of the fork server.
        difference: the first one.
        ranks: the two ranks of this run that differ from each other; None if all its ranks are the same.
        ulps: the largest difference of the first tensor in units in the last place; None if unknown.
        largest: the largest relative difference of the loss from the plain loop's.
        cause: the likely cause.
    """

    world_size: int
    steps: int
    result: str
    hash_seed: int | None = None
    difference: Difference | None = None
    ranks: tuple[int, int] | None = None
    ulps: int | None = None
    largest: float | None = None
    cause: Cause | None = None

    @property
    def is_good(self) -> bool:
        """Whether there is nothing to find a cause for."""
        return self.result in ("reference", "same", "within tolerance")

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        found = self.difference
        return {
            "world_size": self.world_size,
            "hash_seed": self.hash_seed,
            "steps": self.steps,
            "result": self.result,
            "step": None if found is None else found.step,
            "kind": None if found is None else found.kind,
            "tensor": None if found is None or not found.tensors else found.tensors[0],
            "tensors": 0 if found is None else len(found.tensors),
            "ulps": self.ulps,
            "ranks": self.ranks,
            "loss_difference": self.largest,
            "cause": None if self.cause is None else dataclasses.asdict(self.cause),
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """What verify found: one row a run."""

    lanes: int
    rows: tuple[Row, ...]

    @property
    def is_same(self) -> bool:
        """Whether all runs are the same."""
        return all(row.is_good for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"same": self.is_same, "lanes": self.lanes, "rows": [row.as_dict() for row in self.rows]}


@dataclass(kw_only=True)
class Verification:
    """The runs of one verification, and those that measure and explain a difference.

    Attributes:
        main: the user's main, called as ``main(world, *args)`` in each process.
        args: its further arguments.
        world_sizes: numbers of processes; the first is the reference.
        lanes: lanes of all runs; by default the largest number of processes.
        steps: steps to compare.
        hash_seeds: hash seeds of runs in fresh interpreters; empty for none.
        tolerance: largest relative difference of the loss from the plain loop's; None leaves that run out.
        options: further options of :func:`evenstep.launcher.launch`, the same for all runs.
        tell: is told what is about to be run.
    """

    main: Main
    args: tuple[Any, ...] = ()
    world_sizes: Sequence[int] = (1, 2)
    lanes: int | None = None
    steps: int = 5
    hash_seeds: Sequence[int] = (1, 2)
    tolerance: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.lanes = self.lanes or max(self.world_sizes)
        # The same number of threads in every run, the plain loop's with its one lane included.
        threads = self.options.get("threads") or default_threads(self.lanes)
        self._options = {**self.options, "lanes": self.lanes, "threads": threads}
        self._fresh: dict[int, Recording] = {}
        self._again: dict[Any, list[Recording]] = {}
        self._repetitions: dict[int, list[Any]] = {}

    def run(self) -> Report:
        """Run everything and return the table.

        Raises:
            ConfigError: main makes no step.
            WorkerError: main fails.
        """
        assert self.lanes is not None
        rows: list[Row] = []
        reference: list[Recording] = []
        for n in self.world_sizes:
            self.tell(f"{_processes(n)}, {self.lanes} lanes, {self.steps} steps")
            try:
                ranks = self._record(n)
            except WorkerError as error:
                return Report(lanes=self.lanes, rows=(*rows, self._refused(n, error)))
            if not ranks[0].steps:
                raise ConfigError(
                    "verify: main ended without one call of evenstep.train_step, so there is nothing to "
                    "compare. Do the steps with train_step, and give as many --steps as there are."
                )
            reference = reference or ranks
            rows.append(self._compared(reference, ranks))
        if all(row.is_good for row in rows) and self.hash_seeds:
            rows += self._fresh_rows(reference)
        if self.tolerance is not None:
            rows.append(self._plain_row(merged(reference)))
        return Report(lanes=self.lanes, rows=tuple(rows))

    def _record(self, nproc: int, keep: Keep | None = None) -> list[Recording]:
        steps = self.steps if keep is None else keep.step + 1
        found: list[Recording] = launch(
            record_job,
            self.main,
            self.args,
            steps,
            keep,
            False,
            **self._options,
            nproc=nproc,
            all_values=True,
        )
        return found

    def _refused(self, world_size: int, error: WorkerError) -> Row:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise error
        cause = Cause(
            "no_deterministic_kernel",
            f"torch has no deterministic kernel for the operator {refused[1]}, and exact mode uses no other",
            f"Replace {refused[1]} by other operators, or train with --mode fast, whose bits differ from run "
            "to run.\n" + str(error),
        )
        return Row(world_size=world_size, steps=0, result="refused", cause=cause)

    def _compared(self, reference: list[Recording], ranks: list[Recording]) -> Row:
        """Return the row of a run: its ranks among each other, then against the reference."""
        n, steps = len(ranks), len(ranks[0].steps)
        inside = [(first_difference(ranks[0], other, lanes=False), other.rank) for other in ranks[1:]]
        found = [(d.step, 0, d, rank) for d, rank in inside if d is not None]
        if ranks is not reference:
            against = first_difference(merged(reference), merged(ranks))
            if against is not None:
                found.append((against.step, 1, against, 0))
        if not found:
            return Row(world_size=n, steps=steps, result="reference" if ranks is reference else "same")
        step, _, difference, rank = min(found, key=lambda entry: entry[:2])
        pair = (0, rank) if rank else None
        ulps, repeats = self._measured(reference, ranks, difference, rank)
        self.tell(f"{_processes(n)}: differs at step {step}; looking for the cause")
        findings, _ = self._probed(n, step)
        evidence = Evidence(
            difference, findings, self._mode, between_ranks=pair is not None, is_repeatable=repeats
        )
        return Row(
            world_size=n,
            steps=steps,
            result="differs",
            difference=difference,
            ranks=pair,
            ulps=ulps,
            cause=diagnose(evidence),
        )

    def _measured(
        self, reference: list[Recording], ranks: list[Recording], difference: Difference, rank: int
    ) -> tuple[int | None, bool | None]:
        """Run a pair again up to the difference; return its size, and whether the second repeats itself."""
        keep = difference.keep
        if keep is None:
            return None, None
        again = self._repeated(len(ranks), keep)
        one = again[0] if rank else self._repeated(len(reference), keep)[0]
        other = again[rank]
        record = ranks[rank].steps[keep.step - ranks[rank].steps[0].step]
        before = (record.before if keep.is_before else record.after).get(keep.name)
        repeats = other.kept is not None and tensor_digest(other.kept) == before
        return ulps_between(one.kept, other.kept), repeats

    def _repeated(self, nproc: int, keep: Keep) -> list[Recording]:
        if (nproc, keep) not in self._again:
            self._again[nproc, keep] = self._record(nproc, keep)
        return self._again[nproc, keep]

    def _probed(self, nproc: int, step: int) -> tuple[list[Finding], Any]:
        found: list[tuple[list[Finding], Any]] = launch(
            probe_job, self.main, self.args, step, **self._options, nproc=nproc, all_values=True
        )
        return [finding for findings, _ in found for finding in findings], found[0][1]

    def _fresh_rows(self, ranks: list[Recording]) -> list[Row]:
        self.tell(f"fresh interpreters with the hash seeds {', '.join(map(str, self.hash_seeds))}")
        reference = merged(ranks)
        self._run_fresh(self.hash_seeds)
        differences = {seed: first_difference(reference, self._fresh[seed]) for seed in self.hash_seeds}
        step = min((d.step for d in differences.values() if d is not None), default=None)
        if step is not None:
            self.tell(f"fresh interpreters: differ at step {step}; looking for the cause")
            self._fresh_again(differences, step)
        return [self._fresh_row(len(ranks), seed, differences[seed]) for seed in self.hash_seeds]

    def _run_fresh(self, seeds: Sequence[int]) -> None:
        job: Call = (record_job, (self.main, self.args, self.steps, None, False))
        values = run_fresh({seed: [job] for seed in seeds}, self._options)
        self._fresh.update({seed: value for seed, (value,) in values.items()})

    def _fresh_again(self, differences: dict[int, Difference | None], step: int) -> None:
        """Run them again, to see whether they repeat themselves, to measure, and to find the place."""
        calls: dict[int, Sequence[Call]] = {
            seed: [
                (record_job, (self.main, self.args, self.steps, found.keep if found else None, False)),
                (probe_job, (self.main, self.args, step)),
            ]
            for seed, found in differences.items()
        }
        self._repetitions = run_fresh(calls, self._options)

    def _fresh_row(self, nproc: int, seed: int, difference: Difference | None) -> Row:
        mine = self._fresh[seed]
        row = Row(world_size=1, hash_seed=seed, steps=len(mine.steps), result="same")
        if difference is None:
            return row
        again, (findings, _) = self._repetitions[seed]
        ulps = None
        if difference.keep is not None:
            ulps = ulps_between(self._repeated(nproc, difference.keep)[0].kept, again.kept)
        repeats = first_difference(mine, again) is None
        evidence = Evidence(
            difference,
            findings,
            self._mode,
            is_repeatable=repeats,
            by_hash_seed=self._by_hash_seed(seed) if repeats else None,
        )
        return dataclasses.replace(
            row, result="differs", difference=difference, ulps=ulps, cause=diagnose(evidence)
        )

    def _by_hash_seed(self, seed: int) -> str | None:
        """Return where fresh interpreters that differ in the hash seed alone begin to differ, if they do."""
        for is_second_try in (False, True):
            if is_second_try and not self._fresh.keys() & set(_SECOND_SEEDS):
                # Two orders of a small set may be the same by chance.
                self._run_fresh(_SECOND_SEEDS)
            for other, recording in self._fresh.items():
                difference = first_difference(self._fresh[seed], recording)
                if difference is not None:
                    return self._place(difference, seed, other)
        return None

    def _place(self, difference: Difference, one: int, other: int) -> str:
        if difference.kind == "start":
            return f"the initial state ({difference.tensors[0]})"
        if difference.kind in ("data", "samples"):
            return f"the {difference.kind} of step {difference.step}"
        passes = [self._repetitions[seed][1][1] for seed in (one, other) if seed in self._repetitions]
        if len(passes) < 2 or None in passes:
            return f"step {difference.step}"
        outputs = first_unequal([p.outputs for p in passes])
        if outputs is not None:
            return f"the output of {outputs}"
        gradients = first_unequal([tuple(reversed(p.gradients)) for p in passes])
        return f"the gradient of {gradients}" if gradients else "the loss function or the update"

    def _plain_row(self, reference: Recording) -> Row:
        assert self.tolerance is not None
        self.tell("plain PyTorch, 1 process")
        options = {**self._options, "lanes": 1, "nproc": 1}
        plain: Recording = launch(record_job, self.main, self.args, self.steps, None, True, **options)
        pairs = [
            (record.step, float.fromhex(record.loss), loss)
            for record, loss in zip(reference.steps, plain.plain_losses, strict=False)
        ]
        sizes = [(step, abs(a - b) / (max(abs(a), abs(b)) or 1.0)) for step, a, b in pairs]
        largest = max(size for _, size in sizes)
        row = Row(world_size=1, steps=len(pairs), result="within tolerance", largest=largest)
        outside = [step for step, size in sizes if not size <= self.tolerance]
        if not outside:
            return row
        return dataclasses.replace(
            row,
            result="outside tolerance",
            difference=Difference(outside[0], "loss"),
            cause=Cause("plain", *varying_advice(plain.varies_by_lane)),
        )

    @property
    def _mode(self) -> str:
        return str(self.options.get("mode", "exact"))


def table(report: Report) -> str:
    """Return the report as a table for people, with the causes under it."""
    rows = [("world size", "steps", "result")]
    causes: list[Cause] = []
    for row in report.rows:
        if row.cause is not None and row.cause not in causes:
            causes.append(row.cause)
        number = f" ({causes.index(row.cause) + 1})" if row.cause is not None else ""
        rows.append((_label(row), str(row.steps), _result(row) + number))
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c}".rstrip() for a, b, c in rows]
    for count, cause in enumerate(causes, start=1):
        lines += ["", f"({count}) likely cause: {cause.text}.", f"    What to do: {cause.advice}"]
    return "\n".join(lines)


def _label(row: Row) -> str:
    if row.largest is not None:
        return "plain PyTorch"
    return str(row.world_size) + ("" if row.hash_seed is None else f", hash seed {row.hash_seed}")


def _result(row: Row) -> str:
    found = row.difference
    if row.largest is not None:
        text = f"{row.result}, loss differs by {row.largest:.1e} at most"
        return text + (f", first at step {found.step}" if found is not None else "")
    if found is None:
        return row.result
    what = found.tensors[0] if found.tensors else found.kind + (f" ({found.detail})" if found.detail else "")
    more = f" and {len(found.tensors) - 1} more" if len(found.tensors) > 1 else ""
    size = "" if row.ulps is None else f", {row.ulps:,} ulps"
    ranks = "" if row.ranks is None else f", ranks {row.ranks[0]} and {row.ranks[1]} differ"
    return f"differs at step {found.step}: {what}{more}{size}{ranks}"


def _processes(n: int) -> str:
    return f"{n} process{'es' if n > 1 else ''}"
