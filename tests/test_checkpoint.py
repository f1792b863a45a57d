import contextlib
import dataclasses
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap

import pytest
import safetensors.torch
import torch
from torch import nn

from evenstep import checkpoint, manifest, metrics, models, rundir
from evenstep.errors import CheckpointError, ConfigError, MachineError
from evenstep.optim import make_optimizer


def save(run_dir, step, *, value=None, score=None, keep=3, meta=None):
    value = float(step) if value is None else value
    return checkpoint.save(
        run_dir,
        step=step,
        model={"w": torch.full((4,), value)},
        training={"step": step, "momentum": [torch.full((4,), -value)]},
        meta={"epoch": step // 10} if meta is None else meta,
        score=score,
        keep=keep,
    )


def names(run_dir):
    return sorted(os.listdir(run_dir / "checkpoints"))


def steps(run_dir):
    return [info.step for info in checkpoint.ls(run_dir)]


def damage(path, name=checkpoint.MODEL):
    """Change one byte in the middle of a file."""
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)


def change_manifest(path, **changes):
    """Change a manifest as somebody would who knows how it is made."""
    new = {**json.loads((path / checkpoint.MANIFEST).read_text()), **changes}
    (path / checkpoint.MANIFEST).write_text(json.dumps({**new, "sha256": manifest.seal(new)}))


# Round trips


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_everything_comes_back_to_the_bit(tmp_path, name):
    torch.manual_seed(0)
    model = models.resnet9(width=4).to(memory_format=torch.channels_last)
    optimizer = make_optimizer(model, name, weight_decay=0.1)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    training = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": 390}
    meta = {"epoch": 2, "numerics": {"threads": 1}, "name": "Zoë", "loss": None}
    path = checkpoint.save(tmp_path, step=390, model=model.state_dict(), training=training, meta=meta)

    assert path == tmp_path / "checkpoints" / "step-00000390"
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "training.pt"]
    loaded = checkpoint.load(path)
    assert (loaded.path, loaded.step, loaded.meta) == (path, 390, meta)
    assert list(loaded.training) == list(training)
    assert torch.equal(loaded.training["rng"], training["rng"])
    assert metrics.weights_sha256(loaded.model) == metrics.weights_sha256(model.state_dict())

    twin = models.resnet9(width=4)
    checkpoint.load_into(twin, loaded)
    twin_optimizer = make_optimizer(twin, name, weight_decay=0.1)
    twin_optimizer.load_state_dict(loaded.training["optimizer"])
    for each, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        for p in each.parameters():
            p.grad = torch.full_like(p, 0.01)
        its_optimizer.step()
    assert metrics.weights_sha256(twin.state_dict()) == metrics.weights_sha256(model.state_dict())
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.step = 3


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("turned", torch.randn(3, 2).t())
        self.register_buffer("small", torch.randn(2).bfloat16())


def test_tied_weights_are_stored_once_and_come_back_under_both_keys(tmp_path):
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    path = checkpoint.save(tmp_path, step=1, model=model.state_dict(), training={}, meta={})
    assert json.loads((path / "manifest.json").read_text())["aliases"] == {"out.weight": "embed.weight"}
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert sorted(stored) == ["count", "embed.weight", "out.bias", "small", "turned"]
    checkpoint.load_into(other, checkpoint.load(path))
    assert other.out.weight is other.embed.weight
    assert metrics.weights_sha256(other.state_dict()) == metrics.weights_sha256(model.state_dict())


def test_safetensors_own_load_model_reads_the_weights(tmp_path):
    model, other = Tied(), Tied()
    path = checkpoint.save(tmp_path, step=1, model=model.state_dict(), training={}, meta={})
    missing, unexpected = safetensors.torch.load_model(other, path / "model.safetensors")
    assert (list(missing), list(unexpected)) == ([], [])
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_weights_have_the_models_own_keys_inside_its_wrappers(tmp_path):
    inner = nn.Linear(2, 2)
    wrapped = torch.compile(nn.DataParallel(inner))
    assert set(wrapped.state_dict()) == {"_orig_mod.module.weight", "_orig_mod.module.bias"}
    assert checkpoint.unwrapped(wrapped) is inner
    assert checkpoint.unwrapped(inner) is inner
    path = checkpoint.save(
        tmp_path, step=1, model=checkpoint.unwrapped(wrapped).state_dict(), training={}, meta={}
    )
    twin = torch.compile(nn.DataParallel(nn.Linear(2, 2)))
    checkpoint.load_into(twin, checkpoint.load(path))
    assert torch.equal(checkpoint.unwrapped(twin).weight, inner.weight)


