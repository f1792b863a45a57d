import signal
import sys

import pytest

from evenstep import failure
from evenstep.errors import CheckpointError, DivergedError, StoppedError
from evenstep.failure import Frame, Record, first_failure, read_records, report, write_record

GONE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:35617"


def caught(error, rank=0):
    """The record of an error raised two calls down in this file."""

    def inner():
        raise error

    def outer():
        inner()

    try:
        outer()
    except BaseException as raised:
        return failure.record(raised, rank)


def made(rank, kind="ValueError", message="wrong", time=1.0, secondary=False, code=1, frames=()):
    return Record(rank, time, kind, message, frames, "", code, secondary)


def test_the_record_has_the_users_frames():
    record = caught(ValueError("seven"), rank=3)
    assert (record.rank, record.kind, record.message, record.exit_code) == (3, "ValueError", "seven", 1)
    assert [frame.function for frame in record.frames] == ["caught", "outer", "inner"]
    assert record.frames[-1].source == "raise error"
    assert record.frames[-1].is_user
    assert "Traceback" in record.traceback
    assert not record.secondary


def test_library_frames_are_left_out_but_for_the_innermost():
    import json

    def load():
        json.loads("{")

    with pytest.raises(json.JSONDecodeError) as error:
        load()
    functions = [frame.function for frame in failure.record(error.value, 0).frames]
    assert functions[-2:] == ["load", "raw_decode"]
    assert "loads" not in functions


def test_at_most_five_frames():
    def deep(n):
        if n == 0:
            raise ValueError("bottom")
        deep(n - 1)

    with pytest.raises(ValueError) as error:
        deep(20)
    assert len(failure.record(error.value, 0).frames) == 5


@pytest.mark.parametrize(
    ("error", "code", "secondary"),
    [
        (ValueError("x"), 1, False),
        (RuntimeError("x"), 1, False),
        (RuntimeError(GONE), 1, True),
        (ConnectionResetError(104, "Connection reset by peer"), 1, True),
        (ValueError(GONE), 1, False),
        (DivergedError("nan"), 5, False),
        (CheckpointError("bad"), 4, False),
        (StoppedError("saved"), 75, True),
        (SystemExit(7), 7, False),
        (SystemExit("a word"), 1, False),
        (SystemExit(), 0, False),
        (KeyboardInterrupt(), 130, False),
    ],
)
def test_exit_codes_and_consequences(error, code, secondary):
    record = caught(error)
    assert (record.exit_code, record.secondary) == (code, secondary)


def test_records_survive_the_file(tmp_path):
    records = [caught(ValueError("zweiter Fehler: ü"), 1), caught(RuntimeError(GONE), 0)]
    for record in records:
        write_record(tmp_path, record)
    assert read_records(tmp_path) == [records[1], records[0]]


def test_an_empty_directory_has_no_records(tmp_path):
    assert read_records(tmp_path) == []


@pytest.mark.parametrize(
    ("records", "exits", "deaths", "rank"),
    [
        # the earliest error of a worker's own
        ([made(0, time=2.0), made(1, time=1.0)], {}, {}, 1),
        # a lost peer is a consequence, even if it was noticed first
        ([made(0, "RuntimeError", GONE, 1.0, True), made(1, time=2.0)], {}, {}, 1),
        # a death without a record, whose time is when the line broke
        ([made(0, "RuntimeError", GONE, 1.0, True)], {1: -9, 0: 1}, {1: 0.9, 0: 1.1}, 1),
        # those left over are killed some seconds after the first error
        ([made(2, time=1.0)], {0: -9, 1: -9}, {0: 6.0, 1: 6.0}, 2),
        # and stopped by SIGTERM before the one that raised has ended
        ([made(2, time=1.0)], {0: -15, 1: -15}, {0: 0.5, 1: 0.5}, 2),
        # exit code 0 in the middle of the run
        ([], {0: -15, 1: 0}, {0: 2.0, 1: 1.0}, 1),
        # nothing but consequences: the earliest
        ([made(0, "RuntimeError", GONE, 3.0, True), made(1, "RuntimeError", GONE, 2.0, True)], {}, {}, 1),
        # somebody outside sent SIGTERM to one worker
        ([made(0, "RuntimeError", GONE, 2.0, True)], {1: -15, 0: 1}, {1: 1.9, 0: 2.1}, 1),
        # nothing but SIGTERM
        ([], {1: -15}, {}, 1),
    ],
)
def test_first_failure(records, exits, deaths, rank):
    assert first_failure(records, exits, deaths).rank == rank


