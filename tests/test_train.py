"""The command as a user runs it: the same bits on any number of processes, resuming, and errors."""

import json

import numpy as np
import pytest

from evenstep import cli, report

SAMPLES = 34 * 16 + 5  # 35 steps of 16 an epoch, the last with 5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """An .npz of small pictures whose classes differ in brightness and colour."""
    path = tmp_path_factory.mktemp("data") / "pictures.npz"
    generator = np.random.default_rng(0)

    def pictures(n):
        labels = generator.integers(0, 10, n)
        noise = generator.integers(0, 90, (n, 32, 32, 3))
        return (noise + labels[:, None, None, None] * 16).astype(np.uint8), labels

    x_train, y_train = pictures(SAMPLES)
    x_test, y_test = pictures(301)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


@pytest.fixture
def evenstep(capfd, data, tmp_path, monkeypatch):
    """Runs the command; returns its exit code, and the JSON of its last line or its messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))

    def run(*words, command="train"):
        flags = ["--data", str(data), "--cache-dir", str(tmp_path / "cache"), "--device", "cpu"]
        code = cli.main([command, *flags, *map(str, words)])
        out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if "--json" in words and code == 0 else err

    return run


RESULT = ("weights_sha256", "test_accuracy", "test_loss", "test_samples", "train_loss", "step", "epoch")


def result(found):
    return {key: found[key] for key in RESULT}


@pytest.mark.parametrize("model", ["net", "own_models:NormNet"])
def test_the_same_bits_on_one_to_four_processes(evenstep, model):
    flags = ("--model", model, "--augment", "--lanes", 4, "--batch-size", 16, "--epochs", 2, "--json")
    found = []
    for nproc in (1, 2, 3, 4):
        code, values = evenstep("--nproc", nproc, "--run-dir", f"run{nproc}", *flags)
        assert code == 0
        assert values["world_size"] == nproc
        found.append(result(values))
    assert found[0]["step"] == 70
    assert found[0]["test_samples"] == 301
    assert all(value == found[0] for value in found[1:])


def test_fast_mode_is_the_negative_control(evenstep):
    flags = (
        "--model",
        "own_models:NormNet",
        "--mode",
        "fast",
        "--lanes",
        4,
        "--batch-size",
        16,
        "--epochs",
        1,
    )
    digests = set()
    for nproc in (1, 4):
        _, values = evenstep("--nproc", nproc, "--run-dir", f"run{nproc}", *flags, "--json")
        digests.add(values["weights_sha256"])
    assert len(digests) == 2


def test_stopping_in_the_middle_of_an_epoch_and_resuming_changes_no_bit(evenstep):
    flags = ("--model", "own_models:NormNet", "--augment", "--batch-size", 16, "--epochs", 2, "--json")
    _, whole = evenstep("--nproc", 1, "--lanes", 4, "--run-dir", "whole", *flags)
    code, stopped = evenstep("--nproc", 3, "--lanes", 4, "--run-dir", "run", "--steps", 37, *flags)
    assert (code, stopped["step"], stopped["epoch"]) == (0, 37, 1)
    # The options come from the run directory: only what is said anew has to be said.
    code, resumed = evenstep("--nproc", 2, "--run-dir", "run", "--resume", "--json")
    assert code == 0
    assert resumed["lanes"] == 4
    assert result(resumed) == result(whole)


def test_eval_gives_the_same_numbers_again(evenstep):
    flags = (
        "--model",
        "own_models:NormNet",
        "--augment",
        "--ema-decay",
        0.9,
        "--batch-size",
        16,
        "--epochs",
        1,
    )
    _, trained = evenstep("--nproc", 2, "--run-dir", "run", *flags, "--json")
    for words in (("--run-dir", "run"), ("--checkpoint", "run/checkpoints/step-00000035")):
        assert cli.main(["eval", *words, "--nproc", "1", "--json"]) == 0
    # read what was printed through the fixture's capture
    code, again = evenstep("--run-dir", "run", "--nproc", 3, "--json", command="eval")
    assert code == 0
    for key in ("test_accuracy", "test_loss", "test_samples", "weights_sha256"):
        assert again[key] == trained[key], key


def test_the_run_directory(evenstep, tmp_path):
    code, values = evenstep("--nproc", 2, "--run-dir", "run", "--epochs", 1, "--batch-size", 32, "--json")
    assert code == 0
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= {"config.toml", "metrics.jsonl", "logs", "checkpoints"}
    assert {path.name for path in (run / "logs").iterdir()} >= {"rank0.log", "rank1.log"}
    (step,) = (run / "checkpoints").iterdir()
    assert step.name == f"step-{values['step']:08d}"
    assert {path.name for path in step.iterdir()} == {"manifest.json", "model.safetensors", "training.pt"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"start", "train", "time", "eval", "checkpoint"}
    assert lines[-2]["accuracy"] == values["test_accuracy"] or lines[-1]["kind"] == "checkpoint"


def test_the_report_has_the_numbers_of_the_run(evenstep, tmp_path):
    code, values = evenstep("--nproc", 2, "--run-dir", "run", "--epochs", 1, "--batch-size", 32, "--json")
    assert code == 0
    assert (tmp_path / "run" / "report.html").is_file()
    shown = report.collect(tmp_path / "run")
    assert shown["result"]["weights_sha256"] == values["weights_sha256"]
    assert shown["numerics"] == values["numerics"]
    confusion = np.array(shown["evaluation"]["confusion"])
    assert confusion.sum() == values["test_samples"] == 301
    assert confusion.trace() / 301 == pytest.approx(values["test_accuracy"])
    assert all(one["image"].startswith("data:image/png") for one in shown["evaluation"]["wrong"])
    assert len(shown["times"]["step_s"]) == 2
    sources = {key: source for key, _, source, _ in shown["config"]}
    assert (sources["batch_size"], sources["lr"]) == ("flag", "default")
    # A resumed run says of each option where its value came from in the first place.
    assert evenstep("--run-dir", "run", "--resume", "--epochs", 2, "--json")[0] == 0
    shown = report.collect(tmp_path / "run")
    sources = {key: source for key, _, source, _ in shown["config"]}
    assert (sources["batch_size"], sources["epochs"], sources["lr"]) == ("flag", "flag", "default")
    assert [start["resumed"] for start in shown["starts"]] == [False, True]
    assert shown["evaluation"]["step"] == shown["step"] == shown["result"]["step"] == 36


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer", "adamw", "--weight-decay", "0.01"),
        # A few steps, since a CPU without instructions for bf16 takes ten times as long.
        ("--precision", "bf16", "--steps", "3"),
    ],
)
def test_options_that_change_the_arithmetic_keep_the_bits_equal(evenstep, flags):
    found = []
    for nproc in (1, 2):
        common = (
            "--lanes",
            2,
            "--batch-size",
            32,
            "--epochs",
            1,
            "--label-smoothing",
            "0.1",
            "--clip-norm",
            "1",
        )
        _, values = evenstep("--nproc", nproc, "--run-dir", f"run{nproc}", *common, *flags, "--json")
        found.append(result(values))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (("--batch-size", 2, "--lanes", 4), 2, "batch_size 2 is smaller than lanes 4"),
        (("--nproc", 3, "--lanes", 2), 2, "nproc 3 is above lanes 2"),
        (("--model", "nett"), 2, "unknown model 'nett'. Did you mean 'net'?"),
        (("--model", "own_models:five_outputs"), 2, "5 outputs"),
        (("--model", "own_models:explodes"), 5, "the loss is nan at step 0 (epoch 0), in lanes 0, 1"),
        (("--model", "own_models:raises"), 1, "ValueError: the head fell off"),
    ],
)
def test_errors_and_their_exit_codes(evenstep, flags, code, text):
    words = ("--nproc", 2, *flags) if "--nproc" not in flags else flags
    found, message = evenstep(*words, "--quiet")
    assert found == code
    assert text in message
    assert len(message.splitlines()) <= 12


def test_resuming_refuses_what_would_repeat_samples(evenstep, tmp_path):
    flags = ("--nproc", 1, "--lanes", 2, "--batch-size", 16, "--epochs", 2)
    assert evenstep("--run-dir", "run", "--steps", 3, *flags)[0] == 0
    resume = ("--run-dir", "run", "--resume", "--steps", 4)
    code, message = evenstep(*resume, "--batch-size", 32)
    assert code == 2
    assert "stands at step 3 of epoch 0, and the batch size was 16 and is 32 now" in message
    code, message = evenstep(*resume, "--seed", 1)
    assert code == 2
    assert "is of a run with seed 0, but the seed is 1 now" in message
    code, message = evenstep(*resume, "--data", "digits")
    assert code == 2
    assert "the data are not those of --data" in message
    code, message = evenstep(*resume, "--epochs", 3)
    assert code == 0
    assert "resumed with epochs 3 instead of 2" in (tmp_path / "run/logs/rank0.log").read_text()


def test_nothing_is_started_or_made_for_a_wrong_flag(evenstep, tmp_path):
    code, message = evenstep("--log-rotation", "nonsense")
    assert code == 2
    assert "log_rotation is 'nonsense'" in message
    code, message = evenstep("--data", "digit")
    assert code == 2
    assert "Did you mean 'digits'?" in message
    assert not any((tmp_path / "runs").glob("*"))
