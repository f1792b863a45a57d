"""evenstep verify: what is the same is called so, and each planted defect is called by its name."""

import dataclasses
import functools
import json
import os
import random
import re
import secrets
import sys
import time

import numpy as np
import pytest
import torch

import defects
from evenstep import cli
from evenstep.errors import ConfigError, WorkerError
from evenstep.verify.command import parse
from evenstep.verify.diagnosis import Evidence, diagnose
from evenstep.verify.frozen import fixed_entropy, stopped_clock
from evenstep.verify.probes import Finding, held_generators, hidden_values
from evenstep.verify.recording import (
    Difference,
    LaneRecord,
    Recording,
    StepRecord,
    data_digest,
    first_difference,
    merged,
    ulps_between,
)
from evenstep.verify.runs import Row, Verification, table


def verified(main, *, hash_seeds=(), steps=2, mode="exact", **values):
    options = {"device": "cpu", "mode": mode, "threads": 1}
    return Verification(main=main, hash_seeds=hash_seeds, steps=steps, options=options, **values).run()


def planted(**keywords):
    return functools.partial(defects.train, **keywords)


def samples(read):
    return functools.partial(defects.Samples, read)


def test_the_same_bits_on_three_world_sizes_and_the_losses_of_plain_pytorch():
    report = verified(planted(), world_sizes=(1, 2, 3), lanes=4, tolerance=1e-4)
    assert report.is_same
    assert report.lanes == 4
    assert [row.result for row in report.rows] == ["reference", "same", "same", "within tolerance"]
    assert 0 <= report.rows[-1].largest < 1e-4
    assert table(report).splitlines()[2:4] == [
        "2                  2  same",
        "3                  2  same",
    ]


