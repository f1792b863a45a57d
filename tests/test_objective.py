"""A loss and metrics of the user's own: what they may give, the same values on any number of processes."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import own_project
from evenstep import cli, evaluate, objective, report
from evenstep.banner import final_line
from evenstep.errors import ConfigError
from evenstep.flat import from_flat
from evenstep.metrics import classification
from evenstep.world import World


def config(**values):
    return from_flat({key: f"own_project:{value}" for key, value in values.items()})


def measure(*, loss="loss", metrics):
    measured = objective.metrics_of(config(loss=loss, metrics=metrics), classification)
    torch.manual_seed(0)
    return evaluate(own_project.model(), own_project.curve(7, 0), measured, world=World())


def test_a_loss_may_be_a_mean_or_a_sum_and_a_count():
    model, batch = own_project.model(), own_project.curve(9, 0).tensors
    mean = objective.loss_of(config(loss="loss"))(model, batch)
    total, count = objective.loss_of(config(loss="sum_and_count"))(model, batch)
    assert (mean.requires_grad, count) == (True, 9)
    assert (total / count).item() == pytest.approx(mean.item())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_sample_each", r"returned a tensor of float32 and shape \(9, 1\).*Take the \.mean\(\)"),
        ("a_number", r"returned an object of type float; expected the mean .* leave out \.item\(\)"),
        ("detached", r"returned a tensor without a gradient: .*without \.detach\(\)"),
        ("three", r"returned an object of type tuple; expected .* or \(sum, count\)"),
        ("los", r"loss 'own_project:los': own_project has no 'los'\. Did you mean 'loss'\?"),
        ("number", r"--loss own_project:number is of type int, which cannot be called.*loss\(model, batch\)"),
        ("Metrics", r"--loss own_project:Metrics is a class, .*loss = Metrics\(\.\.\.\)"),
    ],
)
def test_what_is_no_loss(name, message):
    with pytest.raises(ConfigError, match=message):
        objective.loss_of(config(loss=name))(own_project.model(), own_project.curve(9, 0).tensors)


def test_a_loss_is_measured_without_a_gradient():
    means = measure(metrics="metrics")
    assert list(means) == ["loss", "error", "close", "relative", "samples"]
    assert measure(loss="sum_and_count", metrics="metrics")["loss"] == pytest.approx(means["loss"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("metric", r"metrics 'own_project:metric': own_project has no 'metric'\. Did you mean 'metrics'\?"),
        ("number", r"--metrics own_project:number is of type int, which cannot be called"),
        ("clashing", r"--metrics own_project:clashing measures 'loss', a name that evenstep uses.*my_loss"),
        ("samples", r"--metrics own_project:samples measures 'samples', a name that evenstep uses itself"),
        (
            "unnamed",
            r"returned a tensor of float32 and shape \(7,\); expected a dict .*return {'error': values}",
        ),
        ("a_list", r"metric 'x' is an object of type list; expected real numbers in a tensor\. Return one"),
        ("columns", r"metric 'x' has shape \(7, 1\) for 7 samples; the mean would be wrong.*shape \(7,\)"),
        ("triple", r"metric 'x' is an object of type tuple; a tuple must be \(sum, count\)"),
    ],
)
def test_what_are_no_metrics(name, message):
    with pytest.raises(ConfigError, match=message):
        measure(metrics=name)


def test_evaluate_keeps_the_number_of_samples_for_itself():
    with pytest.raises(ConfigError, match=r"a metric is called 'samples'.*Give it another name"):
        evaluate(nn.Identity(), own_project.curve(3, 0), own_project.samples, world=World())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"loss": "crossentropy"},
            "unknown loss 'crossentropy'. Did you mean 'cross_entropy'?.*--loss module",
        ),
        (
            {"metrics": "accuracy"},
            "metrics is 'accuracy'; it must name a function .*--metrics my_project:metrics",
        ),
    ],
)
def test_what_the_options_refuse(values, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        from_flat(values)


def test_the_accuracy_of_a_classifier_may_be_ones_own():
    means = {"loss": 0.5, "accuracy": 0.75, "samples": 4}
    assert objective.own_metrics(config(loss="loss"), means) == {"accuracy": 0.75}
    assert objective.own_metrics(from_flat({}), means) == {}


def test_the_line_at_the_end():
    values = {"test_loss": 0.25, "test_samples": 601, "test_metrics": {"error": 0.125, "ratio": None}}
    assert (
        final_line(values) == "test loss 0.2500 (601 samples, each once), test error 0.1250, test ratio nan"
    )


@pytest.fixture
def evenstep(capfd, tmp_path, monkeypatch):
    """Runs the command; returns its exit code, and the JSON of its last line or its messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(command, *words):
        code = cli.main([command, "--device", "cpu", "--json", *map(str, words)])
        out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 else err

    return run


