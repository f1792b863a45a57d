import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import descendants, gone_within
from evenstep import world as worlds
from evenstep.errors import ConfigError, DivergedError, MachineError, StoppedError, WorkerError
from evenstep.launch import LaunchOptions, _nproc, launch, port_owner
from evenstep.testing import run_ranks

CPU = {"device": "cpu", "threads": 1, "timeout_s": 30.0}


def run_script(text, *, stdin=False, path=None, command=(sys.executable,), **options):
    """Run a script and return the finished process; ``stdin``: as ``python - <<EOF``."""
    text = textwrap.dedent(text)
    if stdin:
        return subprocess.run([*command, "-"], input=text, capture_output=True, text=True, **options)
    path.write_text(text)
    return subprocess.run([*command, str(path)], capture_output=True, text=True, **options)


def start_script(path, text):
    path.write_text(textwrap.dedent(text))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(path)], start_new_session=True, **pipes)


# The value and the world


def test_returns_the_value_of_rank_0():
    assert launch(lambda world, a, b: (world.rank, world.world_size, a + b), 2, 3, nproc=2, **CPU) == (
        0,
        2,
        5,
    )


def test_run_ranks_returns_every_value_and_each_rank_knows_its_place():
    def main(world):
        return world.rank, world.local_rank, list(world.own_lanes), worlds.current() is world

    assert run_ranks(main, 2, lanes=5) == [(0, 0, [0, 1], True), (1, 1, [2, 3, 4], True)]


def test_the_world_carries_the_options(tmp_path):
    def main(world):
        import torch

        own = (world.lanes, world.seed, world.mode, world.device, world.run_dir, world.threads, world.started)
        return *own, torch.get_num_threads(), torch.distributed.get_backend()

    *own, started, threads, backend = launch(
        main, nproc=1, lanes=3, seed=7, mode="fast", run_dir=str(tmp_path), device="cpu", threads=2
    )
    assert own == [3, 7, "fast", "cpu", str(tmp_path), 2]
    assert (threads, backend) == (2, "gloo")
    assert 0 < time.time() - started < 600


def test_workers_share_a_process_group():
    def main(world):
        import torch

        total = torch.tensor([float(world.rank + 1)])
        torch.distributed.all_reduce(total)
        return total.item()

    assert run_ranks(main, 3) == [6.0, 6.0, 6.0]


def test_workers_see_the_present_environment_and_the_parents_stays(monkeypatch):
    launch(lambda world: None, nproc=1, **CPU)
    monkeypatch.setenv("SET_AFTER_THE_FORK_SERVER_STARTED", "yes")
    before = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    seen = launch(lambda world: dict(os.environ), nproc=1, **CPU)
    assert seen["SET_AFTER_THE_FORK_SERVER_STARTED"] == "yes"
    assert seen["GLOO_SOCKET_IFNAME"] == "lo"
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_seeds_are_set_in_every_worker():
    def main(world):
        import random

        import numpy
        import torch

        return random.random(), numpy.random.rand(), torch.rand(1).item()

    first, second = run_ranks(main, 2, seed=3)
    assert first == second
    assert run_ranks(main, 1, seed=3) == [first]
    assert run_ranks(main, 1, seed=4) != [first]


def test_a_big_value_comes_back_whole():
    import numpy

    big = launch(lambda world: numpy.arange(3_000_000), nproc=1, **CPU)
    assert int(big.sum()) == 3_000_000 * 2_999_999 // 2


# Main by value


@dataclass
class Point:
    x: int


def test_lambdas_closures_and_classes_travel_by_value():
    offset = 10

    class Local:
        def add(self, number):
            return number + offset

    local = Local()
    assert launch(lambda world, p: local.add(p.x), Point(5), nproc=1, **CPU) == 15


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def main(world):
        return lock

    with pytest.raises(ConfigError, match=r"variable 'lock' is a lock, which cannot be sent"):
        launch(main, nproc=1, **CPU)

    @dataclass
    class Settings:
        inner: dict

    with pytest.raises(ConfigError, match=r"argument 2 of main\.inner\['socket'\] is a lock"):
        launch(lambda world, a, b: 0, 1, Settings({"socket": lock}), nproc=1, **CPU)
    with pytest.raises(ConfigError, match="main is 3, which cannot be called"):
        launch(3, nproc=1)


def test_a_value_that_cannot_be_pickled_is_named():
    with pytest.raises(ConfigError, match="main returned a lock"):
        launch(lambda world: threading.Lock(), nproc=1, **CPU)


