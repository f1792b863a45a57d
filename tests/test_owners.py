"""What a launch leaves outside its run directory when its processes are killed: nothing, whoever is."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from conftest import descendants, gone_within
from evenstep import owners, sharedmem
from evenstep.errors import MachineError

DEAD = 4194304999  # above every process id
LAUNCHING = """
    import os, sys, time
    from evenstep.launcher import launch

    def main(world):
        if sys.argv[1:] == ["short"]:
            return
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(600)

    if __name__ == "__main__":
        launch(main, nproc=2, device="cpu", threads=1)
"""


def directory(parent, name, record=None, mode=0o700):
    path = parent / f"evenstep-{name}"
    path.mkdir(mode=mode)
    if record is not None:
        (path / "owner").write_text(record)
    return path


def names(paths):
    return sorted(path.name.removeprefix("evenstep-") for path in paths)


def test_only_what_belongs_beyond_doubt_to_a_dead_process_of_this_user_is_abandoned(tmp_path):
    boot, namespace = owners._boot(), owners._namespace()
    mine = f"{os.getpid()} {owners._started(os.getpid())}"
    records = {
        "dead": f"{DEAD} 1 locked {boot} {namespace}",
        "dead-torchrun": f"{DEAD} 1 unlocked {boot} {namespace}",
        "number-given-again": f"{os.getpid()} 1 unlocked {boot} {namespace}",
        "container-gone": f"{DEAD} 1 locked {boot} pid:[1]",
        "container": f"{DEAD} 1 unlocked {boot} pid:[1]",
        "living-torchrun": f"{mine} unlocked {boot} {namespace}",
        "other-boot": f"{DEAD} 1 locked 00000000-0000 {namespace}",
        "held": f"{DEAD} 1 locked {boot} {namespace}",
        "outside-this-container": f"0 - unlocked {boot} {namespace}",
        "hidden-then": f"{os.getpid()} - unlocked {boot} {namespace}",
        "half-written": f"{DEAD}",
        "strange": "an owner's notes on something else",
        "no-owner": None,
    }
    made = {name: directory(tmp_path, name, record) for name, record in records.items()}
    (tmp_path / "evenstep-link").symlink_to(made["dead"])
    (tmp_path / "evenstep-file").write_text(records["dead"])
    with open(made["held"] / "owner") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        expected = ["container-gone", "dead", "dead-torchrun", "number-given-again"]
        assert names(owners.abandoned(tmp_path)) == expected


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])  # hidepid=2, hidepid=1
def test_a_living_owner_that_proc_hides_is_seen(tmp_path, monkeypatch, error):
    boot, namespace = owners._boot(), owners._namespace()
    started = owners._started(os.getpid())
    for name, pid in (("living", os.getpid()), ("dead", DEAD)):
        directory(tmp_path, name, f"{pid} {started} unlocked {boot} {namespace}")

    def hidden(pid):
        raise error

    monkeypatch.setattr(owners, "_stat", hidden)
    assert names(owners.abandoned(tmp_path)) == ["dead"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_that_may_not_be_signalled_is_alive(monkeypatch):
    def hidden(pid):
        raise FileNotFoundError

    monkeypatch.setattr(owners, "_stat", hidden)
    os.seteuid(12345)
    try:
        assert owners.is_alive(1)
    finally:
        os.seteuid(0)


def test_ranks_of_one_start_do_not_remove_each_others_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sharedmem, "SHARED_MEMORY", tmp_path)
    order = []
    monkeypatch.setattr(sharedmem, "remove_leftovers", lambda: order.append(len(list(tmp_path.iterdir()))))
    path = sharedmem.of_torchrun("a", 0, "1234")
    assert sharedmem.of_torchrun("a", 0, "1234") == path
    assert order == [0]  # swept before it was made, and not again
    assert owners.abandoned(tmp_path) == []
    assert sharedmem.of_torchrun("a", 0, "1235") != path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_another_users_directory_is_left_alone(tmp_path):
    path = directory(tmp_path, "dead", f"{DEAD} 1 locked {owners._boot()} {owners._namespace()}")
    assert owners.abandoned(tmp_path) == [path]
    os.chown(path, 12345, -1)
    assert owners.abandoned(tmp_path) == []


def test_a_directory_is_held_until_it_is_closed(tmp_path):
    own = owners.Directory(tmp_path)
    assert own.path.stat().st_mode & 0o777 == 0o700
    assert (
        (own.path / "owner").read_text().startswith(f"{os.getpid()} {owners._started(os.getpid())} locked ")
    )
    assert owners.abandoned(tmp_path) == []
    own.close()
    own.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["write", "open"])
def test_a_directory_that_cannot_be_held_does_not_stay(tmp_path, monkeypatch, call):
    real = getattr(os, call)

    def full(*words, **options):
        if call == "open" and not str(words[0]).endswith("/owner"):
            return real(*words, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, call, full)
        with pytest.raises(MachineError, match=r"cannot make a directory in .*: No space left .*TMPDIR"):
            owners.Directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["owners.Directory", "agent.Heartbeats", "agent.Verdict"])
def test_a_launch_that_cannot_begin_leaves_no_directory(tmp_path, monkeypatch, what):
    from evenstep import agent

    shared, temporary = tmp_path / "shm", tmp_path / "t"
    for path in (shared, temporary):
        path.mkdir()
    monkeypatch.setattr(sharedmem, "SHARED_MEMORY", shared)
    monkeypatch.setattr(owners, "temporary", lambda: temporary)
    made = []

    def full(*_):
        if what == "owners.Directory" and not made:  # the first one, in shared memory, is still made
            made.append(directory_of(shared))
            return made[0]
        raise OSError(errno.ENOSPC, "No space left on device")

    directory_of = owners.Directory
    monkeypatch.setattr(f"evenstep.{what}", full)
    plan = mock.Mock(nproc=1, payload=b"", grace_s=1.0)
    plan.setting.run_dir = None
    with pytest.raises(MachineError, match=r"No space left on device\. Free some space there"):
        agent.Run(plan, None)
    assert [*shared.iterdir(), *temporary.iterdir()] == []


def left(temporary, pids):
    """What is left of a launch: its processes, temporary files, and directories in shared memory."""
    shared = []
    for path in sharedmem.SHARED_MEMORY.glob("evenstep-*/owner"):
        with contextlib.suppress(OSError):
            if path.read_text().split()[0] in map(str, pids):
                shared.append(path.parent.name)
    living = [pid for pid in pids if owners.is_alive(pid)]
    # pymp-* is multiprocessing's own directory.
    return living + shared + [path.name for path in temporary.glob("*") if path.name[:4] in ("even", "pymp")]


@contextlib.contextmanager
def launched(tmp_path):
    """A script that has launched two workers, as the head of a process group; and its temporary directory."""
    script, temporary = tmp_path / "script.py", tmp_path / "t"
    script.write_text(textwrap.dedent(LAUNCHING))
    temporary.mkdir()
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    how["env"] = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, str(script)], **how) as process:
        try:
            workers = [int(process.stdout.readline()) for _ in range(2)]
            yield process, workers, temporary
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def server_of(worker):
    return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        ("group", signal.SIGQUIT, 131),  # as Ctrl-\ in a terminal
        ("parent", signal.SIGQUIT, 131),
        ("parent", signal.SIGKILL, -9),
        ("server", signal.SIGKILL, 1),  # main has no state, so it does not run again
    ],
)
def test_nothing_is_left_after(whom, number, code, tmp_path):
    with launched(tmp_path) as (process, workers, temporary):
        pids = [process.pid, *descendants(process.pid)]
        assert set(workers) < set(pids)
        assert len(left(temporary, pids)) > len(pids)
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if whom == "parent" else server_of(workers[0]), number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors
        if number == signal.SIGQUIT:
            assert errors == ""
        assert not gone_within(lambda: left(temporary, pids))


def test_what_is_left_when_all_are_killed_at_once_goes_with_the_next_launch(tmp_path):
    with launched(tmp_path) as (process, _, temporary):
        pids = [process.pid, *descendants(process.pid)]
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert not gone_within(lambda: [pid for pid in pids if owners.is_alive(pid)])
        assert len(list(temporary.glob("evenstep-*"))) == 2
        words = [sys.executable, str(tmp_path / "script.py"), "short"]
        subprocess.run(words, env=os.environ | {"TMPDIR": str(temporary)}, check=True, timeout=120)
        assert left(temporary, pids) == []
