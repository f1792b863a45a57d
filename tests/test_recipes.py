"""Recipes: what they expand to, and that the fast one has the same bits on any number of processes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from evenstep import cli, options
from evenstep.errors import ConfigError
from evenstep.flat import from_flat, to_flat, write_toml
from evenstep.recipes import RECIPES

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_what_it_says_and_names_itself_as_the_source(name):
    asked = options.parse(["--recipe", name])
    changed = {key for key, source in asked.sources.items() if source == f"recipe {name}"}
    assert changed == set(RECIPES[name])
    assert asked.config == from_flat({**RECIPES[name], "recipe": name})


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_every_option_of_a_recipe(name):
    section = re.search(rf"^## `{name}`$.*?(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[0]
    flags = re.findall(r"```sh\n(evenstep train .*?)```", section, re.S)[-1].replace("\\\n", " ").split()
    told = to_flat(options.parse(flags[2:]).config)
    assert told == to_flat(options.parse(["--recipe", name]).config) | {"recipe": None}


def test_flags_and_files_win_over_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('recipe = "fast"\nbatch_size = 512\nepochs = 3\n')
    asked = options.parse(["--config", "run.toml", "--epochs", "2"])
    assert (asked.config.model.model, asked.config.optim.batch_size, asked.config.optim.epochs) == (
        "whitenet",
        512,
        2,
    )
    wanted = {
        "model": "recipe fast",
        "batch_size": "file run.toml",
        "epochs": "flag",
        "recipe": "file run.toml",
    }
    assert {key: asked.sources[key] for key in wanted} == wanted


def test_what_a_run_has_none_of_is_not_taken_from_the_recipe_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = options.parse(["--recipe", "fast", "--image-sizes", "None", "--run-dir", "run"])
    assert asked.config.data.image_sizes is None
    Path("run").mkdir()
    Path("run/config.toml").write_text(write_toml(asked.config))
    monkeypatch.setattr(options, "checkpoints", lambda run_dir: [run_dir])
    for argv in (["--resume", "--run-dir", "run", "--recipe", "fast"], ["--config", "run/config.toml"]):
        assert options.parse(argv).config.data.image_sizes is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recipe", "fats"], "unknown recipe 'fats'. Did you mean 'fast'? Choose --recipe"),
        (["--image-sizes", "16,x"], "image_sizes is '16,x'; expected whole numbers above 0 with commas"),
        (["--image-sizes", "0"], "image_sizes is '0'; expected"),
        (["--crop-padding", "-1"], "crop_padding is -1; it must be 0 (no crop) or more pixels"),
        (["--lr-rest", "0"], "lr_rest is 0.0; it must be above 0"),
    ],
)
def test_wrong_options_are_refused(argv, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        options.parse(argv)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pictures.npz"
    generator = np.random.default_rng(0)

    def pictures(n):
        labels = np.sort(generator.integers(0, 10, n))  # as the files of a folder are
        noise = generator.integers(0, 90, (n, 16, 16, 3))
        return (noise + labels[:, None, None, None] * 16).astype(np.uint8), labels

    x_train, y_train = pictures(200)
    x_test, y_test = pictures(120)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


@pytest.fixture
def evenstep(capfd, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words, command="train", data=data):
        flags = ["--data", str(data), "--cache-dir", str(tmp_path / "cache"), "--device", "cpu"]
        code = cli.main([command, *flags, *map(str, words), "--json"])
        out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 else err

    return run


RESULT = ("weights_sha256", "test_accuracy", "test_loss", "test_samples", "train_loss", "step", "epoch")


def result(found):
    return {key: found[key] for key in RESULT}


def test_the_fast_recipe_has_the_same_bits_on_any_number_of_processes_and_after_resuming(evenstep):
    # Ten steps: five at 12 pixels, five at 16.
    flags = ("--recipe", "fast", "--batch-size", 40, "--epochs", 2, "--image-sizes", "12,16")
    code, whole = evenstep("--nproc", 1, "--run-dir", "one", *flags)
    assert code == 0
    assert (whole["step"], whole["lanes"]) == (10, 4)
    code, stopped = evenstep("--nproc", 2, "--run-dir", "two", *flags, "--steps", 7)
    assert (code, stopped["step"]) == (0, 7)
    code, resumed = evenstep("--nproc", 2, "--run-dir", "two", "--resume")
    assert code == 0
    assert result(resumed) == result(whole)
    code, again = evenstep("--nproc", 2, "--run-dir", "two", command="eval")
    assert code == 0
    assert (again["test_accuracy"], again["test_loss"]) == (whole["test_accuracy"], whole["test_loss"])
    code, plain = evenstep("--nproc", 1, "--run-dir", "plain", *flags, "--tta", "none")
    assert code == 0
    assert plain["weights_sha256"] == whole["weights_sha256"]
    assert plain["test_loss"] != whole["test_loss"]


def test_a_resumed_run_keeps_its_recipe(evenstep):
    flags = ("--recipe", "fast", "--batch-size", 40, "--steps", 1, "--nproc", 1, "--run-dir", "run")
    assert evenstep(*flags)[0] == 0
    code, text = evenstep("--run-dir", "run", "--resume", "--recipe", "mission")
    assert code == 2
    assert (
        "--recipe mission does not go with --resume: the run in run has its options already, those of fast"
        in text
    )


def test_a_model_that_computes_weights_from_images_needs_images(evenstep):
    Path("own_data.py").write_text(
        "import torch\n"
        "def pictures():\n"
        "    return [torch.utils.data.TensorDataset(torch.rand(8, 3, 16, 16), torch.arange(8))] * 2\n"
    )
    code, text = evenstep("--model", "whitenet", "--batch-size", 4, "--nproc", 1, data="own_data:pictures")
    assert code == 2
    assert "the model whitenet computes weights from training images" in text