UNGUARDED = """
    import os, sys
    from pathlib import Path
    from evenstep.launch import launch
    assert "torch" not in sys.modules
    class Mine:
        def __init__(self, rank): self.rank = rank
    def main(world):
        print(f"main ran on rank {world.rank}\\n", end="", flush=True)
        return Mine(world.rank)
    print("script ran", flush=True)
    before = dict(os.environ)
    file = __file__ if "__file__" in globals() else None
    for _ in range(2):
        value = launch(main, nproc=2, device="cpu", threads=1)
        assert type(value).__name__ == "Mine" and value.rank == 0
    assert dict(os.environ) == before
    assert (__file__ if "__file__" in globals() else None) == file
    assert __spec__ is None
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_a_script_without_a_guard_runs_once(stdin, tmp_path):
    done = run_script(UNGUARDED, stdin=stdin, path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [
        *["main ran on rank 0"] * 2,
        *["main ran on rank 1"] * 2,
        "script ran",
    ]


# Options


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match=r"no option 'nprocs'\. Did you mean 'nproc'\?"):
        launch(print, nprocs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 0}, "nproc is 0; expected auto or a whole number above 0"),
        ({"nproc": "two"}, "nproc is 'two'"),
        ({"mode": "exakt"}, "mode is 'exakt'; expected exact or fast"),
        ({"threads": 0}, "threads is 0; it must be above 0"),
        ({"lanes": 1, "nproc": 2}, "world size 2 is above lanes 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        launch(lambda world: None, **{"device": "cpu", **options})


def test_an_unknown_backend_is_refused():
    with pytest.raises(MachineError, match=r"no backend 'glooo'. Use --backend gloo"):
        launch(lambda world: None, nproc=1, device="cpu", backend="glooo")


def test_auto_takes_a_process_per_gpu_or_at_most_four_cores(monkeypatch):
    monkeypatch.setattr(worlds, "num_cores", lambda: 64)
    assert sys.modules["evenstep.launch"]._nproc(LaunchOptions(), 0) == 4
    assert sys.modules["evenstep.launch"]._nproc(LaunchOptions(), 8) == 8
    assert sys.modules["evenstep.launch"]._nproc(LaunchOptions(nproc=3), 8) == 3


def test_a_taken_port_is_an_error_before_anything_starts(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert port_owner(port) == os.getpid()
        with pytest.raises(MachineError, match=rf"127\.0\.0\.1:{port} .* held by process {os.getpid()}"):
            launch(lambda world: None, nproc=1, **CPU)
    assert launch(lambda world: 1, nproc=1, **CPU) == 1


def test_a_port_that_is_no_number_is_an_error(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(MachineError, match="MASTER_PORT is 'http'; expected a port number"):
        launch(lambda world: None, nproc=1, **CPU)


# Messages and the handle


def test_messages_reach_the_callback_in_order():
    def main(world):
        for i in range(3):
            world.send((world.rank, i))

    got = []
    launch(main, nproc=2, on_message=lambda rank, obj: got.append((rank, obj)), **CPU)
    for rank in (0, 1):
        assert [obj for sender, obj in got if sender == rank] == [(rank, 0), (rank, 1), (rank, 2)]


def test_an_error_in_the_callback_does_not_end_the_run(capsys):
    from loguru import logger

    told = []
    number = logger.add(told.append, format="{message}")
    try:
        value = launch(lambda w: w.send(1) or 5, nproc=1, on_message=lambda rank, obj: 1 / 0, **CPU)
    finally:
        logger.remove(number)
    assert value == 5
    assert "on_message failed for a message of rank 0; the run goes on" in told[0]
    assert "ZeroDivisionError" in told[0]


def test_handle_sends_polls_and_waits():
    def main(world):
        return [world.receive(20), world.receive(20)]

    with launch(main, nproc=2, all_values=True, join=False, **CPU) as handle:
        assert handle.poll() is None
        with pytest.raises(TimeoutError, match="has not ended"):
            handle.wait(0.01)
        handle.send({"lr": 0.1})
        handle.send(lambda: 2)
        values = handle.wait(30)
    assert [value[0] for value in values] == [{"lr": 0.1}] * 2
    assert [value[1]() for value in values] == [2, 2]
    assert handle.poll() is True


def test_receive_times_out():
    with pytest.raises(WorkerError, match=r"TimeoutError: world.receive: nothing came .* in 0.01 s"):
        launch(lambda world: world.receive(0.01), nproc=1, **CPU)


def test_stop_ends_workers_that_ignore_sigterm():
    def main(world):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        world.send("here")
        time.sleep(600)

    here = threading.Event()
    handle = launch(
        main, nproc=2, join=False, grace_s=0.3, max_restarts=3, on_message=lambda *_: here.set(), **CPU
    )
    assert here.wait(30)
    handle.stop()
    assert handle.poll() is False
    with pytest.raises(StoppedError, match=r"stopped with handle\.stop"):
        handle.wait()
    assert not descendants(os.getpid())


def test_mains_start_after_all_are_ready():
    """No main runs before every worker has its process group; the parent gives the go."""

    def main(world):
        import torch

        torch.distributed.barrier()
        world.send("started")

    got = []
    launch(main, nproc=3, on_message=lambda rank, obj: got.append(rank), **CPU)
    assert sorted(got) == [0, 1, 2]


# Failures


def fail_on(rank, error):
    def main(world):
        if world.rank == rank:
            raise error
        time.sleep(600)

    return main


def test_an_error_is_raised_with_the_users_line_and_ends_the_others():
    with pytest.raises(WorkerError) as caught:
        launch(fail_on(1, ValueError("seven is wrong")), nproc=2, grace_s=1.0, **CPU)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed: ValueError: seven is wrong"
    assert "test_launch.py:" in lines[1]
    assert lines[1].endswith("in main: raise error")
    assert lines[2:] == ["rank 0 was stopped"]
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


@pytest.mark.parametrize(("kind", "code"), [(DivergedError, 5), (ConfigError, 2), (MachineError, 3)])
def test_our_own_errors_keep_class_text_and_exit_code(kind, code):
    with pytest.raises(kind, match=r"^the loss is nan$") as caught:
        launch(fail_on(0, kind("the loss is nan")), nproc=2, **CPU)
    assert caught.value.exit_code == code
    assert str(caught.value.__cause__).startswith(f"rank 0 failed: {kind.__name__}: the loss is nan")


def test_a_workers_exit_code_is_kept():
    with pytest.raises(WorkerError, match="rank 0 failed: SystemExit: 7") as caught:
        launch(lambda world: sys.exit(7), nproc=1, **CPU)
    assert caught.value.exit_code == 7
    assert launch(lambda world: sys.exit(0), nproc=1, **CPU) is None


def test_death_by_signal_is_named_and_not_taken_for_the_peers_error():
    def main(world):
        import torch

        torch.distributed.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(8))

    with pytest.raises(WorkerError, match=r"^rank 1 was killed by SIGKILL") as caught:
        launch(main, nproc=3, grace_s=1.0, **CPU)
    assert (caught.value.rank, caught.value.exit_code) == (1, 137)
    assert "ranks 0 and 2 were stopped" in str(caught.value)


def test_leaving_in_the_middle_is_noticed():
    def main(world):
        if world.rank == 1:
            os._exit(0)
        time.sleep(600)

    with pytest.raises(WorkerError, match=r"^rank 1 left with exit code 0 before its main returned"):
        launch(main, nproc=2, grace_s=0.3, **CPU)


def test_a_worker_that_ignores_sigterm_does_not_outlast_a_failure():
    def main(world):
        if world.rank == 1:
            world.receive(20)
            raise ValueError("enough")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        world.send("deaf")
        time.sleep(600)

    handle = launch(main, nproc=2, join=False, grace_s=0.3, on_message=lambda *_: handle.send("fail"), **CPU)
    with pytest.raises(WorkerError, match="rank 1 failed: ValueError: enough"):
        handle.wait(30)


def test_restarts_after_a_death_but_not_after_an_error():
    def main(world):
        if world.restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.restart == 1:
            raise ValueError("not again")

    with pytest.raises(WorkerError, match="ValueError: not again"):
        launch(main, nproc=1, max_restarts=5, **CPU)

    def recovers(world):
        import torch

        if world.restart < 2 and world.rank == world.restart:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return world.restart, total.item()

    assert run_ranks(recovers, 2, max_restarts=2, grace_s=1.0) == [(2, 2.0), (2, 2.0)]


def test_the_log_holds_the_traceback(tmp_path):
    with pytest.raises(WorkerError) as caught:
        launch(fail_on(0, ValueError("to the log")), nproc=2, run_dir=str(tmp_path), grace_s=1.0, **CPU)
    assert str(caught.value).splitlines()[-1] == f"log: {tmp_path}/logs/rank0.log"
    assert "ValueError: to the log" in (tmp_path / "logs" / "rank0.log").read_text()
    assert "rank 0 failed: ValueError" in (tmp_path / "logs" / "launcher.log").read_text()


# Whole processes: what listens, signals, kill -9, torchrun

LISTENING = """
    import os
    from pathlib import Path
    from evenstep.launch import launch

    def listening(pid):
        inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        found = []
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(fields[1].partition(":")[0])
        return found

    def main(world, parent):
        import torch
        torch.distributed.all_reduce(torch.ones(4))
        return listening(os.getpid()) + listening(parent)

    print(launch(main, os.getpid(), nproc=2, device="cpu", threads=1))
