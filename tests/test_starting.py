"""evenstep init: the project works as it is, and nothing is overwritten."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep import cli, options, starting
from evenstep.errors import MachineError

STARTER = Path(starting.__file__).parent / "starter"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(directory, *words):
    done = subprocess.run(words, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_starter_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "deep/project"]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "deep/project").iterdir()}
    there = {path.name: path.read_text() for path in STARTER.iterdir() if path.is_file()}
    assert written == there
    assert "cd deep/project\nevenstep train --config run.toml" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_project_trains_and_its_own_test_passes(tmp_path, monkeypatch, capfd):
    starting.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = ["--nproc", "2", "--threads", "1", "--device", "cpu", "--json"]
    assert cli.main(["train", "--config", "run.toml", *flags]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["world_size"], result["lanes"], result["step"]) == (2, 4, 200)
    assert result["test_accuracy"] > 0.95
    assert set(result["test_metrics"]) == {"accuracy", "confidence"}
    # The loop of one's own is the same training: what it prints is equal to the last bit.
    for way in ((), ("-m", "evenstep", "run")):
        printed = run(tmp_path, sys.executable, "-W", "error", *way, "train.py").splitlines()[-1]
        assert json.loads(printed.replace("'", '"')) == {**result["test_metrics"], "samples": 900}
    assert "2 passed" in run(
        tmp_path, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_project.py"
    )


def test_the_options_and_commands_of_the_project_are_right(tmp_path, monkeypatch):
    starting.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^evenstep (\w+) (.*)$", (tmp_path / "README.md").read_text(), re.M)
    assert {command for command, _ in commands} == {"train", "eval", "doctor", "verify"}
    for command, flags in commands:
        if command == "train" and "--resume" not in flags:
            options.parse(flags.split())


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.py").write_text("mine")
    (tmp_path / "model.py").symlink_to("nowhere")
    assert cli.main(["init"]) == 2
    message = capsys.readouterr().err
    assert "model.py, data.py: there already, and evenstep init overwrites nothing. Choose another" in message
    assert (tmp_path / "data.py").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("argv", [["init", "a", "b"], ["init", "--force"]])
def test_one_directory_and_no_flags(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    assert "evenstep init takes one directory and no flags, and got" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        MachineError, match=r"cannot write .*file/project: Not a directory. Choose a directory"
    ):
        starting.write(tmp_path / "file" / "project")


def test_help(capsys):
    assert cli.main(["init", "--help"]) == 0
    assert "never overwritten" in capsys.readouterr().out