OWN = [f"--{name}=own_project:{name}" for name in ("data", "model", "loss", "metrics")]


@pytest.mark.slow
def test_a_job_that_is_no_classifier_on_one_process_and_on_two(evenstep, tmp_path):
    flags = (*OWN, "--lanes", 2, "--threads", 1, "--batch-size", 32, "--epochs", 6, "--optimizer", "adam")
    found = [evenstep("train", *flags, "--nproc", n, "--run-dir", f"run{n}", "--keep", 1)[1] for n in (1, 2)]
    keys = ("weights_sha256", "test_loss", "test_metrics", "test_accuracy", "test_samples", "train_loss")
    one, two = ({key: values[key] for key in keys} for values in found)
    assert one == two  # to the bit: JSON keeps floats whole
    assert one["test_accuracy"] is None
    assert list(one["test_metrics"]) == ["error", "close", "relative"]
    assert 0 < one["test_metrics"]["error"] < 0.5

    # The same numbers in the log of metrics and in the report, and again from the checkpoint.
    lines = [json.loads(line) for line in (tmp_path / "run2/metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert {name: evaluations[-1][name] for name in one["test_metrics"]} == one["test_metrics"]
    shown = report.collect(tmp_path / "run2")
    assert shown["result"]["test_metrics"] == one["test_metrics"]
    assert shown["eval"]["error"][-1] == one["test_metrics"]["error"]
    assert shown["evaluation"] is None  # no confusions of what is no classifier
    _, again = evenstep("eval", "--run-dir", "run2", "--nproc", 1)
    assert {key: again[key] for key in keys if key in again} == {
        key: one[key] for key in keys if key in again
    }

    # The best checkpoint is that of the lowest loss.
    losses = [line["loss"] for line in evaluations]
    scores = {one["step"]: one["score"] for one in shown["checkpoints"]}
    best = evaluations[losses.index(min(losses))]
    assert scores[best["step"]] == -best["loss"]


def test_more_than_loss_and_accuracy_of_a_classifier(evenstep, tmp_path):
    flags = ("--data", "digits", "--steps", 4, "--epochs", 1, "--nproc", 2, "--run-dir", "run")
    code, values = evenstep("train", *flags, "--metrics", "own_project:top3")
    assert code == 0
    assert values["test_accuracy"] <= values["test_metrics"]["top3"] <= 1
    assert report.collect(tmp_path / "run")["evaluation"]["samples"] == values["test_samples"]
    # eval takes other metrics; a mean over nothing is null, as JSON has no NaN
    code, again = evenstep(
        "eval", "--run-dir", "run", "--nproc", 1, "--metrics", "own_project:nothing_finite"
    )
    assert code == 0, again
    assert again["test_metrics"] == {"ratio": None}
    assert again["test_accuracy"] == values["test_accuracy"]


def test_a_mistake_ends_the_command_with_exit_code_2(evenstep):
    code, message = evenstep(
        "train", *OWN[:3], "--steps", 1, "--nproc", 2, "--metrics", "own_project:columns"
    )
    assert code == 2
    assert re.search(r"metric 'x' has shape \((\d+), 1\) for \1 samples; the mean would be wrong", message)
    assert torch.is_grad_enabled()
