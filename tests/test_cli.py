import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from evenstep import checkpoint, cli
from evenstep.errors import StoppedError, WorkerError
from evenstep.flat import from_flat, read_toml
from test_checkpoint import damage

RESULT = {"test_accuracy": 0.5, "test_samples": 10, "step": 4, "run_dir": "r", "weights_sha256": "ab" * 32}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def calls(monkeypatch):
    """The command with a launcher that starts nothing and writes down what it was asked."""
    seen = []

    def launch(main, *args, **keywords):
        seen.append((main, args, keywords))
        return RESULT

    def prepare(spec, **_):
        seen.append(f"prepare {spec}")
        auto = spec == "auto"
        return types.SimpleNamespace(
            spec="digits" if auto else spec, note="no cifar10 here" if auto else None
        )

    modules = {
        "evenstep.launcher": {"launch": launch, "warm_up": lambda: seen.append("warm_up")},
        "evenstep.jobs": {"train_job": "train_job", "eval_job": "eval_job"},
        "evenstep.data.sources": {"prepare": prepare},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def failing(monkeypatch, error):
    def launch(*_, **__):
        raise error

    monkeypatch.setattr(sys.modules["evenstep.launcher"], "launch", launch)


def run_python(code, *, env=None):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize(
    "argv", [["--help"], ["train", "--help"], ["eval", "--help"], ["config", "show"], ["--version"]]
)
def test_what_only_prints_does_not_import_torch(argv):
    heavy = ("torch", "torchvision", "numpy")
    done = run_python(
        f"import sys; from evenstep.cli import main; code = main({argv}); "
        f"sys.exit(code or [m for m in {heavy} if m in sys.modules] or 0)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "evenstep", "--version"], capture_output=True, text=True)
    assert re.fullmatch(r"evenstep \d+\.\d+\.\d+\S*\n", done.stdout)


def test_help_lists_the_commands_and_the_exit_codes(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command}" in text for command in cli.COMMANDS)
    assert "75 stopped and saved" in text


def test_no_command_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert "usage: evenstep COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["trian"], 2, "unknown command 'trian'. Did you mean 'train'? Choose one of init, train, run, eval"),
        (["config"], 2, "evenstep config needs the word show, and got nothing"),
        (["config", "shw"], 2, "evenstep config needs the word show, and got 'shw'"),
        (["config", "show", "--sed", "1"], 2, "unknown flag --sed. Did you mean '--seed'?"),
        (["train", "--batch-size", "0"], 2, "batch_size is 0"),
        (["train", "--resume"], 4, "no run in runs/"),
        (["train", "--run-dir", "file/x"], 3, "cannot write the run directory file/x"),
        (["eval"], 2, "needs one of --run-dir and --checkpoint"),
        (["eval", "--run-dir", "x"], 4, "has no checkpoint to evaluate"),
    ],
)
def test_an_error_is_one_message_and_the_documented_code(calls, tmp_path, capsys, argv, code, message):
    (tmp_path / "file").write_text("")
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("evenstep: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerError("rank 1 died", exit_code=137, rank=1), 137),
        (StoppedError("saved"), 75),
        (KeyboardInterrupt(), 130),
        (SystemExit(2), 2),
    ],
)
def test_exit_codes_of_a_run(calls, monkeypatch, error, code):
    failing(monkeypatch, error)
    assert cli.main(["train", "--quiet"]) == code