"""


def test_a_run_listens_on_loopback_only(tmp_path):
    done = run_script(LISTENING, path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    addresses = eval(done.stdout)
    assert set(addresses) == {"0100007F"}  # 127.0.0.1; the two sockets of gloo


STUCK = """
    import os, time
    from evenstep.launch import launch

    def main(world):
        import torch
        print(os.getpid(), flush=True)
        if world.rank == 0:
            torch.distributed.all_reduce(torch.ones(4))  # rank 1 never comes
        try:
            time.sleep(600)
        finally:
            print("cleaned", flush=True)

    launch(main, nproc=2, device="cpu", threads=1, grace_s=2.0)
"""


def started(tmp_path):
    process = start_script(tmp_path / "script.py", STUCK)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    return process, pids


def alive(pids):
    """Which of the processes live; a zombie does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def test_kill_9_of_the_launching_process_leaves_nothing_behind(tmp_path, own_temporary_directory):
    process, pids = started(tmp_path)
    everybody = [*descendants(process.pid), *pids]
    (directory,) = Path(own_temporary_directory).glob("evenstep-*")
    assert directory.stat().st_mode & 0o777 == 0o700
    with process:
        process.kill()
    assert not gone_within(lambda: alive(everybody), 5.0)
    assert not list(Path(own_temporary_directory).glob("evenstep-*"))


