import errno
import fcntl
import os
import re
import socket
import subprocess
import sys

import pytest

from evenstep import cli
from evenstep.errors import ConfigError, MachineError
from evenstep.flat import from_flat
from evenstep.runlock import held


def test_a_run_directory_is_held_by_one_launch_at_a_time(tmp_path, monkeypatch):
    config = from_flat({"run_dir": str(tmp_path)})
    message = (
        rf"in use by process {os.getpid()} on host {re.escape(socket.gethostname())}: two runs .*--run-dir"
    )
    with held(config):
        with pytest.raises(ConfigError, match=message), held(config):
            pass
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "1" if "RANK" in name else "2")
        with held(config):  # rank 0 has it for all
            pass
        monkeypatch.delenv("RANK")
    assert list(tmp_path.iterdir()) == []
    with held(config):
        pass


def test_a_run_directory_is_free_when_the_process_that_held_it_was_killed(tmp_path):
    config = from_flat({"run_dir": str(tmp_path)})
    code = (
        "import sys; from evenstep.runlock import held; from evenstep.flat import from_flat\n"
        "with held(from_flat({'run_dir': sys.argv[1]})): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} "), held(config, patience_s=0.2):
            pass
        process.kill()
        process.wait()
        with held(config):
            pass


def test_a_second_launching_process_of_the_same_run_passes(tmp_path):
    def config(endpoint="localhost:29411", name="a", nnodes=2):
        options = {"run_dir": str(tmp_path), "nnodes": nnodes, "rdzv_endpoint": endpoint, "rdzv_id": name}
        return from_flat(options)

    with held(config()):
        with held(config()):
            assert (tmp_path / ".lock").read_text().split()[2:] == ["localhost:29411", "a"]
        assert (tmp_path / ".lock").exists()  # the first one still has it
        for other in (config("localhost:29412"), config(name="b"), from_flat({"run_dir": str(tmp_path)})):
            message = f"in use by process {os.getpid()} on host {re.escape(socket.gethostname())}:"
            with pytest.raises(ConfigError, match=message), held(other, patience_s=0.1):
                pass
    assert list(tmp_path.iterdir()) == []
    lone = config(nnodes=1)  # one machine has one launching process
    with held(lone), pytest.raises(ConfigError, match="in use"), held(lone):
        pass


def test_a_full_disk_does_not_open_the_lock(tmp_path, monkeypatch):
    config = from_flat({"run_dir": str(tmp_path)})

    def write(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        lock = held(config)
        lock.__enter__()
    try:
        with pytest.raises(ConfigError, match=r"in use by process \(unknown\) on host"), held(config):
            pass
    finally:
        lock.__exit__(None, None, None)


def test_only_a_file_system_without_locks_is_left_unlocked(tmp_path, monkeypatch):
    config = from_flat({"run_dir": str(tmp_path)})

    def failing(number):
        def flock(descriptor, how):
            raise OSError(number, os.strerror(number))

        return flock

    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        monkeypatch.setattr(fcntl, "flock", failing(number))
        with held(config), held(config):
            pass
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(MachineError, match=r"cannot lock .*\.lock: Input/output error"), held(config):
        pass


def test_a_second_run_in_a_run_directory_is_refused_and_changes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("evenstep.launcher.warm_up", lambda: None)
    with held(from_flat({"run_dir": str(tmp_path)})):
        assert cli.main(["train", "--run-dir", str(tmp_path), "--data", "digits"]) == 2
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert f"is in use by process {os.getpid()} on host" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
