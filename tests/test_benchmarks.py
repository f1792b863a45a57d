"""The benchmark against peers: its arithmetic, what it reads, and evenstep's own entry. No peer is needed."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks" / "peers"
MODULES = ("driver", "peers", "summary", "watching", "common", "data")


@pytest.fixture
def bench(monkeypatch):
    """Import the modules of benchmarks/peers, and forget them after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers
    import summary
    import watching

    yield peers, summary, watching
    for name in MODULES:
        sys.modules.pop(name, None)


def record(peer, number, images_per_s, **values):
    return {
        "peer": peer,
        "round": number,
        "steady_images_per_s": images_per_s,
        "eval_images_per_s": None,
        "launch_to_first_step_s": 2.0,
        "last_step_to_exit_s": 1.0,
        "last_step_to_all_gone_s": 1.1,
        "whole_s": 9.0,
        "peak_pss_mb": None,
        "test_samples": 101,
        "processes_left": 0,
        **values,
    }


def records():
    return [
        record("handwritten_spawn", 0, 1.0, peak_pss_mb=2000.0),
        *(record("handwritten_spawn", number + 1, speed) for number, speed in enumerate((1000, 1400, 1100))),
        record("fabric", 0, 1.0, peak_pss_mb=1500.0),
        *(
            record("fabric", n, 1200, launch_to_first_step_s=4.0, last_step_to_all_gone_s=1.5, whole_s=9.5)
            for n in (1, 2, 3)
        ),
        record("evenstep", 0, 1.0, peak_pss_mb=1000.0),
        *(record("evenstep", n, 2200, launch_to_first_step_s=1.0, whole_s=5.0) for n in (1, 2)),
        {"peer": "evenstep", "round": 3, "error": "exit code 1"},
    ]


def test_medians_ratios_and_the_memory_round(bench):
    _, summary, _ = bench
    rows = summary.summarise(records())
    assert rows["handwritten_spawn"]["steady_images_per_s"] == {
        "median": 1100,
        "min": 1000,
        "max": 1400,
        "n": 3,
        "ratio": 1.0,
    }
    assert rows["evenstep"]["steady_images_per_s"]["ratio"] == 2.0
    assert rows["evenstep"]["steady_images_per_s"]["n"] == 2
    assert rows["evenstep"]["peak_pss_mb"]["ratio"] == 0.5
    assert rows["evenstep"]["errors"] == ["exit code 1"]
    assert rows["fabric"]["eval_images_per_s"] is None


def test_targets_are_taken_against_the_best_peer_of_each_measure(bench):
    _, summary, _ = bench
    rows = summary.summarise(records())
    assert summary.best(rows, "steady_images_per_s") == ("fabric", 1200)
    assert summary.best(rows, "launch_to_first_step_s") == ("handwritten_spawn", 2.0)
    targets = summary.targets(rows)
    found = {(t["measure"], t["against"]): (round(t["ratio"], 3), t["met"]) for t in targets if t["ratio"]}
    assert found == {
        ("steady_images_per_s", "fabric"): (1.833, True),
        ("launch_to_first_step_s", "handwritten_spawn"): (0.5, True),
        ("last_step_to_all_gone_s", "handwritten_spawn"): (1.0, False),
        ("whole_s", "handwritten_spawn"): (0.556, True),
        ("peak_pss_mb", "fabric"): (0.667, True),
    }
    training = next(t for t in targets if t["against"] == "fabric")
    assert training["chosen_from"] == ["handwritten_spawn", "fabric"]
    training = [
        t for t in summary.targets(rows, augment=True) if (t["against"], t["row"]) == ("fabric", "evenstep")
    ]
    assert [t["wanted"] for t in training if t["measure"] == "steady_images_per_s"] == [1.5]


def test_targets_that_could_not_be_judged_are_told(bench):
    _, summary, _ = bench
    rows = summary.summarise(records())
    open_ones = {(t["row"], t["against"]) for t in summary.targets(rows) if t["met"] is None}
    assert ("evenstep_bf16", "tuned_bf16") in open_ones
    assert ("evenstep_loop_bf16", "fabric") in open_ones
    # No peer has a value: there is no best one.
    for row in rows.values():
        row["eval_images_per_s"] = None
    assert ("evenstep", "best peer") in {(t["row"], t["against"]) for t in summary.targets(rows)}


