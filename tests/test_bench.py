"""evenstep bench: the arithmetic, the table, and that all rows train the same samples."""

import dataclasses
import json
import re
import sys
import types
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from torch import nn

import evenstep
from evenstep import cli
from evenstep.bench.chart import chart
from evenstep.bench.command import parse
from evenstep.bench.measure import PARTS, Laps, Measured, _digest
from evenstep.bench.peak import Peak, flops_of, rate
from evenstep.bench.plan import rows
from evenstep.bench.results import Report, RowResult, table
from evenstep.bench.runs import Bench, _launch_options, _row_result, check_same_samples
from evenstep.config import TrainConfig
from evenstep.errors import ConfigError, EvenstepError

CPU = torch.device("cpu")
SHARES = {"data": 0.1, "forward": 0.25, "backward": 0.5, "wait": 0.1, "other": 0.05}


def result(row, *images_per_s, peak=1e9):
    return RowResult(
        row=row,
        images_per_s=images_per_s,
        samples=96,
        loss=2.25,
        shares=SHARES,
        matmul_flops_per_s=peak,
        convolution_flops_per_s=peak / 2,
    )


def report(*results, **values):
    known = {
        **{"steps": 30, "drop": 5, "rounds": 3, "model": "net", "data": "digits", "batch_size": 128},
        **{"precision": "fp32", "device": "cpu AVX2", "flops_per_image": 1e6, "cores": 4, "load": 0.1},
        "versions": {"torch": "2.14"},
    }
    return Report(rows=results, **{**known, **values})


def four_processes(**values):
    plain, wide, exact_1, ddp, exact, fast = rows(4, 1, None, 0)
    return report(
        result(plain, 100.0, 90.0, 110.0),
        result(wide, 250.0, 250.0, 250.0, peak=3e9),
        result(exact_1, 99.0, 99.0, 99.0, peak=1.2e9),
        result(ddp, 300.0, 310.0, 290.0, peak=2e9),
        result(exact, 285.0, 285.0, 285.0, peak=2.5e9),
        result(fast, 330.0, 330.0, 330.0, peak=2e9),
        **values,
    )


@pytest.mark.parametrize(
    ("nproc", "gpus", "names"),
    [
        (1, 0, ["plain", "exact_1", "fast"]),
        (2, 0, ["plain", "plain_all_threads", "exact_1", "ddp", "exact", "fast"]),
        (1, 1, ["plain", "exact_1", "fast"]),
        (2, 2, ["plain", "data_parallel", "exact_1", "ddp", "exact", "fast"]),
        (2, 1, ["plain", "exact_1", "ddp", "exact", "fast"]),
    ],
)
def test_rows_of_a_machine(nproc, gpus, names):
    assert [row.name for row in rows(nproc, 1, None, gpus)] == names


def test_rows_use_the_processes_threads_and_lanes_that_were_asked_for():
    found = {row.name: row for row in rows(4, 2, 8, 0)}
    places = {name: (row.processes, row.threads, row.lanes, row.units) for name, row in found.items()}
    assert places == {
        "plain": (1, 2, 1, 1),
        "plain_all_threads": (1, 8, 1, 4),
        "exact_1": (1, 2, 8, 1),
        "ddp": (4, 2, 4, 4),
        "exact": (4, 2, 8, 4),
        "fast": (4, 2, 8, 4),
    }
    assert {name: row.mode for name, row in found.items() if name.startswith("exact")} == {
        "exact_1": "exact",
        "exact": "exact",
    }
    assert {row.name: row.lanes for row in rows(4, 2, None, 0) if row.kind == "evenstep"} == {
        "exact_1": 1,
        "exact": 4,
        "fast": 4,
    }
    (data_parallel,) = (row for row in rows(4, 2, None, 3) if row.kind == "data_parallel")
    assert (data_parallel.processes, data_parallel.units) == (1, 3)


def test_ratios_efficiency_and_bound():
    found = four_processes()
    values = {row["name"]: row for row in found.as_dict()["rows"]}
    assert found.as_dict()["baseline"] == "ddp"
    assert values["plain"]["images_per_s"] == 100
    assert values["plain"]["spread"] == pytest.approx(0.2)
    assert values["exact"]["ratio_to_baseline"] == pytest.approx(0.95)
    assert values["fast"]["ratio_to_baseline"] == pytest.approx(1.1)
    assert values["ddp"]["efficiency"] == pytest.approx(0.75)
    assert values["plain_all_threads"]["efficiency"] == pytest.approx(0.625)
    # The best of what any row with as many processes and threads has reached, over a million flops an image.
    assert values["plain"]["bound_images_per_s"] == pytest.approx(1200)
    assert values["ddp"]["bound_images_per_s"] == pytest.approx(2500)
    assert values["ddp"]["share_of_bound"] == pytest.approx(0.12)


def test_one_process_is_compared_with_plain_pytorch():
    plain, exact, _ = rows(1, 2, None, 0)
    found = report(result(plain, 100.0), result(exact, 98.0), flops_per_image=None)
    assert found.baseline.row.name == "plain"
    assert found.ratio(found.rows[1]) == pytest.approx(0.98)
    assert found.as_dict()["rows"][1]["bound_images_per_s"] is None
    assert "x plain" in table(found)
    assert "bound: none; torch's counter knows no operation of this model" in table(found)