def test_a_model_with_a_child_of_its_own_named_module_keeps_its_keys(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert checkpoint.unwrapped(model) is model
    path = checkpoint.save(tmp_path, step=1, model=model.state_dict(), training={}, meta={})
    assert set(checkpoint.load(path).model) == {"module.weight", "module.bias"}


# Atomic writing


def test_nothing_is_written_if_something_cannot_be_stored(tmp_path):
    for model, training, meta, place in [
        ({"w": 3}, {}, {}, r"model\['w'\]"),
        ({}, {"a": [object()]}, {}, r"training\['a'\]\[0\]"),
        ({}, {}, {"a": {"b": object()}}, r"meta\['a'\]\['b'\]"),
    ]:
        with pytest.raises(ConfigError, match=f"cannot save {place}: it is "):
            checkpoint.save(tmp_path, step=1, model=model, training=training, meta=meta)
    with pytest.raises(ConfigError, match=r"keep is 0; .*--keep 1"):
        save(tmp_path, 1, keep=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing_call", range(6))
def test_a_failed_flush_leaves_the_older_checkpoint_alone(tmp_path, monkeypatch, failing_call):
    older = save(tmp_path, 10)
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == failing_call + 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    if failing_call < 5:  # three files, the directory, its parent
        with pytest.raises(MachineError, match=r"cannot write the checkpoint .*step-00000020.*Input/output"):
            save(tmp_path, 20)
    else:
        save(tmp_path, 20)
        assert len(calls) == 5
    monkeypatch.undo()
    if failing_call < 4:
        assert names(tmp_path) == [older.name]
    assert checkpoint.verify(older) == []
    assert checkpoint.load(checkpoint.latest(tmp_path)).model["w"][0] in (10, 20)
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]


CHILD = """
import os, resource, signal, sys, torch
from pathlib import Path
from evenstep import checkpoint
from evenstep.errors import MachineError

torch.set_num_threads(1)
run_dir = Path(sys.argv[1])

def save(step):
    model = {"w": torch.full((5000,), float(step))}
    checkpoint.save(run_dir, step=step, model=model, training={"w": torch.zeros(3000)}, meta={}, keep=2)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run_child(tmp_path, text):
    code = CHILD + textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kill_9_at_any_call_of_the_system_leaves_a_good_checkpoint(tmp_path):
    # The process kills itself before the n-th call, for every n, first while it writes a new step, then
    # while it replaces one that is there with other contents.
    lines = run_child(
        tmp_path,
        """
        NAMES = ["fsync", "rename", "replace"]

        def killed_at(n, step, value):
            calls = []
            def wrap(function):
                def call(*args, **kwargs):
                    calls.append(1)
                    if len(calls) == n:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **kwargs)
                return call
            def work():
                for name in NAMES:
                    setattr(os, name, wrap(getattr(os, name)))
                model = {"w": torch.full((9,), value)}
                checkpoint.save(run_dir, step=step, model=model, training={}, meta={})
            return in_child(work)

        save(10)
        for step in (20, 10):
            for n in range(1, 100):
                if step == 10:  # the newest, so that latest() must find it
                    for path in (run_dir / "checkpoints").glob("step-00000020*"):
                        checkpoint.shutil.rmtree(path)
                code = killed_at(n, step, 1000.0 + n)
                newest = checkpoint.latest(run_dir)
                loaded = checkpoint.load(newest)
                print(step, n, code, newest.name, float(loaded.model["w"][0]))
                if code == 0:
                    break
        """,
    )
    rows = [line.split() for line in lines]
    new = [row for row in rows if row[0] == "20"]
    replaced = [row for row in rows if row[0] == "10"]
    for group in (new, replaced):
        assert [row[2] for row in group] == ["-9"] * (len(group) - 1) + ["0"]
        assert len(group) > 5
    values = [float(row[4]) for row in new]
    assert values[:5] == [10.0] * 5  # three files, the directory, the rename
    assert values[-1] == 1000.0 + len(new)
    # While a step is being replaced either the old or the new contents are there, never none.
    assert replaced[-1][3:] == ["step-00000010", str(1000.0 + len(replaced))]
    assert {row[3] for row in replaced} == {"step-00000010", "step-00000010.replaced"}
    assert names(tmp_path) == ["step-00000010"]


def test_a_disk_that_is_full_at_any_byte_leaves_the_older_checkpoint(tmp_path):
    # A limit on the size of files stands in for a full disk: writing fails in the middle of a file.
    lines = run_child(
        tmp_path,
        """
        save(10)
        whole = sum(f.stat().st_size for f in (run_dir / "checkpoints/step-00000010").iterdir())
        for limit in (0, 1, 100, 5000, 13000, 19000, 20000, whole):
            def work():
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                try:
                    save(20)
                except MachineError as error:
                    text = str(error)
                    ok = "step-00000020" in text and "bytes are free" in text and "--run-dir" in text
                    os._exit(3 if ok else 4)
            code = in_child(work)
            newest = checkpoint.load(checkpoint.latest(run_dir))
            print(limit, code, newest.step, *sorted(os.listdir(run_dir / "checkpoints")))
        """,
    )
    rows = [line.split() for line in lines]
    assert [row[1:] for row in rows[:-1]] == [["3", "10", "step-00000010"]] * 7
    assert rows[-1][1:] == ["0", "20", "step-00000010", "step-00000020"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        MachineError, match=r"cannot write the checkpoint .*file/checkpoints/step-00000001: .*"
    ):
        save(tmp_path / "file", 1)


def test_what_dead_writers_left_is_removed_and_that_of_living_ones_is_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    parent = tmp_path / "checkpoints"
    left = parent / f".tmp-step-00000005-{dead.pid}"
    own = parent / f".tmp-step-00000006-{os.getpid()}"
    alive = parent / f".tmp-step-00000007-{os.getppid()}"
    for path in (left, own, alive):
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text("half")
    save(tmp_path, 10)
    assert names(tmp_path) == [alive.name, "step-00000010"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10, value=1.0, score=0.5)
    path = save(tmp_path, 10, value=2.0, score=0.7)
    loaded = checkpoint.load(path)
    assert loaded.model["w"].tolist() == [2.0] * 4
    assert names(tmp_path) == ["step-00000010"]
    assert checkpoint.ls(tmp_path)[0].score == 0.7


def test_saving_the_same_state_again_changes_only_the_manifest(tmp_path):
    path = save(tmp_path, 10, score=0.5)
    before = (path / checkpoint.MODEL).stat()
    assert save(tmp_path, 10, score=0.7, meta={"epoch": 5}) == path
    assert (path / checkpoint.MODEL).stat().st_ino == before.st_ino
    assert checkpoint.ls(tmp_path)[0].score == 0.7
    assert checkpoint.load(path).meta == {"epoch": 5}
    assert names(tmp_path) == ["step-00000010"]


def test_saving_a_damaged_step_again_repairs_it(tmp_path):
    path = save(tmp_path, 10)
    damage(path)
    save(tmp_path, 10)
    assert checkpoint.verify(path) == []


# Which are kept


def test_the_newest_are_kept(tmp_path):
    for step in range(10, 60, 10):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [40, 50]
    assert names(tmp_path) == ["step-00000040", "step-00000050"]


def test_the_best_is_kept_besides_the_newest(tmp_path):
    scores = {10: 0.1, 20: 0.9, 30: 0.3, 40: None, 50: 0.5, 60: float("nan")}
    for step, score in scores.items():
        save(tmp_path, step, score=score, keep=2)
    assert steps(tmp_path) == [20, 50, 60]
    assert [info.score for info in checkpoint.ls(tmp_path)] == [0.9, 0.5, None]


def test_of_equal_scores_the_newest_is_the_best(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, score=0.5 if step < 40 else 0.1, keep=1)
    assert steps(tmp_path) == [30, 40]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    (tmp_path / "checkpoints/step-00000030/manifest.json").unlink()
    checkpoint.prune(tmp_path, keep=2)
    # The damaged one is the newest, so it stays for whoever wants to look at it, until a good one follows.
    assert [(i.step, i.problem is None) for i in checkpoint.ls(tmp_path)] == [
        (10, True),
        (20, True),
        (30, False),
    ]
    save(tmp_path, 40, keep=2)
    assert steps(tmp_path) == [20, 40]


def test_prune_without_any_checkpoint_does_nothing(tmp_path):
    checkpoint.prune(tmp_path, keep=1)
    with pytest.raises(ConfigError, match="keep is 0"):
        checkpoint.prune(tmp_path, keep=0)


def test_a_checkpoint_that_cannot_be_removed_is_only_warned_about(tmp_path, monkeypatch, warnings):
    save(tmp_path, 10)

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(tmp_path, 20, keep=1)
    assert ["step-00000010: [Errno 13] Permission denied" in line for line in warnings] == [True]
    assert steps(tmp_path) == [20]


# Finding and checking


def test_there_is_no_latest_without_a_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.ls(tmp_path) == []
    (tmp_path / "checkpoints" / "step-old").mkdir(parents=True)
    assert checkpoint.latest(tmp_path) is None


def test_latest_is_by_number_and_not_by_text(tmp_path):
    save(tmp_path, 99_999_999)
    path = save(tmp_path, 100_000_000)
    assert checkpoint.latest(tmp_path) == path
    assert steps(tmp_path) == [99_999_999, 100_000_000]


def cut(path, name):
    (path / name).write_bytes((path / name).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda p: (p / "manifest.json").unlink(),
            "manifest.json is missing, so .*step-00000020 is not whole",
        ),
        (
            lambda p: cut(p, "manifest.json") or (p / "manifest.json").write_text("{"),
            "manifest.json cannot be read",
        ),
        (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text("[]"), "format_version None; this evenstep reads 1"),
        (
            lambda p: change_manifest(p, format_version=99),
            "format_version 99; this evenstep reads 1. Use the",
        ),
        (lambda p: change_manifest(p, files={}), "manifest.json lacks some of"),
        (
            lambda p: change_manifest(p, files={"../x": {"bytes": 1, "sha256": ""}}),
            "manifest.json lacks some of",
        ),
        (lambda p: change_manifest(p, step="20"), "manifest.json lacks some of"),
        (lambda p: change_manifest(p, meta=None), "manifest.json lacks some of"),
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing: No such file"),
        (lambda p: (p / "training.pt").unlink(), "training.pt is missing: No such file"),
        (lambda p: cut(p, "training.pt"), r"training.pt has [\d,]+ bytes, but [\d,]+ were written"),
    ],
)
def test_a_damaged_newest_one_is_skipped_by_latest_and_refused_by_load(tmp_path, warnings, harm, message):
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    harm(newer)
    assert checkpoint.latest(tmp_path) == older
    (warning,) = warnings
    assert "skipping a damaged checkpoint" in warning
    assert str(newer) in warning
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(newer)
    assert caught.value.exit_code == 4
    (problem,) = checkpoint.verify(newer)
    assert problem == str(caught.value)
    assert checkpoint.ls(tmp_path)[-1].problem == problem


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.TRAINING])
def test_a_changed_byte_is_found_by_its_hash(tmp_path, name):
    path = save(tmp_path, 10)
    written = json.loads((path / "manifest.json").read_text())["files"][name]["sha256"]
    damage(path, name)
    found = manifest.sha256_of(path / name)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: its SHA-256 is {found}, but {written}"):
        checkpoint.load(path)
    (problem,) = checkpoint.verify(path)
    assert "Remove" in problem
    assert "--resume" in problem


def test_verify_names_every_damaged_file(tmp_path):
    path = save(tmp_path, 10)
    assert checkpoint.verify(path) == []
    damage(path, checkpoint.MODEL)
    damage(path, checkpoint.TRAINING)
    first, second = checkpoint.verify(path)
    assert "model.safetensors is damaged" in first
    assert "training.pt is damaged" in second


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_cannot_be_read_is_a_problem_and_not_the_end(tmp_path, monkeypatch, capsys, gone):
    older, newer = save(tmp_path, 10), save(tmp_path, 20)
    read = manifest.sha256_of

    def hash_of(path):
        if path.parent != newer:
            return read(path)
        if gone:  # removed by the run that goes on, after its sizes were looked at
            shutil.rmtree(newer, ignore_errors=True)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "sha256_of", hash_of)
    assert rundir.newest_whole(tmp_path) == older
    said = capsys.readouterr().err
    assert said.count("cannot be read: Input/output error. Remove") == (0 if gone else 2), said
    if not gone:
        first, _ = checkpoint.verify(newer)
        assert first.startswith(f"{newer / checkpoint.MODEL} cannot be read")


def test_a_path_without_a_checkpoint_says_what_there_is(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint .*step-00000011; .* has: step-00000010"
    ):
        checkpoint.load(tmp_path / "checkpoints" / "step-00000011")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*; .* has: none"):
        checkpoint.load(tmp_path / "elsewhere" / "x")


def test_ls_tells_the_sizes(tmp_path):
    path = save(tmp_path, 10, score=0.25)
    (info,) = checkpoint.ls(tmp_path)
    assert info.num_bytes == sum(file.stat().st_size for file in path.iterdir())
    assert (info.path, info.step, info.score, info.meta, info.problem) == (path, 10, 0.25, {"epoch": 1}, None)


# No code from files


class Harm:
    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def seal(path):
    """Make the manifest fit the files, as somebody would who changes them on purpose."""
    files = {name: manifest.file_entry(path / name) for name in (checkpoint.MODEL, checkpoint.TRAINING)}
    change_manifest(path, files=files)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_file_is_not_run(tmp_path, as_zip):
    path = save(tmp_path, 10)
    harm = Harm()
    harm.path = tmp_path / "was_run"
    if as_zip:
        torch.save({"a": harm}, path / checkpoint.TRAINING)
    else:
        (path / checkpoint.TRAINING).write_bytes(pickle.dumps({"a": harm}, protocol=2))
    seal(path)
    assert checkpoint.verify(path) == []
    with pytest.raises(CheckpointError, match=r"training.pt holds objects whose reading would run code"):
        checkpoint.load(path)
    assert not harm.path.exists()
    # The same file does its harm when it is read without care, so the test would see it.
    with contextlib.suppress(Exception):
        torch.load(path / checkpoint.TRAINING, weights_only=False)
    assert harm.path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / checkpoint.MODEL).write_bytes(b"no safetensors"), "cannot be read"),
        (lambda p: torch.save([1], p / checkpoint.TRAINING), "training.pt holds a list, not a dict"),
        (lambda p: change_manifest(p, aliases={"v": "lost"}), "cannot be read: 'lost'"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, change, message):
    path = save(tmp_path, 10)
    change(path)
    seal(path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path)


# Fitting a model


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    path = checkpoint.save(
        tmp_path, step=1, model=nn.Linear(3, 2).state_dict() | {"extra": torch.zeros(1)}, training={}, meta={}
    )
    model = nn.Sequential(nn.Linear(3, 2))
    before = metrics.weights_sha256(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(model, checkpoint.load(path))
    assert "does not fit the model Sequential: missing: 0.weight, 0.bias; unexpected: " in str(caught.value)
    assert str(path) in str(caught.value)
    assert "--model" in str(caught.value)
    assert metrics.weights_sha256(model.state_dict()) == before


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear(3, 5),
            r"different: weight \(float32 \(2, 3\) in the checkpoint, float32 \(5, 3\) in the model\), bias",
        ),
        (
            nn.Linear(3, 2).bfloat16(),
            r"weight \(float32 \(2, 3\) in the checkpoint, bfloat16 \(2, 3\) in the model",
        ),
    ],
)
def test_other_shapes_and_dtypes_are_refused(tmp_path, model, message):
    path = checkpoint.save(tmp_path, step=1, model=nn.Linear(3, 2).state_dict(), training={}, meta={})
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_into(model, checkpoint.load(path))


def test_only_the_first_few_keys_are_named(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"missing: \S+, \S+, \S+ and 3 more; unexpected: w\."):
        checkpoint.load_into(models.Net(), checkpoint.load(path))