@pytest.mark.parametrize(
    ("nproc", "wanted"),
    [
        (1, {("steady_images_per_s", "evenstep_fast"): 0.97}),
        (3, {("steady_images_per_s", "evenstep_fast"): 0.97}),
        (
            4,
            {
                ("steady_images_per_s", "evenstep_fast"): 0.97,
                ("launch_to_first_step_s", "handwritten_spawn"): 0.45,
            },
        ),
    ],
)
def test_targets_set_for_two_processes_are_for_two_processes(bench, nproc, wanted):
    _, summary, _ = bench
    rows = summary.summarise(records())
    targets = summary.targets(rows, nproc=nproc)
    assert {(t["measure"], t["against"]): t["wanted"] for t in targets} == wanted


def test_each_round_begins_at_another_peer(bench):
    import driver

    names = list("abcdefg")
    orders = [driver.in_turn(names, number, 3) for number in (0, 1, 2, 3)]
    assert ["".join(order) for order in orders] == ["abcdefg", "abcdefg", "cdefgab", "efgabcd"]
    assert driver.arguments(["--peers", "fabric", "evenstep", "fabric"]).peers == ["fabric", "evenstep"]


def test_the_page_has_a_row_for_each_peer_and_names_failures(bench):
    _, summary, _ = bench
    rows = summary.summarise(records())
    report = {
        "date": "2026-12-01T00:00:00",
        "argv": ["--rounds", "3"],
        "settings": {"steps": 70, "epochs": 1, "eval": 101, "nproc": 2, "augment": False, "rounds": 3},
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gb": 8.0, "load_before": [0.1, 0.1, 0.1]},
        "versions": {"torch": "2.14.1", "ray": None},
        "took_s": 12.0,
        "summary": rows,
        "targets": summary.targets(rows),
    }
    lines = summary.page(report).splitlines()
    header = next(line for line in lines if line.startswith("| | training"))
    row = next(line for line in lines if line.startswith("| evenstep |"))
    assert row.startswith("| evenstep | 2,200 · 2.00 (2,200 to 2,200) | - | 1.00 · 0.50 (1.00 to 1.00) |")
    assert header.count("|") == row.count("|")
    assert "- evenstep: exit code 1" in lines
    what = "evenstep: last step until all processes are gone"
    assert f"| {what} | handwritten_spawn (best peer) | ≤ 0.2 | 1.00 | no |" in lines
    assert "| evenstep: training | evenstep_fast | ≥ 0.97 | not measured | - |" in lines
    note = next(line for line in lines if line.startswith("1. "))
    assert "`net` pools before it applies ReLU" in note
    assert any(line.startswith("| evenstep: training (1) | fabric (best peer) |") for line in lines)
    chosen = next(line for line in lines if line.startswith("Best peer in training"))
    assert "chosen from handwritten_spawn, fabric; not measured: handwritten_torchrun" in chosen
    judged = re.findall(r"^\| (evenstep\w*: [^|]+\|[^|]+)\|", "\n".join(lines), re.M)
    assert len(judged) == len(set(judged)) == len(report["targets"])
    assert not any("in no commit" in line for line in lines)
    report["versions"]["evenstep commit"] = "0123abc-dirty"
    assert "in no commit" in summary.page(report)


def test_the_times_of_the_command_come_from_its_lines(bench):
    peers, _, _ = bench
    lines = [(99.0, "data data.npz"), (102.0, "step 1/12  epoch 0  loss 2.3")]
    lines += [(102.0 + 0.1 * n, f"step {n + 1}/12  epoch 0  loss 2.3") for n in range(1, 12)]
    lines += [(104.1, "evaluation after step 12: accuracy 0.3  (1,001 images)"), (105.0, "saved checkpoint")]
    times = peers.read_command(lines, 100.0, 1001)
    assert times["launch_to_first_step_s"] == pytest.approx(2.0)
    assert times["steady_images_per_s"] == pytest.approx(2 * 128 / 0.2)
    assert times["eval_images_per_s"] == pytest.approx(1001 / 1.0)
    assert (times["test_samples"], times["steps"], times["ended_at"]) == (1001, 12, 104.1)


def test_a_run_that_fails_hangs_or_says_nothing_is_told(bench, tmp_path):
    _, _, watching = bench
    options = {"cwd": tmp_path, "memory": False, "timeout_s": 20}
    for code, message in (
        ("raise SystemExit('no GPU')", "exit code 1.*no GPU"),
        ("print('done')", "printed no times.*done"),
    ):
        with pytest.raises(watching.Failed, match=message):
            watching.run_once([sys.executable, "-S", "-c", code], watching.read_json, **options)
    sleeping = [sys.executable, "-S", "-c", "import time; print('here'); time.sleep(60)"]
    with pytest.raises(watching.Failed, match=r"not done after 2 s.*here"):
        watching.run_once(sleeping, watching.read_json, **{**options, "timeout_s": 2})


