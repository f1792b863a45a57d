"""Data that do not name their classes, labels without an output, and batches that are no images."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep import cli

PROJECT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

images, labels = torch.rand(24, 3, 8, 8), torch.arange(24) % 5


def unnamed():
    return TensorDataset(images, labels), TensorDataset(images, labels)


def named():
    pair = TensorDataset(images, labels)
    return {"train": pair, "test": pair, "classes": list("abcde")}


def untested():
    return TensorDataset(images, labels), None


def wrong_train():
    train = TensorDataset(images, torch.where(torch.arange(24) == 17, 12, labels))
    return {"train": train, "test": TensorDataset(images, labels), "classes": list("abcde")}


def wrong_test():
    test = TensorDataset(images, torch.where(torch.arange(24) == 23, -3, labels))
    return {"train": TensorDataset(images, labels), "test": test, "classes": list("abcde")}


class Dicts(TensorDataset):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image, "label": label}


def dicts():
    return Dicts(images, labels), Dicts(images, labels)


def model(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))


def default(num_classes=5):
    assert num_classes == 5
    return model(num_classes)


def net(num_classes, in_channels, image_size):
    assert (num_classes, in_channels, image_size) == (5, 3, 32)
    return model(num_classes)


def fixed():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
"""


@pytest.fixture
def evenstep(capfd, tmp_path, monkeypatch):
    """Runs the command; returns its exit code and what it writes to stderr."""
    monkeypatch.chdir(tmp_path)
    name = f"project_{tmp_path.name}".replace("-", "_")
    Path(f"{name}.py").write_text(PROJECT)

    def run(data, *words, model="model", nproc=1, alone=False):
        flags = ["--data", f"{name}:{data}", "--model", f"{name}:{model}", "--device", "cpu", "--epochs", 1]
        flags += ["--batch-size", 8, "--nproc", nproc, "--threads", 1, "--run-dir", "run", *words]
        command = ["train", *map(str, flags)]
        if not alone:
            return cli.main(command), capfd.readouterr().err
        # In a process of its own: a fork server that has begun in an earlier test has that test's stderr.
        done = subprocess.run(
            [sys.executable, "-m", "evenstep", *command], capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize(
    ("data", "model", "note"),
    [
        (
            "unnamed",
            "model",
            "num_classes 10: assumed, since the data do not say; `classes` beside train and test",
        ),
        ("named", "model", None),
        ("unnamed", "fixed", None),
        ("unnamed", "default", None),
        ("named", "net", "in_channels 3, image_size 32: assumed, since the data do not say\n"),
    ],
)
def test_what_the_data_do_not_say_is_told_or_the_models_default(data, model, note, evenstep):
    code, text = evenstep(data, model=model, alone=True)
    assert (code, "the data do not say" in text) == (0, note is not None), text
    assert note is None or f"  {note}" in text


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    ("data", "sample", "label"),
    [("wrong_train", "training sample 17", 12), ("wrong_test", "test sample 23", -3)],
)
def test_a_label_without_an_output_is_named(data, sample, label, nproc, evenstep):
    code, text = evenstep(data, nproc=nproc)
    message = (
        f"error: the label of {sample} is {label}, and the model gives 5 outputs, for the labels 0 to 4. "
    )
    assert (code, message in text) == (2, True), text


def test_image_sizes_need_images(evenstep):
    code, text = evenstep("dicts", "--image-sizes", "4,8")
    assert code == 2
    assert re.search(
        "error: --image-sizes scales images, and a batch .* a dict with the keys image, label", text
    )


def test_batchnorm_global_needs_batchnorm(evenstep):
    code, text = evenstep("named", "--batchnorm", "global")
    assert code == 2
    assert "--batchnorm global does nothing with --model project" in text


def test_data_may_have_no_test_set(evenstep):
    code, text = evenstep("untested", alone=True)
    assert code == 0, text
    assert "train images" in text
    assert "test" not in text.split("train images")[1].splitlines()[0]


@pytest.mark.parametrize("option", ["--tta flip", "--metrics a:b", "--evaluate-every 2"])
def test_what_is_said_of_a_test_set_needs_one(option, evenstep):
    code, text = evenstep("untested", *option.split())
    told = option.removeprefix("--").replace("-", "_")
    assert code == 2
    assert f"error: {told} does nothing with --data project" in text
