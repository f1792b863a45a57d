import json

import pytest
import safetensors.torch
import torch
from torch import nn

from evenstep import checkpoint, cli
from test_checkpoint import Tied, damage


def save(run_dir, step, score=None, **training):
    return checkpoint.save(
        run_dir,
        step=step,
        model={"w": torch.full((1000,), float(step))},
        training=training,
        meta={"epoch": step // 10},
        score=score,
    )


def run(*argv):
    return cli.main(["checkpoint", *map(str, argv)])


def test_ls_shows_a_line_for_each_checkpoint(tmp_path, capsys):
    save(tmp_path, 10, 0.25)
    save(tmp_path, 1020, 0.75)
    (save(tmp_path, 1030) / "training.pt").write_bytes(b"cut")
    assert run("ls", tmp_path) == 0
    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "epoch", "score", "size", "date", "state"]
    assert first.split()[:3] == ["10", "1", "0.2500"]
    assert first.split()[4] == "KB"
    assert 4 < float(first.split()[3]) < 9  # 4,000 bytes of weights, and the other files
    assert second.split()[:3] == ["1,020", "102", "0.7500*"]
    assert first.endswith("  ok")
    assert third.split()[:3] == ["1,030", "-", "-"]
    assert "damaged: " in third
    assert "training.pt has 3 bytes" in third


def test_ls_as_json(tmp_path, capsys):
    path = save(tmp_path, 10, 0.25)
    assert run("ls", tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["checkpoints"]
    assert found["run_dir"] == str(tmp_path)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert row.pop("date")[:2] == "20"
    assert row == {
        "step": 10,
        "epoch": 1,
        "score": 0.25,
        "best": True,
        "bytes": size,
        "state": "ok",
        "problem": None,
        "path": str(path),
    }


def test_verify_names_damaged_files_and_gives_4(tmp_path, capsys):
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    assert run("verify", tmp_path) == 0
    assert capsys.readouterr().out == f"{good}: ok\n{bad}: ok\n"
    damage(bad)
    assert run("ls", tmp_path) == 0
    assert capsys.readouterr().out.count("  ok") == 2  # the sizes are right; only verify reads the files
    assert run("verify", tmp_path) == 4
    told = capsys.readouterr()
    assert told.out == f"{good}: ok\n{bad}: damaged\n"
    assert f"{bad / 'model.safetensors'} is damaged: its SHA-256 is " in told.err
    assert run("verify", bad) == 4
    assert run("verify", good) == 0


@pytest.mark.parametrize("name", ["step-lr", "step-00000007"])
def test_a_run_that_is_called_as_checkpoints_are_is_a_run(tmp_path, capsys, name):
    path = save(tmp_path / name, 10)
    assert run("verify", tmp_path / name) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    assert run("export", tmp_path / name, "--output", tmp_path / "weights.pt") == 0
    (path / "manifest.json").unlink()  # a checkpoint without it is still one
    assert run("verify", path) == 4
    assert capsys.readouterr().out.splitlines()[-1] == f"{path}: damaged"
    assert run("verify", tmp_path / "step-none") == 4
    assert "the run directory" in capsys.readouterr().err


def test_export_gives_a_plain_state_dict(tmp_path, capsys):
    model = Tied()
    path = checkpoint.save(
        tmp_path, step=1, model=model.state_dict(), training={"averaged": None}, meta={"epoch": 0}
    )
    for name, read in [
        ("w.pt", lambda file: torch.load(file, weights_only=True)),
        ("w.safetensors", safetensors.torch.load_file),
    ]:
        file = tmp_path / name
        assert run("export", path, "--output", file) == 0
        assert capsys.readouterr().out == f"{file}: 6 tensors of {path}\n"
        weights = read(file)
        twin = Tied()
        twin.load_state_dict(weights)
        assert {key: value.tolist() for key, value in twin.state_dict().items()} == {
            key: value.tolist() for key, value in model.state_dict().items()
        }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "w.pt", "w.safetensors"]


def test_export_of_a_run_takes_its_newest_good_checkpoint(tmp_path):
    save(tmp_path, 10)
    (save(tmp_path, 20) / "model.safetensors").write_bytes(b"cut")
    assert run("export", tmp_path, f"--output={tmp_path / 'w.pt'}") == 0
    assert torch.load(tmp_path / "w.pt", weights_only=True)["w"][0] == 10


def test_export_of_a_run_goes_back_to_a_whole_checkpoint_but_not_from_one_that_is_named(tmp_path, capsys):
    save(tmp_path, 10)
    damaged = save(tmp_path, 20)
    damage(damaged)  # the size is right, the bytes are not
    file = tmp_path / "w.pt"
    assert run("export", tmp_path, f"--output={file}") == 0
    out, err = capsys.readouterr()
    assert "step-00000010" in out
    assert err.count("skipping a damaged checkpoint") == 1
    assert "step-00000020/model.safetensors is damaged" in err
    assert torch.load(file, weights_only=True)["w"][0] == 10
    assert run("export", damaged, f"--output={file}", "--force") == 4
    assert "step-00000020/model.safetensors is damaged" in capsys.readouterr().err
    damage(tmp_path / "checkpoints" / "step-00000010")
    assert run("export", tmp_path, f"--output={file}", "--force") == 4
    assert torch.load(file, weights_only=True)["w"][0] == 10


def test_export_replaces_no_file_without_force(tmp_path, capsys):
    path, file = save(tmp_path, 10), tmp_path / "w.pt"
    file.write_text("mine")
    assert run("export", path, "--output", file) == 2
    assert "w.pt is there already and would be lost" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert run("export", path, "--output", file, "--force") == 0
    assert torch.load(file, weights_only=True)["w"][0] == 10


def test_export_of_the_moving_average(tmp_path, capsys):
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)).state_dict()
    path = save(tmp_path, 10, averaged=averaged)
    assert run("export", path, "--output", tmp_path / "a.pt", "--average") == 0
    weights = torch.load(tmp_path / "a.pt", weights_only=True)
    assert sorted(weights) == ["bias", "weight"]
    assert torch.equal(weights["weight"], averaged["module.weight"])
    assert run("export", save(tmp_path, 20), "--output", tmp_path / "b.pt", "--average") == 4
    assert "has no moving average" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "'' is no action. Choose one of ls, verify, export"),
        (["lst", "x"], 2, "Did you mean 'ls'?"),
        (["ls"], 2, "takes one directory, and got 0: (none)"),
        (["ls", "a", "b"], 2, "takes one directory, and got 2: a b"),
        (["ls", "x", "--jsn"], 2, "unknown flag --jsn. Did you mean '--json'?"),
        (["ls", "nowhere"], 4, "the run directory nowhere is not there"),
        (["verify", "."], 4, "the run directory . has no checkpoint"),
        (["verify", "step-00000009"], 4, ""),
        (["export", "x"], 2, "needs --output FILE"),
        (["export", "step-00000009", "--output", "w.txt"], 2, "--output w.txt ends with '.txt'"),
        (["export", "step-00000009", "--output", "w.pt"], 4, "there is no checkpoint step-00000009"),
    ],
)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, argv, code, message):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == code
    assert message in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_an_error_of_the_machine(tmp_path, capsys):
    assert run("export", save(tmp_path, 10), "--output", tmp_path / "no" / "w.pt") == 3
    assert "cannot write" in capsys.readouterr().err


def test_help(capsys):
    assert run("--help") == 0
    assert "evenstep checkpoint ls RUN" in capsys.readouterr().out
