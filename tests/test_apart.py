"""The command's own process, which has no torch: what comes to it goes on to the process that works."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import descendants, gone_within, processes
from evenstep import apart, checkpoint
from test_owners import left

STEPS = ["--data", "digits", "--nproc", "1", "--threads", "1", "--device", "cpu", "--log-every", "1"]


@contextlib.contextmanager
def started(directory, *more, **how):
    """``evenstep train``, once it has done its first step."""
    words = [sys.executable, "-m", "evenstep", "train", *STEPS, "--epochs", "10000", "--run-dir", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*words, *more], cwd=directory, **pipes, **how) as process:
        try:
            assert any(line.startswith("step 1/") for line in process.stdout)
            yield process
        finally:
            process.terminate()  # to no avail where it has ended


@pytest.fixture
def command(tmp_path):
    """The command in a process group of its own, as a shell starts it in a terminal."""
    with started(tmp_path, preexec_fn=os.setpgrp) as process:
        yield process


def launching(command):
    """The process that does the work: below the fork server, at the head of a group of its own."""
    return next(pid for pid in descendants(command.pid) if os.getpgid(pid) == pid)


def alive(pids):
    table = processes()
    return [pid for pid in pids if pid in table and table[pid][1] != "Z"]


def saved(tmp_path):
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


def test_ctrl_c_in_a_terminal_comes_once_and_all_is_saved(command, tmp_path):
    assert "libtorch" not in Path(f"/proc/{command.pid}/maps").read_text()
    os.killpg(command.pid, signal.SIGINT)
    text, _ = command.communicate(timeout=60)
    assert command.returncode == 130, text
    assert "asked to stop: all ranks stopped and saved" in text
    assert saved(tmp_path)


def test_ctrl_backslash_in_a_terminal_ends_all_at_once_and_leaves_nothing(tmp_path):
    temporary = tmp_path / "t"
    temporary.mkdir()
    how = {"preexec_fn": os.setpgrp, "env": os.environ | {"TMPDIR": str(temporary)}}
    with started(tmp_path, "--checkpoint-every-steps", "1", **how) as command:
        pids = [command.pid, *descendants(command.pid)]
        assert not gone_within(lambda: not checkpoint.directories(tmp_path / "run"), 60)
        os.killpg(command.pid, signal.SIGQUIT)
        text, _ = command.communicate(timeout=60)
        assert command.returncode == 131, text
        assert "error" not in text
        assert "saved" not in text
        assert not gone_within(lambda: left(temporary, pids))
    newest = checkpoint.directories(tmp_path / "run")[0]
    assert checkpoint.verify(newest) == []


def test_ctrl_z_holds_the_work_fg_goes_on_and_kill_stops_it(command, tmp_path):
    working = launching(command)

    def state():
        return Path(f"/proc/{working}/stat").read_text().rpartition(")")[2].split()[0]

    os.kill(command.pid, signal.SIGTSTP)
    assert not gone_within(lambda: state() != "T")
    os.kill(command.pid, signal.SIGCONT)
    assert not gone_within(lambda: state() == "T")
    command.terminate()
    text, _ = command.communicate(timeout=60)
    assert command.returncode == 75, text
    assert saved(tmp_path)


def test_ctrl_z_does_nothing_where_no_shell_could_say_fg(tmp_path):
    with started(tmp_path, start_new_session=True) as command:
        os.killpg(command.pid, signal.SIGTSTP)
        assert any(line.startswith("step ") for line in command.stdout)
        command.terminate()
        text, _ = command.communicate(timeout=60)
        assert command.returncode == 75, text


def test_the_death_of_the_fork_server_is_one_of_all_workers_and_the_run_goes_on(command):
    server = processes()[launching(command)][0]
    os.kill(server, signal.SIGKILL)
    lines = iter(command.stdout)
    assert any("rank 0 died" in line for line in lines)
    assert any(line.startswith("step ") for line in lines)
    command.terminate()
    text, _ = command.communicate(timeout=60)
    assert command.returncode == 75, text


def test_its_death_is_the_end_of_all(command):
    others = [*descendants(command.pid)]
    assert others
    command.kill()
    command.wait()
    assert not gone_within(lambda: alive(others), 20)


def test_the_death_of_the_working_process_is_told(command):
    others = [*descendants(command.pid)]
    os.kill(launching(command), signal.SIGKILL)
    text, _ = command.communicate(timeout=60)
    assert command.returncode == 137
    assert "was ended by SIGKILL" in text
    assert "--resume" in text
    assert not gone_within(lambda: alive(others), 20)


def test_the_exit_code_is_that_of_the_work(tmp_path):
    words = [sys.executable, "-m", "evenstep", "train", *STEPS, "--steps", "2"]
    done = subprocess.run([*words, "--model", "os:nothing"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("evenstep: error: ") == 1


def test_a_process_that_prints_elsewhere_works_itself():
    with contextlib.redirect_stdout(io.StringIO()):
        assert apart.run(lambda code: code, 7) == 7
