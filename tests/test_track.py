"""Trackers, with fakes of their libraries that write down each call beside themselves."""

import importlib
import io
import json
import sys

import pytest

from evenstep import cli, track
from evenstep.banner import Facts
from evenstep.errors import MachineError
from evenstep.flat import from_flat
from evenstep.reporter import Reporter
from evenstep.world import World

NOTE = """
import json, pathlib
def note(*call):
    with pathlib.Path(__file__).with_suffix(".calls").open("a") as file:
        file.write(json.dumps(call) + "\\n")
"""
WANDB = """
class Run:
    def log(self, values, step): note("log", step, values)
    def finish(self): note("finish")
def init(**options):
    note("init", options)
    return Run()
"""
MLFLOW = """
import types
def set_experiment(name): note("set_experiment", name)
def start_run(run_id=None, run_name=None):
    note("init", {"run_id": run_id, "run_name": run_name})
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-1"))
def log_params(values): note("params", values)
def log_metrics(values, step): note("log", step, values)
def end_run(): note("finish")
"""
TRACKIO = """
def init(**options): note("init", options)
def log(values, step): note("log", step, values)
def finish(): note("finish")
"""
FAKES = {"wandb": WANDB, "mlflow": MLFLOW, "trackio": TRACKIO}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Makes the fakes importable, in workers too; returns the calls of one of them."""
    directory = tmp_path / "fakes"
    directory.mkdir()
    for name, text in FAKES.items():
        (directory / f"{name}.py").write_text(NOTE + text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(directory)

    def calls(name):
        file = directory / f"{name}.calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    yield calls
    for name in FAKES:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", FAKES)
def test_a_run_is_opened_filled_and_closed(name, fakes, tmp_path):
    tracker = track.open_tracker(name, tmp_path, {"lr": 0.1}, resumed=False)
    tracker.log({"train/loss": 0.5}, 20)
    tracker.close()
    calls = [call for call in fakes(name) if call[0] in ("init", "log", "finish")]
    assert [call[0] for call in calls] == ["init", "log", "finish"]
    assert calls[1][1:] == [20, {"train/loss": 0.5}]
    assert {"lr": 0.1} in [calls[0][1].get("config"), *(c[1] for c in fakes(name) if c[0] == "params")]


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("mlflow", "run_id"), ("trackio", "name")])
def test_a_resumed_run_is_the_same_run(name, key, fakes, tmp_path):
    for resumed in (False, True, False):
        track.open_tracker(name, tmp_path, {}, resumed=resumed).close()
    first, again, new = (call[1][key] for call in fakes(name) if call[0] == "init")
    if name == "mlflow":  # it chooses the id itself
        assert (first, again, new) == (None, "run-1", None)
    else:
        assert first == again != new


@pytest.mark.parametrize("name", FAKES)
def test_a_missing_library_is_an_error_that_says_how_to_install_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MachineError, match=rf"--track {name} needs the package {name}.*pip install {name}\)"):
        track.open_tracker(name, tmp_path, {}, resumed=False)


def test_a_library_that_fails_is_an_error_with_its_reason(tmp_path, monkeypatch, fakes):
    import wandb

    def init(**options):
        raise RuntimeError("no login.\nmore")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(MachineError, match=r"--track wandb: .* RuntimeError: no login\. The numbers"):
        track.open_tracker("wandb", tmp_path, {}, resumed=False)


def test_two_ranks_are_one_run(fakes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "--data",
        "digits",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--steps",
        "3",
        "--log-every",
        "1",
        "--quiet",
    ]
    words += ["--track", "wandb", "--cache-dir", str(tmp_path / "cache"), "--run-dir", "run"]
    assert cli.main(["train", *words]) == 0
    calls = fakes("wandb")
    assert [call[0] for call in calls].count("init") == 1
    assert calls[0][1]["config"]["batch_size"] == 128
    assert [(call[1], sorted(call[2])[0]) for call in calls if call[0] == "log"] == [
        (1, "train/images_per_s"),
        (2, "train/images_per_s"),
        (3, "train/images_per_s"),
        (3, "eval/accuracy"),
    ]
    assert calls[-1] == ["finish"]


def test_a_tracker_that_fails_on_the_way_does_not_end_the_training(fakes, tmp_path):
    stream = io.StringIO()
    config = from_flat({"track": "mlflow", "log_every": 1})
    facts = {
        "train_samples": 8,
        "test_samples": 8,
        "steps_per_epoch": 1,
        "total_steps": 3,
        "num_parameters": 1,
    }
    with Reporter(config, World(run_dir=str(tmp_path)), stream) as reporter:
        reporter.start(Facts(data="digits", **facts))
        import mlflow

        reporter.step(1, 0, 1.0, 0.1, 8)
        mlflow.log_metrics = None
        reporter.step(2, 0, 1.0, 0.1, 8)
        reporter.step(3, 0, 1.0, 0.1, 8)
    assert [call[1] for call in fakes("mlflow") if call[0] == "log"] == [1]
    assert stream.getvalue().count("--track stops at step 2: TypeError") == 1
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