def test_memory_is_that_of_all_processes(bench, tmp_path):
    _, _, watching = bench
    # The parent starts a child that holds 64 MB, and ends when the child does.
    child = "import time; held = bytearray(b'x') * (64 << 20); time.sleep(1.5)"
    parent = (
        "import json, subprocess, sys, time; "
        f"subprocess.run([sys.executable, '-S', '-c', {child!r}]); "
        "print(json.dumps({'launch_to_first_step_s': 1, 'steady_images_per_s': 1, 'eval_images_per_s': 1, "
        "'test_samples': 1, 'ended_at': time.time()}))"
    )
    words = [sys.executable, "-S", "-c", parent]
    values = watching.run_once(words, watching.read_json, cwd=tmp_path, memory=True, timeout_s=60)
    assert 64 < values["peak_pss_mb"] < 200
    assert values["whole_s"] > 1.5
    assert values["processes_left"] == 0


@pytest.fixture
def data(tmp_path):
    """Files as data.py makes them, of random images."""
    generator = np.random.default_rng(0)
    for split, n in (("train", 400), ("test", 41)):
        np.save(tmp_path / f"{split}-images.npy", generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8))
        np.save(tmp_path / f"{split}-labels.npy", generator.integers(0, 10, n))
    (tmp_path / "meta.json").write_text(json.dumps({"mean": [0.5] * 3, "std": [0.2] * 3}))
    return tmp_path


def test_evenstep_s_own_entry_runs_and_counts_each_image_once(bench, data):
    _, _, watching = bench
    words = [sys.executable, str(FOLDER / "peer_evenstep.py"), "--data", str(data), "--steps", "3"]
    words += ["--eval", "41", "--augment", "--started", repr(time.time())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    values = watching.read_json([(0.0, line) for line in done.stdout.splitlines()], 0.0)
    assert (values["steps"], values["test_samples"]) == (3, 41)
    assert values["launch_to_first_step_s"] > 0
    assert values["eval_images_per_s"] > 0
    assert values["steady_images_per_s"] is None  # fewer steps than those that do not count


def test_the_time_until_all_processes_are_gone_is_longer_than_that_of_the_first():
    # The started process ends at once, and leaves one that ends half a second later.
    parent = (
        "import json, subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(0.5)'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(json.dumps({'launch_to_first_step_s': 1, 'steady_images_per_s': 1, 'eval_images_per_s': 1, "
        "'test_samples': 1, 'ended_at': time.time()}))"
    )
    code = (
        "import json, sys, watching; watching.adopt_orphans(); "
        f"words = [sys.executable, '-S', '-c', {parent!r}]; "
        "options = {'cwd': '.', 'memory': False, 'timeout_s': 60}; "
        "print(json.dumps(watching.run_once(words, watching.read_json, **options)))"
    )
    # In a process of its own, because what is adopted stays so.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=True
    )
    values = json.loads(done.stdout)
    assert values["last_step_to_all_gone_s"] > values["last_step_to_exit_s"] + 0.2
    assert values["processes_left"] in (0, 1)  # 1 where the machine was so slow that it took a second


def test_pooling_first_has_the_same_bits(bench):
    import common
    import torch

    torch.manual_seed(0)
    plain = common.Net()
    first = common.PoolFirstNet()
    first.load_state_dict(plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    outputs = [net(images) for net in (plain, first)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for own, other in zip(plain.parameters(), first.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def test_another_number_of_test_images_needs_no_source(bench, data, tmp_path_factory, monkeypatch):
    import data as files

    def make(out, *words):
        monkeypatch.setattr(sys, "argv", ["data.py", str(out), *words])
        files.main()

    make(data, "--test", "7")
    with np.load(data / "data-7.npz") as arrays:
        assert len(arrays["x_train"]) == 400
        assert np.array_equal(arrays["x_test"], np.load(data / "test-images.npy")[:7])
        assert np.array_equal(arrays["y_test"], np.load(data / "test-labels.npy")[:7])
    with pytest.raises(SystemExit, match=r"42: the data in .* have 41 test images"):
        make(data, "--test", "42")
    with pytest.raises(SystemExit):
        make(tmp_path_factory.mktemp("empty"), "--test", "7")