def test_no_failure_at_all():
    assert first_failure([], {}) is None
    assert report([], {}) == "a worker failed, and left no word of why."


def test_report_of_an_error():
    frames = (
        Frame("/home/me/train.py", 12, "main", "step(batch)", True),
        Frame("/home/me/train.py", 7, "step", "", True),
    )
    records = [made(2, frames=frames), made(0, "RuntimeError", GONE, 2.0, True)]
    text = report(records, {0: 1, 1: -15, 3: -15}, world_size=4, log_path="run/logs/rank2.log")
    assert text.splitlines() == [
        "rank 2 failed: ValueError: wrong",
        "  /home/me/train.py:12 in main: step(batch)",
        "  /home/me/train.py:7 in step",
        "ranks 0, 1 and 3 were stopped",
        "log: run/logs/rank2.log",
    ]


def test_report_folds_the_same_error():
    records = [made(rank, time=float(rank)) for rank in range(4)]
    assert report(records, {}).splitlines() == [
        "rank 0 failed: ValueError: wrong",
        "the same error on ranks 0-3",
    ]


def test_report_names_a_later_error_of_another_kind():
    records = [made(0, time=1.0), made(1, "KeyError", "'lr'", time=2.0)]
    assert report(records, {}).splitlines() == [
        "rank 0 failed: ValueError: wrong",
        "later, rank 1: KeyError: 'lr'",
    ]


@pytest.mark.parametrize(
    ("code", "oom", "text"),
    [
        (
            -signal.SIGKILL,
            False,
            "rank 1 was killed by SIGKILL (killed by hand or by the kernel because memory",
        ),
        (
            -signal.SIGKILL,
            True,
            "rank 1 was killed by SIGKILL (the kernel killed it because memory ran out: use",
        ),
        (-signal.SIGSEGV, False, "rank 1 was killed by SIGSEGV (invalid memory access in native code"),
        (-signal.SIGBUS, False, "rank 1 was killed by SIGBUS (shared memory ran out"),
        (-signal.SIGUSR1, False, "rank 1 was killed by SIGUSR1."),
        (-60, False, "rank 1 was killed by signal 60."),
        (3, False, "rank 1 left with exit code 3 before its main returned"),
    ],
)
def test_report_of_a_death(code, oom, text):
    assert report([], {1: code}, world_size=2, out_of_memory=oom).startswith(text)


def test_exit_code_of_a_death_is_128_and_the_signal():
    assert first_failure([], {0: -9}).exit_code == 137


def test_report_has_at_most_12_lines():
    frames = tuple(Frame("/a.py", i, "f", "x", True) for i in range(5))
    message = "\n".join(f"line {i}" for i in range(50))
    records = [
        made(0, message=message, frames=frames),
        made(1, "KeyError", "k", 2.0),
        made(3, "OSError", "o", 3.0),
    ]
    lines = report(records, {2: -15}, world_size=5, log_path="log").splitlines()
    assert len(lines) == 12
    assert lines[0] == "rank 0 failed: ValueError: line 0"
    assert lines[-1] == "log: log"
    assert "  ..." in lines


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 1, 2, 3, 5], "ranks 0-3 and 5"),
        ([7, 0, 1, 2, 3, 5], "ranks 0-3, 5 and 7"),
    ],
)
def test_ranks_in_words(ranks, text):
    assert failure.ranks_in_words(ranks) == text


def test_the_memory_counter_is_read_from_the_control_group(tmp_path, monkeypatch):
    class FakePath(type(tmp_path)):
        def read_text(self):
            return "low 0\nhigh 0\noom 2\noom_kill 3\n"

    monkeypatch.setattr(failure, "Path", FakePath)
    assert failure.oom_kills() == 3
    monkeypatch.undo()
    assert failure.oom_kills() >= 0


def test_frames_of_standard_input_have_no_source_line():
    with pytest.raises(ZeroDivisionError) as error:
        exec(compile("def f():\n    1 / 0\nf()", "<stdin>", "exec"), {})
    frame = failure.record(error.value, 0).frames[-1]
    assert (frame.file, frame.line, frame.function, frame.source) == ("<stdin>", 2, "f", "")
    assert failure.line_of(frame) == "  <stdin>:2 in f"


def test_own_frames_are_hidden():
    from evenstep.flat import read_toml

    with pytest.raises(Exception) as error:
        read_toml("/nowhere.toml")
    files = {frame.file for frame in failure.record(error.value, 0).frames}
    assert files == {sys.modules[__name__].__file__}