def test_a_closed_pipe_is_no_traceback():
    code = (
        "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r); "
        "from evenstep.cli import main; sys.exit(main(['config', 'show']))"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (141, "")


def test_train_launches_the_job_with_the_config(calls, tmp_path, capsys):
    argv = ["train", "--run-dir", "r", "--nproc", "2", "--lanes", "4", "--data", "digits", "--seed", "7"]
    assert cli.main(argv) == 0
    warm, prepared, (job, (config,), keywords) = calls
    assert (warm, prepared, job) == ("warm_up", "prepare digits", "train_job")
    assert config == from_flat({"run_dir": "r", "nproc": 2, "lanes": 4, "data": "digits", "seed": 7})
    assert {key: keywords[key] for key in ("nproc", "lanes", "seed", "run_dir", "resume", "mode")} == {
        "nproc": 2, "lanes": 4, "seed": 7, "run_dir": "r", "resume": False, "mode": "exact"
    }  # fmt: skip
    assert read_toml(tmp_path / "r" / "config.toml")["lanes"] == 4
    assert capsys.readouterr().out.startswith("test accuracy 50.00 % (10 images")


@pytest.mark.parametrize("argv", [["train", "--sed", "1"], ["eval"], ["eval", "--run-dir", "none"]])
def test_no_fork_server_starts_for_a_mistyped_flag(calls, argv):
    assert cli.main(argv) in (2, 4)
    assert calls == []


def test_json_of_a_loss_that_is_not_finite_is_null(calls, capsys, monkeypatch):
    monkeypatch.setitem(RESULT, "test_loss", float("nan"))
    assert cli.main(["train", "--json", "--smoke-test"]) == 0
    assert '"test_loss": null' in capsys.readouterr().out.splitlines()[-1]


def test_json_is_the_last_line_of_stdout(calls, capsys):
    assert cli.main(["train", "--json", "--smoke-test"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == RESULT
    assert "smoke test: steps 4" in err


def test_what_auto_stands_for_is_said_and_kept(calls, tmp_path, capsys):
    assert cli.main(["train", "--run-dir", "r"]) == 0
    assert "no cifar10 here" in capsys.readouterr().err
    assert read_toml(tmp_path / "r" / "config.toml")["data"] == "digits"
    assert calls[-1][1][0].data.data == "digits"


def test_where_auto_stands_for_the_digits_no_data_dir_is_saved(calls, tmp_path):
    assert cli.main(["train", "--run-dir", "r", "--data-dir", "x"]) == 0
    assert read_toml(tmp_path / "r" / "config.toml")["data_dir"] == "data"
    assert json.loads((tmp_path / "r" / "sources.json").read_text())["data_dir"] == "default"
    assert cli.main(["train", "--run-dir", "s", "--config", "r/config.toml"]) == 0


def test_quiet_leaves_only_the_result(calls, capsys):
    assert cli.main(["train", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == ""


def test_a_second_start_in_the_same_run_needs_resume(calls, tmp_path, capsys):
    assert cli.main(["train", "--run-dir", "r", "--lanes", "3", "--epochs", "5"]) == 0
    checkpoint = tmp_path / "r" / "checkpoints" / "step-00000009"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert cli.main(["train", "--run-dir", "r"]) == 2
    assert "already has a checkpoint of step 9" in capsys.readouterr().err
    assert cli.main(["train", "--run-dir", "r", "--resume", "--nproc", "1"]) == 0
    _, (config,), keywords = calls[-1]
    assert (keywords["lanes"], keywords["nproc"], keywords["resume"], config.optim.epochs) == (3, 1, True, 5)


def test_eval_launches_the_job_with_the_runs_config(calls, tmp_path, capsys):
    assert cli.main(["train", "--run-dir", "r", "--model", "resnet9", "--data", "digits"]) == 0
    checkpoint = tmp_path / "r" / "checkpoints" / "step-00000009"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert cli.main(["eval", "--run-dir", "r", "--nproc", "2", "--json"]) == 0
    job, (config, path), keywords = calls[-1]
    assert (job, config.model.model, config.data.data) == ("eval_job", "resnet9", "digits")
    assert path == "r/checkpoints/step-00000009"
    assert (keywords["nproc"], keywords["lanes"], keywords["run_dir"]) == (2, None, None)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == RESULT


def test_eval_of_a_run_goes_back_to_a_whole_checkpoint_but_not_from_one_that_is_named(calls, capsys):
    assert cli.main(["train", "--run-dir", "r", "--data", "digits"]) == 0
    weights = {"w": torch.zeros(1000)}
    for step in (9, 18):
        path = checkpoint.save("r", step=step, model=weights, training={}, meta={})
    damage(path)
    capsys.readouterr()
    assert cli.main(["eval", "--run-dir", "r", "--nproc", "1"]) == 0
    assert calls[-1][1][1] == "r/checkpoints/step-00000009"
    shown = capsys.readouterr().err
    assert shown.count("skipping a damaged checkpoint") == 1
    assert "step-00000018/model.safetensors is damaged" in shown
    assert cli.main(["eval", "--checkpoint", str(path), "--nproc", "1"]) == 0  # whose reading fails
    assert calls[-1][1][1].endswith("r/checkpoints/step-00000018")
    assert "skipping" not in capsys.readouterr().err


def under_torchrun(monkeypatch, rank):
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def test_under_torchrun_only_rank_zero_speaks_and_writes(calls, tmp_path, monkeypatch, capsys):
    under_torchrun(monkeypatch, 1)
    assert cli.main(["train", "--run-dir", "r", "--smoke-test"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "r" / "config.toml").exists()
    assert "warm_up" not in calls
    assert calls[-1][2]["nproc"] == 2

    under_torchrun(monkeypatch, 0)
    assert cli.main(["train", "--run-dir", "r", "--smoke-test"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("test accuracy")
    assert err.startswith("smoke test")
    assert (tmp_path / "r" / "config.toml").exists()


def test_torchrun_with_more_processes_than_lanes(calls, monkeypatch, capsys):
    under_torchrun(monkeypatch, 1)
    assert cli.main(["train", "--run-dir", "r", "--lanes", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("evenstep rank 1: error: environment started 2 processes, which is above lanes 1")
    assert "--lanes 2" in err


def test_the_users_own_modules_are_found(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert cli.main(["train", "--run-dir", "r", "--quiet"]) == 0
    assert sys.path[0] == os.getcwd()


def test_config_show_prints_every_value_with_its_source(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("batch_size = 256\n")
    assert cli.main(["config", "show", "--config", "run.toml", "--seed", "3"]) == 0
    rows = dict(re.match(r"(\S+) +(\S+ +.*)", line).groups() for line in capsys.readouterr().out.splitlines())
    assert rows["batch_size"].split(maxsplit=1) == ["256", "file run.toml"]
    assert rows["seed"].split() == ["3", "flag"]
    assert rows["lanes"].split() == ["-", "default"]
    assert rows["resume"].split() == ["false", "default"]


def test_config_show_toml_is_read_again(tmp_path, capsys):
    assert cli.main(["config", "show", "--toml", "--seed", "3", "--lr", "0.2"]) == 0
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    assert from_flat(read_toml(tmp_path / "run.toml")) == from_flat({"seed": 3, "lr": 0.2})


@pytest.mark.parametrize(
    ("words", "code", "stream"),
    [(["--version"], 0, "out"), (["trian"], 2, "err"), (["train", "--resume"], 4, "err")],
)
def test_the_process_ends_at_once_with_the_code_and_all_that_was_printed(tmp_path, words, code, stream):
    """Nothing is lost although the interpreter is not taken apart, not even in a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert ("evenstep" in done.stdout) == (stream == "out")
    assert ("evenstep: error: " in done.stderr) == (stream == "err")