# What is planted; the cause's name; what its text must say.
DEFECTS = {
    # (a) and its variant that repeats itself on each rank
    "generator seeded by rank": (
        planted(layer=defects.RankNoise),
        "generator",
        r"a generator that evenstep does not seed: 1\.generator, seeded by rank \(0, 1\)",
    ),
    "new generator by rank": (
        planted(layer=defects.NewRankNoise),
        "rank",
        r"depends on the rank .* 1 \(NewRankNoise\) has other bits on another rank",
    ),
    # (b)
    "own norm": (planted(layer=defects.Norm), "hidden_state", r"the plain attribute 1\.mean,"),
    # (d)
    "clock": (
        planted(samples=samples(defects.clock)),
        "data_clock",
        r"data: the clock is read .* sample \d+",
    ),
    "generator of the data": (
        planted(samples=samples(defects.urandom)),
        "data_entropy",
        r"data: the system's entropy is used \(os\.urandom",
    ),
    "rank in the data": (
        planted(samples=samples(defects.rank_of_process)),
        "data_rank",
        r"data: something depends on the rank",
    ),
    # (e)
    "racing additions": (
        planted(layer=defects.Racing),
        "repeat",
        r"a non-deterministic operator: .* the output of 1 \(Racing\) has other bits",
    ),
    "racing additions in backward": (
        planted(layer=defects.RacingBackward),
        "backward",
        r"a non-deterministic operator in backward: .* the gradient of 0\.bias has other bits",
    ),
    "entropy": (planted(layer=defects.Entropy), "entropy", r"the system's entropy .* 1 \(Entropy\)"),
    "threads": (
        planted(layer=defects.ThreadsByWorld),
        "settings",
        r"CPU threads: 2 against 1",
    ),
    "one rank": (
        planted(between=functools.partial(defects.one_rank_decays, at=1)),
        "loop",
        "the loop itself changes the state between two steps",
    ),
    "weights by time": (defects.time_in_weights, "initial_weights", "depends on the time or the system's"),
    "steps by world size": (defects.ends_by_rank, "length", "2 steps against 3"),
    "samples by world size": (defects.rank_dependent_batch, "samples", "the global batch has other samples"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_named(defect):
    main, name, text = DEFECTS[defect]
    report = verified(main, steps=3 if name == "length" else 2)
    assert not report.is_same
    reference, row = report.rows
    assert (reference.result, row.result) == ("reference", "differs")
    assert row.cause.name == name, row.cause
    assert re.search(text, row.cause.text), row.cause.text
    shown = table(report)
    assert f"likely cause: {row.cause.text}." in shown
    assert row.cause.advice in shown
    if row.difference.tensors:
        assert row.ulps is None or row.ulps > 0
        assert f"differs at step {row.difference.step}: {row.difference.tensors[0]}" in shown


def test_state_of_one_rank_names_the_ranks_and_the_size():
    report = verified(planted(between=functools.partial(defects.one_rank_decays, at=1)), world_sizes=(2,))
    (row,) = report.rows
    assert row.ranks == (0, 1)
    # Halving is one power of two down: all 2**23 numbers of it, for each element alike.
    assert row.ulps == 2**23
    assert "differs at step 1: parameter 0.weight, 8,388,608 ulps, ranks 0 and 1 differ (1)" in table(report)


def test_a_norm_with_a_registered_buffer_is_staged_and_so_the_same():
    assert verified(planted(layer=defects.BufferNorm)).is_same


def test_an_operator_without_a_deterministic_kernel_is_named():
    report = verified(planted(layer=defects.Put))
    (row,) = report.rows
    assert row.result == "refused"
    assert row.cause.name == "no_deterministic_kernel"
    assert "no deterministic kernel for the operator put_," in row.cause.text
    assert "defects.py" in row.cause.advice  # torch's message and the line that calls the operator
    assert "1               0  refused (1)" in table(report)


@pytest.mark.slow
@pytest.mark.timeout(600)  # each fresh interpreter imports torch twice
def test_the_order_of_a_set_shows_only_in_fresh_interpreters():
    report = verified(planted(layer=defects.SetSum), world_sizes=(1, 2), hash_seeds=(1, 2), steps=1)
    found = [(row.hash_seed, row.result) for row in report.rows[:2]]
    assert found == [(None, "reference"), (None, "same")]  # workers of one launch share a hash seed
    differing = [row for row in report.rows if not row.is_good]
    assert differing
    for row in differing:
        assert row.cause.name == "hash_seed"
        assert "follows the order of a set of strings" in row.cause.text
        assert "the output of 1 (SetSum)" in row.cause.text
        assert row.ulps > 0
    assert "1, hash seed 1" in table(report)


def test_fast_mode_is_the_negative_control():
    report = verified(planted(), world_sizes=(1, 3), lanes=4, mode="fast", steps=4)
    assert [row.result for row in report.rows] == ["reference", "differs"]
    assert report.rows[1].cause.name == "fast_mode"
    assert 0 < report.rows[1].ulps < 10_000


def test_dropout_and_a_loss_that_is_no_mean_differ_from_plain_pytorch():
    row = verified(planted(dropout=True), tolerance=1e-4).rows[-1]
    assert row.result == "outside tolerance"
    assert "4 (Dropout) works on each lane by itself" in row.cause.text
    row = verified(defects.wrong_loss, tolerance=1e-4).rows[-1]
    assert row.result == "outside tolerance"
    assert "the loss function is no mean over the samples" in row.cause.text


def test_a_loop_that_swallows_exceptions_is_ended():
    assert verified(defects.swallowing, world_sizes=(1, 2)).is_same


def test_a_main_without_steps_is_refused():
    with pytest.raises(ConfigError, match=r"without one call of evenstep\.train_step"):
        verified(defects.no_steps)


def test_an_error_of_the_users_stays_that():
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        verified(lambda world: 1 // 0)


def test_the_command_compares_a_loop_of_your_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["--main", "defects:rank_noise", "--nproc", "2,1", "--steps", "2", "--device", "cpu"]
    assert cli.main(["verify", *words, "--threads", "1", "--hash-seeds", "none", "--json"]) == 6
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["same"] is False
    assert result["lanes"] == 2
    row = result["rows"][1]
    assert (row["world_size"], row["step"], row["cause"]["name"]) == (1, 0, "generator")
    assert row["tensor"] == "parameter 0.weight"
    assert "verify: 2 processes, 2 lanes, 2 steps" in captured.err


def test_the_command_compares_a_model_and_data_by_name(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = "--data digits --batch-size 8 --steps 1 --device cpu --threads 1 --hash-seeds none --quiet"
    assert cli.main(["verify", *flags.split()]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1:] == ["1               1  reference", "2               1  same"]
    assert captured.err == ""
    assert not list(tmp_path.iterdir())  # no run directory


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--nproc 1,x", r"--nproc is '1,x'; expected whole numbers from 1 on"),
        ("--nproc 0", r"--nproc is '0'; expected whole numbers from 1 on"),
        ("--nproc 2,2", r"--nproc is '2,2'; .*each once"),
        ("--hash-seeds a", r"--hash-seeds is 'a'; expected whole numbers from 0 on"),
        ("--nproc 1,4 --lanes 2", r"nproc 4 is above lanes 2"),
        ("--resume", r"--resume has no meaning here: verify always begins at step 0"),
        ("--steps 0", r"steps is 0; there must be 1 or more"),
        ("--tolerance -1 --against single", r"tolerance is -1\.0; it must be 0 or more"),
        ("--tolerance 0.1", r"--tolerance is for --against single"),
        ("--agianst single", r"unknown flag --agianst\. Did you mean '--against'\?"),
    ],
)
def test_wrong_flags(words, text):
    with pytest.raises(ConfigError, match=text):
        parse(words.split())


def test_flags_of_train_are_taken():
    words = ["--nproc", "1,3", "--batch-size", "96", "--hash-seeds", "none", "--json"]
    asked, config, sizes, seeds = parse(words)
    assert (sizes, seeds, asked.json) == ([1, 3], [], True)
    assert config.optim.batch_size == 96
    assert (config.process.nproc, config.optim.steps) == (1, None)


def test_under_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert cli.main(["verify"]) == 2
    assert "Start it as `evenstep verify`, without a launcher" in capsys.readouterr().err


def test_a_main_that_cannot_be_called(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["verify", "--main", "defects:CLASSES"]) == 2
    assert "--main defects:CLASSES is int, which cannot be called" in capsys.readouterr().err


def test_ulps():
    one = torch.tensor([1.0, -0.0, 2.0])
    assert ulps_between(one, torch.tensor([1.0, 0.0, 2.0])) == 0
    assert ulps_between(one, torch.nextafter(one, torch.tensor(9.0))) == 1
    assert ulps_between(torch.tensor([1e-45]), torch.tensor([-1e-45])) == 2
    assert ulps_between(torch.tensor([1.0]), torch.tensor([2.0])) == 2**23
    half = torch.tensor([1.0], dtype=torch.bfloat16)
    assert ulps_between(half, half * 2) == 2**7
    double = torch.tensor([-1.0], dtype=torch.float64)
    assert ulps_between(double, -double) == 2 * np.float64(1.0).view(np.int64)
    assert ulps_between(torch.tensor([3, -4]), torch.tensor([3, 6])) == 10
    assert ulps_between(one, one[:2]) is None
    assert ulps_between(None, one) is None


def test_digests_of_data():
    tensor = torch.arange(6.0)
    same = [(tensor, {"a": 1, "b": "x"}), (tensor.clone(), {"b": "x", "a": 1})]
    assert data_digest(same[0]) == data_digest(same[1])
    other = [tensor.view(2, 3), tensor.double(), tensor + 1, tensor.numpy(), [1.0], [1], "1", None, object()]
    assert len({data_digest(value) for value in [tensor, *other]}) == 1 + len(other)
    assert data_digest(object()) == data_digest(object())
    assert data_digest(["ab", "c"]) != data_digest(["a", "bc"])


LANES = {0: LaneRecord(2, (0, 1), "d0"), 1: LaneRecord(2, (2, 3), "d1")}
RECORD = StepRecord(
    step=0,
    size=4,
    lanes=LANES,
    before={"w": "1"},
    after={"w": "2", "b": "2"},
    loss="0x1p0",
    settings={"CPU threads": "1"},
)


@pytest.mark.parametrize(
    ("changes", "kind", "detail"),
    [
        ({"before": {"w": "0"}}, "start", ""),
        ({"settings": {"CPU threads": "2"}}, "settings", "CPU threads: 1 against 2"),
        ({"size": 5}, "samples", ""),
        ({"lanes": {**LANES, 1: LaneRecord(2, (3, 2), "d1")}}, "samples", ""),
        ({"lanes": {**LANES, 1: LaneRecord(2, (2, 3), "d2")}, "loss": "0x1p1"}, "data", "lane 1"),
        ({"loss": "0x1p1", "after": {"w": "3", "b": "2"}}, "loss", ""),
        ({"after": {"w": "3", "b": "2"}}, "state", ""),
        ({"after": {"w": "2"}}, "state", ""),
    ],
)
def test_the_first_difference_in_the_order_of_cause_and_effect(changes, kind, detail):
    one, two = (
        Recording(0, (RECORD,)),
        Recording(0, (dataclasses.replace(RECORD, **changes),)),
    )
    found = first_difference(one, two)
    assert (found.step, found.kind, found.detail) == (0, kind, detail)
    assert first_difference(one, one) is None
    assert first_difference(one, Recording(0, (RECORD, RECORD))).kind == "length"


def test_lanes_of_all_ranks_are_put_together():
    ranks = [Recording(rank, (dataclasses.replace(RECORD, lanes={rank: LANES[rank]}),)) for rank in (0, 1)]
    assert first_difference(merged(ranks), Recording(0, (RECORD,))) is None
    assert first_difference(ranks[0], ranks[1]).kind == "samples"
    assert first_difference(ranks[0], ranks[1], lanes=False) is None


def test_causes_without_a_probe():
    state = Difference(1, "state", ("buffer norm.mean",))
    assert diagnose(Evidence(state, [], is_repeatable=False)).name == "unrepeatable"
    assert diagnose(Evidence(state, [], between_ranks=True, is_repeatable=True)).name == "one_rank"
    assert diagnose(Evidence(state, [], is_repeatable=True)).name == "unknown"
    changed = [Finding("buffer", "norm.mean")]
    assert "the buffer norm.mean is changed in forward" in diagnose(Evidence(state, changed)).text
    assert diagnose(Evidence(Difference(0, "start"), [], is_repeatable=True)).text.endswith(
        "on the number of processes"
    )
    both = [Finding("rank", "x"), Finding("backward", "w"), Finding("clock", "sample 1", True)]
    assert diagnose(Evidence(state, both)).name == "backward"  # the data were the same
    worker = [Finding("worker", "2 DataLoader workers", True)]
    assert diagnose(Evidence(Difference(0, "data"), worker)).name == "data_worker"


def test_a_stopped_clock_and_fixed_entropy_end_with_the_block():
    before = time.time()
    with stopped_clock([defects]):
        assert time.time() == time.time() == 1.5e9
    assert time.time() >= before
    drawn = []
    for _ in range(2):
        with fixed_entropy([]):
            drawn.append(
                (
                    os.urandom(4),
                    secrets.randbits(20),
                    random.SystemRandom().random(),
                    np.random.default_rng().integers(1 << 40),
                )
            )
    assert drawn[0] == drawn[1]
    assert os.urandom(8) != os.urandom(8)


def test_what_objects_hold_is_found():
    dataset = defects.Samples()
    dataset.inner = [np.random.default_rng(0), {"not": "looked into"}]
    dataset.count = 3
    assert list(held_generators(dataset)) == ["inner[0]"]
    before = hidden_values(dataset)
    dataset.count += 1
    changed = {name for name, value in hidden_values(dataset).items() if before[name] != value}
    assert changed == {"count"}
    assert list(held_generators(defects.network(torch.nn.Identity()))) == []


def test_rows_as_json():
    row = Row(world_size=2, steps=5, result="same").as_dict()
    assert row["result"] == "same"
    assert row["cause"] is None
    json.dumps(row)