def test_ctrl_c_ends_everything(tmp_path):
    process, pids = started(tmp_path)
    with process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        output, errors = process.communicate(timeout=30)
    # Python itself ends by SIGINT after a KeyboardInterrupt, which a shell shows as 130.
    assert process.returncode == -signal.SIGINT
    assert "cleaned" in output
    assert errors.count("Traceback") == 1
    assert not gone_within(lambda: alive(pids))


def test_sigterm_ends_everything(tmp_path):
    process, pids = started(tmp_path)
    with process:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == ""
    assert not gone_within(lambda: alive(pids))


FORGOTTEN = """
    import time
    from evenstep.launch import launch
    handle = launch(lambda world: world.send(1) or time.sleep(600), nproc=1, device="cpu", join=False,
                    on_message=lambda *_: got.append(1))
    got = []
    while not got:
        time.sleep(0.05)
"""


def test_a_parent_that_forgets_its_handle_leaves_nothing_behind(tmp_path, own_temporary_directory):
    done = run_script(FORGOTTEN, path=tmp_path / "script.py", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(Path(own_temporary_directory).glob("evenstep-*"))


TORCHRUN = """
    import os
    from evenstep.launch import launch

    def main(world, fail):
        import torch
        if world.restart == 0 and fail:
            os._exit(9) if world.rank == 1 else None
        total = torch.tensor([world.rank + 1.0])
        torch.distributed.all_reduce(total)
        if not fail and world.rank == 1:
            raise ValueError("wrong under torchrun")
        return total.item(), world.world_size, world.restart

    print(launch(main, True, device="cpu", threads=1, timeout_s=20.0), flush=True)
    launch(main, False, device="cpu", threads=1, timeout_s=20.0)
"""


def test_under_torchrun_a_process_is_a_worker_at_once(tmp_path):
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
        *("--nproc-per-node", "2", "--monitor-interval", "0.05"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = run_script(TORCHRUN, path=tmp_path / "script.py", command=torchrun, env=environment, timeout=120)
    assert done.stdout.splitlines() == ["(3.0, 2, 1)"] * 2, done.stderr
    assert done.returncode != 0
    assert done.stderr.count("rank 1 failed: ValueError: wrong under torchrun") == 1


def test_a_handle_makes_no_sense_under_torchrun(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="join=False needs this process to launch the workers"):
        launch(lambda world: None, join=False)


def test_a_long_name_of_the_temporary_directory_does_not_matter(monkeypatch, tmp_path):
    """A Unix socket's path may have about a hundred characters."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert launch(lambda world: 1, nproc=1, **CPU) == 1


def test_run_ranks_ends_a_hanging_collective():
    def main(world):
        import torch

        if world.rank == 0:
            torch.distributed.barrier()
        else:
            world.receive()

    with pytest.raises(WorkerError, match=r"rank 0 failed: .*imed out"):
        run_ranks(main, 2, timeout_s=1.0)


def test_auto_starts_no_more_processes_than_lanes():
    options = LaunchOptions(lanes=1)
    assert _nproc(options, num_gpus=8) == 1
    assert _nproc(options, num_gpus=0) == 1
    assert _nproc(LaunchOptions(), num_gpus=8) == 8
