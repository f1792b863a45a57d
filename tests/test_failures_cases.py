"""What the report says of failures in real runs: where they happen, and how they are passed on."""

import os
import signal
import sys
import textwrap

import pytest
import torch

from evenstep import failure
from evenstep.errors import EvenstepError, WorkerError
from evenstep.launcher import launch
from scripts import CPU


def report_of(main, *args, nproc=1, kind=WorkerError, **options):
    """The lines of the report of a run that fails."""
    with pytest.raises(kind) as caught:
        launch(main, *args, nproc=nproc, grace_s=0.5, **CPU, **options)
    error = caught.value
    return str(error if isinstance(error, WorkerError) else error.__cause__).splitlines()


BROKEN = """
    import os

    def build(num_classes):
        return None

    def main(world):
        return build(10)

    if "RANK" in os.environ:
        raise ValueError("wrong at import")
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A user's module that cannot be imported by a worker."""
    path = tmp_path / "broken_by_user.py"
    path.write_text(textwrap.dedent(BROKEN))
    monkeypatch.syspath_prepend(tmp_path)
    import broken_by_user

    yield broken_by_user
    del sys.modules["broken_by_user"]


def test_a_module_that_fails_at_import(broken):
    lines = report_of(broken.main)
    assert lines[0] == "rank 0 failed: ValueError: wrong at import"
    assert lines[-1].endswith('in <module>: raise ValueError("wrong at import")')
    assert "broken_by_user.py:11" in lines[-1]


def test_a_model_whose_module_fails_at_import(broken):
    def main(world):
        from evenstep.models import build

        build("broken_by_user:build", num_classes=10)

    text = "\n".join(report_of(main, kind=(WorkerError, EvenstepError)))
    assert "wrong at import" in text
    assert "broken_by_user.py:11 in <module>" in text


class Data(torch.utils.data.Dataset):
    """Sample 5 fails."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i == 5:
            self.fail()
        return torch.zeros(3), 0


class TwoWords(Exception):
    """Cannot be made from a single word: neither torch nor pickle can make it again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def too_many():
    raise ValueError("sample is damaged\nsecond line")


def two_words():
    raise TwoWords("salt", "pepper")


def missing():
    return {}["label"]


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def read_all(world, data):
    for _ in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork"):
        pass


@pytest.mark.parametrize(
    ("fail", "first", "last"),
    [
        (too_many, "ValueError: sample is damaged (in DataLoader worker 0)", "in too_many: raise ValueError"),
        (two_words, "TwoWords: salt and pepper (in DataLoader worker 0)", "in two_words: raise TwoWords"),
        (missing, "KeyError: 'label' (in DataLoader worker 0)", 'in missing: return {}["label"]'),
    ],
)
def test_an_error_in_a_dataloader_worker_has_the_users_frames(fail, first, last):
    lines = report_of(read_all, Data(fail))
    assert lines[0] == f"rank 0 failed: {first}"
    assert any("in read_all: for _ in" in line for line in lines)
    assert any("in __getitem__: self.fail()" in line for line in lines)
    assert last in lines[-1]
    assert not any("Caught" in line or "_worker_loop" in line for line in lines)
    assert ("  second line" in lines) == (fail is too_many)


def test_a_dataloader_worker_that_is_killed():
    lines = report_of(read_all, Data(kill_me))
    assert "DataLoader worker (pid" in lines[0]
    assert "killed by signal: Killed" in lines[0] or "exited unexpectedly" in lines[0]
    assert len(lines) <= failure.MAX_LINES


def test_a_killed_dataloader_worker_and_the_kernels_memory_killer():
    error = RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")
    text = failure.report([failure.record(error, 0)], {}, out_of_memory=True)
    assert text.splitlines()[-1].startswith("during the run the kernel killed a process because memory ran")
    assert "kernel" not in failure.report([failure.record(error, 0)], {})


def test_text_that_only_looks_like_a_dataloaders():
    error = ValueError("Caught ValueError in DataLoader worker process 0.\nand nothing more")
    record = failure.record(error, 0)
    assert (record.kind, record.message) == ("ValueError", str(error))


class Mute(Exception):
    """Its text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TwoWords("salt", "pepper"), "TwoWords: salt and pepper"),
        (Mute(), "Mute: (its __str__ raises RuntimeError)"),
    ],
)
def test_exceptions_that_cannot_be_sent_or_shown(error, line):
    def main(world, make):
        raise make()

    lines = report_of(main, (lambda: TwoWords("salt", "pepper")) if isinstance(error, TwoWords) else Mute)
    assert lines[0] == f"rank 0 failed: {line}"
    assert lines[1].endswith("in main: raise make()")


def test_an_error_in_del_is_logged_and_ends_nothing(tmp_path):
    def main(world):
        class Held:
            def __del__(self):
                raise ValueError("too late")

        held = Held()
        del held
        return "went on"

    assert launch(main, nproc=1, run_dir=str(tmp_path), **CPU) == "went on"
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert "WARNING" in log
    assert "Held.__del__" in log
    assert "ValueError: too late" in log


def test_a_segfault_is_told_from_a_kill():
    def main(world):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        world.receive()

    lines = report_of(main, nproc=2)
    assert lines[0].startswith("rank 1 was killed by SIGSEGV (invalid memory access in native code")
    assert lines[1] == "rank 0 was stopped"


def test_the_same_error_on_all_ranks_is_told_once():
    def main(world):
        world.send("here")
        world.receive(30)
        raise ValueError("same")

    seen = []

    def on_message(rank, _):
        seen.append(rank)
        if len(seen) == 3:
            handle.send("fail")

    handle = launch(main, nproc=3, join=False, grace_s=5.0, on_message=on_message, **CPU)
    with pytest.raises(WorkerError) as caught:
        handle.wait(60)
    text = str(caught.value)
    assert text.count("ValueError: same") == 1
    assert len(text.splitlines()) <= failure.MAX_LINES
