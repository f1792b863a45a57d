"""From a difference and what the probes found to a likely cause, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.verify.probes import Finding
from evenstep.verify.recording import Difference


@dataclass(frozen=True)
class Cause:
    """Why two runs differ.

    Attributes:
        name: a word that scripts can rely on.
        text: one sentence for people.
        advice: what to do.
    """

    name: str
    text: str
    advice: str


@dataclass(frozen=True)
class Evidence:
    """What is known about one difference.

    Attributes:
        difference: where two runs, or two ranks of one, begin to differ.
        findings: what the probes found.
        mode: exact or fast.
        between_ranks: whether two ranks of one world differ.
        is_repeatable: whether the same run, done again, had the same bits; None if unknown.
        by_hash_seed: where fresh interpreters that differ in nothing but the hash seed begin to differ;
            None if they do not, or were not tried.
    """

    difference: Difference
    findings: Sequence[Finding]
    mode: str = "exact"
    between_ranks: bool = False
    is_repeatable: bool | None = None
    by_hash_seed: str | None = None


_SEED = (
    "Seed it from evenstep's: draw from python's, numpy's or torch's global generator, which evenstep seeds."
)
_OPERATOR = (
    "Replace the operator, or do it in a fixed order on one thread; keep --mode exact, in which torch "
    "refuses the operators that it knows to be non-deterministic."
)
_TEXTS = {
    "generator": (
        "random numbers come from a generator that evenstep does not seed: {where}",
        "Drop the generator and draw from torch's global one: evenstep seeds it for each step and lane, and "
        "for each sample of a dataset.",
    ),
    "hidden_state": (
        "state is kept in the plain attribute {where}, which changes with every use and is a process's own",
        "Keep no state there. Register it as a buffer (register_buffer), which evenstep stages for each lane "
        "and saves; in a dataset, make the sample depend on its index alone.",
    ),
    "clock": ("the clock is read (time.time() or alike) in {where}", "Use no time in what is computed."),
    "entropy": (
        "the system's entropy is used (os.urandom, random.SystemRandom, secrets, numpy's default_rng() "
        "without a seed) in {where}",
        _SEED,
    ),
    "repeat": (
        "a non-deterministic operator: run twice with the same input, weights and seed, the output of "
        "{where} has other bits",
        _OPERATOR,
    ),
    "backward": (
        "a non-deterministic operator in backward: run twice with the same input, weights and seed, the "
        "gradient of {where} has other bits",
        _OPERATOR,
    ),
    "rank": (
        "something depends on the rank or the process: given the same input, weights and seed, {where} has "
        "other bits on another rank",
        "Use no rank, process number or host name in what is computed; evenstep gives each rank its samples.",
    ),
    "reread": (
        "the same sample read twice differs ({where}): __getitem__ depends on the date, on a random "
        "generator that evenstep does not seed, or on what was read before",
        "Make a sample depend on its index alone. " + _SEED,
    ),
    "worker": (
        "the data depend on the DataLoader worker that reads them, or on what it read before ({where})",
        "Use no worker number in the dataset; try --workers 0.",
    ),
}
# The order of cause and effect: a generator of its own makes outputs differ, and not the other way round.
_MODEL_ORDER = ("generator", "hidden_state", "clock", "entropy", "repeat", "backward", "rank")
_DATA_ORDER = ("generator", "clock", "entropy", "hidden_state", "reread", "rank", "worker")


def diagnose(evidence: Evidence) -> Cause:
    """Return the likely cause of a difference."""
    difference = evidence.difference
    if evidence.mode == "fast":
        return Cause(
            "fast_mode",
            "mode fast: plain DDP adds in an order that depends on the number of processes",
            "Use --mode exact, the default, for the same bits.",
        )
    if evidence.by_hash_seed is not None:
        return Cause(
            "hash_seed",
            "Python's hash seed decides the bits: something follows the order of a set of strings (or of "
            f"other hashes), first seen in {evidence.by_hash_seed}",
            "Iterate over sorted(the set) or use a list or dict; PYTHONHASHSEED=0 hides it. The workers of "
            "one launch share a hash seed, so only another launch or machine shows the difference.",
        )
    early = _of_kind(evidence)
    if early is not None:
        return early
    is_data = difference.kind == "data"
    for kind in _DATA_ORDER if is_data else _MODEL_ORDER:
        for finding in evidence.findings:
            if (finding.kind, finding.is_data) == (kind, is_data):
                text, advice = _TEXTS[kind]
                name = f"data_{kind}" if is_data and not kind.startswith("re") else kind
                return Cause(name, ("data: " if is_data else "") + text.format(where=finding.where), advice)
    return _unknown(evidence)


def _of_kind(evidence: Evidence) -> Cause | None:
    """Return the cause where the kind of difference says it all."""
    difference = evidence.difference
    if difference.kind == "settings":
        return Cause(
            "settings",
            f"a setting of the process differs ({difference.detail}), and it changes bits",
            "Set it to the same value for every number of processes; leave the threads to --threads.",
        )
    if difference.kind == "length":
        return Cause(
            "length",
            f"the runs have different numbers of steps ({difference.detail})",
            "End the loop by steps or epochs, not by time or by something that one rank sees.",
        )
    if difference.kind == "samples":
        return Cause(
            "samples",
            "the global batch has other samples: they are not chosen by evenstep's Loader alone, or the "
            "dataset has another length in another process",
            "Let evenstep.Loader make the batches, with the same dataset and batch_size on every rank.",
        )
    if difference.kind == "between":
        return Cause(
            "loop",
            "the loop itself changes the state between two steps, and not the same way on all ranks and for "
            "every number of processes",
            "Change model and optimizer by what all ranks know (step, epoch), never for one rank only.",
        )
    if difference.kind == "start":
        source = (
            "on the number of processes" if evidence.is_repeatable else "on the time or the system's entropy"
        )
        return Cause(
            "initial_weights",
            f"the initial state differs: it depends {source}",
            "Make the model from torch's global generator, which evenstep seeds the same on every rank.",
        )
    return None


def _unknown(evidence: Evidence) -> Cause:
    names = set(evidence.difference.tensors)
    changed = [f.where for f in evidence.findings if f.kind == "buffer" and f"buffer {f.where}" in names]
    if changed:
        return Cause(
            "buffer",
            f"the buffer {changed[0]} is changed in forward, outside evenstep's staging",
            "Change it in place as a registered buffer of the model that TrainState got, or after the step.",
        )
    if evidence.is_repeatable is False:
        return Cause(
            "unrepeatable",
            "the same run, done again, has other bits, but no probe found where: a race that is rare, or an "
            "operator that is not deterministic",
            _OPERATOR,
        )
    if evidence.between_ranks:
        return Cause(
            "one_rank",
            "state is kept on one rank: the inputs and sums are the same, the result is not",
            "Do the same on every rank; only files and printing belong to rank 0.",
        )
    return Cause(
        "unknown",
        "not found: the same run repeats itself, and no probe shows a difference",
        "Please report it with the model and the table; a step that differs in one tensor helps most.",
    )