def test_the_table_is_aligned_and_says_when_the_machine_is_busy():
    lines = table(four_processes(load=3.0)).splitlines()
    assert lines[0] == (
        "net on digits, batch size 128, fp32, cpu AVX2; 3 rounds of 30 steps, the first 5 dropped"
    )
    head, *body = lines[2:9]
    assert re.split(r"  +", head.strip()) == [
        *("proc", "thr", "images/s", "spread", "x DDP", "effic."),
        *("data", "fwd", "bwd", "wait", "other", "bound", "of it"),
    ]
    assert re.split(r"  +", body[4]) == [
        *("evenstep exact", "4", "1", "285", "0 %", "0.95", "71 %"),
        *("10 %", "25 %", "50 %", "10 %", "5 %", "2500", "11 %"),
    ]
    assert {len(line) for line in (head, *body)} == {len(head)}
    assert "  4 x 1 threads: 2 Gflop/s, so 2500 images/s at most" in lines
    assert lines[-1].startswith("warning: before the first training the load was 3.0 on 4 cores.")
    assert "warning" not in table(four_processes())


def test_the_picture_has_a_bar_for_each_row():
    picture = ET.fromstring(chart(four_processes(model="<own>:net")))
    bars = picture.findall("{http://www.w3.org/2000/svg}rect")[1:]
    assert len(bars) == 6
    assert float(bars[0].get("width")) / float(bars[3].get("width")) == pytest.approx(1 / 3, rel=1e-2)
    assert "BUSY" not in "".join(picture.itertext())
    assert "BUSY" in chart(four_processes(load=3.0))
    assert "<own>:net on digits" in "".join(picture.itertext())


def measured(samples, digest=5):
    return Measured(
        images=1, wall_s=1.0, samples=samples, digest=digest, device="cpu", loss=1.0, peak=Peak(1.0, 2.0)
    )


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([measured(4, 2), measured(5, 3)], r"in round 2 plain DDP, 2 x 1, trained 9 samples, and plain"),
        ([measured(4, 2), measured(4, 4)], r"in round 2 plain DDP, 2 x 1, trained other samples, and plain"),
    ],
)
def test_rows_that_trained_other_samples_are_not_compared(ranks, message):
    plain, ddp = (row for row in rows(2, 1, None, 0) if row.name in ("plain", "ddp"))
    whole, halves = [measured(8)], [measured(4, 2), measured(4, 3)]
    check_same_samples([plain, ddp], {"plain": [whole, whole], "ddp": [halves, halves]})
    with pytest.raises(EvenstepError, match=message):
        check_same_samples([plain, ddp], {"plain": [whole, whole], "ddp": [halves, ranks]})


def test_the_digest_of_samples_depends_on_steps_and_ids_and_on_nothing_else():
    whole = _digest([(0, (3, 1, 2)), (1, (7, 8))])
    assert whole == _digest([(0, (2,)), (1, (8, 7)), (0, (1, 3)), (1, ())])
    assert whole != _digest([(0, (3, 1, 7)), (1, (2, 8))])
    assert whole != _digest([(0, (3, 1, 2)), (1, (7, 7))])


def test_the_operations_of_a_model_are_counted():
    layer = nn.Linear(8, 4, bias=False)
    inputs = torch.ones(16, 8)
    # Forward and the weight's gradient; the inputs need none.
    assert flops_of(lambda: layer(inputs).sum()) == 2 * (2 * 16 * 8 * 4)


def test_a_rate_is_operations_over_time():
    calls = []
    assert rate(lambda: calls.append(1), 1e3, CPU, 0.01) > 1e3 / 0.01
    assert len(calls) > 2


def test_each_part_of_a_step_is_timed(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(
        "evenstep.bench.measure.time", types.SimpleNamespace(perf_counter=lambda: next(ticks))
    )
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laps = Laps(CPU, list(model.parameters()), optimizer, alone=False)  # tick 0
    laps.lap("data")  # 1
    loss = laps.forward(lambda module, batch: module(batch).sum())
    loss(model, torch.ones(3, 2)).backward()  # other 2, forward 3, the gradient 4
    optimizer.step()  # 5
    laps.lap("other")  # 6
    assert laps.end() == {"data": 1, "forward": 1, "backward": 1, "wait": 1, "other": 2}
    loss(model, torch.ones(3, 2)).backward()
    assert next(ticks) == 9, "the hooks are still there"


REFUSED = {
    "--steps 5": r"steps is 5, and the first 5 do not count: none is left\. Use --steps 6 or more",
    "--drop-steps 0": r"drop_steps is 0; it must be 1 or more, .*\(--drop-steps 5\)",
    "--rounds 0": r"rounds is 0; it must be 1 or more \(--rounds 3\)",
    "--mode fast": r"--mode has no meaning here: both modes of evenstep are measured\. Leave it out",
    "--ema-decay 0.9": r"--ema-decay has no meaning here: torch's own loops here have no moving average",
    "--run-dir x": r"--run-dir has no meaning here: no run is written; --output DIR takes the results",
    "--stepps 7": r"unknown flag --stepps\. Did you mean '--steps'\?",
    "--batch-size 1 --nproc 2": r"batch_size 1 is smaller than lanes",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_is_refused(words):
    with pytest.raises(ConfigError, match=REFUSED[words]):
        parse(words.split())


def test_flags_of_train_are_taken_and_the_learning_rate_stays():
    words = "--steps 9 --rounds 2 --json --model resnet9 --batch-size 64 --lr-schedule onecycle"
    asked, config = parse(words.split())
    assert (asked.steps, asked.rounds, asked.json) == (9, 2, True)
    assert (config.model.model, config.optim.batch_size) == ("resnet9", 64)
    assert (config.optim.lr_schedule, config.optim.steps, config.output.json) == ("constant", None, False)


def test_exit_codes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["bench", "--steps", "0"]) == 2
    file = tmp_path / "file"
    file.write_text("")
    assert cli.main(["bench", "--output", str(file / "there")]) == 3
    assert "cannot write to" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert cli.main(["bench"]) == 2
    assert "Start it as `evenstep bench`, without a launcher" in capsys.readouterr().err


def test_the_command_measures_all_rows_on_the_same_samples(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    generator = np.random.default_rng(0)
    data = {
        f"{kind}_{split}": generator.integers(0, 10, (20, 8, 8, 3) if kind == "x" else 20, dtype=np.uint8)
        for kind in "xy"
        for split in ("train", "test")
    }
    np.savez(tmp_path / "tiny.npz", **data)
    words = (
        f"bench --data {tmp_path / 'tiny.npz'} --cache-dir {tmp_path / 'cache'} --device cpu --nproc 2 "
        f"--threads 1 --batch-size 6 --steps 5 --drop-steps 2 --rounds 1 --json --output {tmp_path / 'out'}"
    ).split()
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == found
    assert "plain DDP, 2 x 1" in (tmp_path / "out" / "bench.svg").read_text()
    assert "bench: round 1 of 1: evenstep fast, 2 x 1" in shown.err
    by_name = {row["name"]: row for row in found["rows"]}
    assert list(by_name) == ["plain", "plain_all_threads", "exact_1", "ddp", "exact", "fast"]
    # An epoch of 20 samples in batches of 6 ends with one of 2.
    assert {row["samples"] for row in by_name.values()} == {6 + 6 + 6 + 2 + 6}
    # The same training: the loss of the last step is that of plain PyTorch.
    for row in by_name.values():
        assert row["last_loss"] == pytest.approx(by_name["plain"]["last_loss"], rel=1e-3)
        assert row["images_per_s"] > 0
        assert list(row["shares"]) == list(PARTS)
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["shares"]["forward"] > 0 < row["shares"]["backward"]
        assert row["bound_images_per_s"] > 0
        assert (row["shares"]["wait"] > 0) == (row["processes"] > 1)
    assert found["flops_per_image"] > 1e5
    assert {"steps": 5, "dropped_steps": 2, "rounds": 1, "batch_size": 6}.items() <= found.items()


def test_a_measured_step_does_what_recovery_needs_and_nothing_is_started_again():
    def main(world):
        model = torch.nn.Linear(64, 10)
        state = evenstep.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = [(torch.ones(64), 0)] * 8
        for batch in evenstep.Loader(data, batch_size=4).batches(state, steps=2):
            evenstep.train_step(state, batch, evenstep.cross_entropy())
        return world.recovery.pulse.step, world.recovery.has_states

    bench = Bench(rows=rows(1, 1, None, 0), config=TrainConfig(), options={}, steps=2, drop=1, rounds=1)
    row = next(row for row in bench.rows if row.kind == "evenstep")
    options = _launch_options(bench, row)
    assert options["max_restarts"] == 0
    assert evenstep.launch(main, device="cpu", **options) == [(2, True)]


def test_a_row_takes_the_medians_and_the_best_peak_of_its_rounds():
    row = rows(2, 1, None, 0)[3]

    def rank(wall_s, peak, share):
        parts = {**dict.fromkeys(PARTS, 0.0), "forward": share, "wait": 2 - share}
        return dataclasses.replace(measured(4), images=8, wall_s=wall_s, peak=peak, parts=parts)

    rounds = [
        [rank(1.0, Peak(5.0, 1.0), 1.0), rank(2.0, Peak(5.0, 1.0), 1.0)],
        [rank(4.0, Peak(3.0, 2.0), 1.0), rank(1.0, Peak(3.0, 2.0), 0.5)],
    ]
    found = _row_result(row, rounds)
    assert found.images_per_s == (4.0, 2.0), "the slowest rank counts"
    assert (found.matmul_flops_per_s, found.convolution_flops_per_s) == (10.0, 4.0)
    assert found.shares == {"data": 0, "forward": 0.375, "backward": 0, "wait": 0.625, "other": 0}
    assert found.samples == 8
