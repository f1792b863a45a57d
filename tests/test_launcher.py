import os
import signal
import socket
import time

import pytest

from evenstep import world as worlds
from evenstep.errors import ConfigError, MachineError
from evenstep.launcher import LaunchOptions, _nproc, launch, port_owner
from evenstep.testing import run_ranks
from scripts import CPU, run_script


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
    assert _nproc(LaunchOptions(), 0) == 4
    assert _nproc(LaunchOptions(), 8) == 8
    assert _nproc(LaunchOptions(nproc=3), 8) == 3


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


def test_auto_starts_no_more_processes_than_lanes():
    options = LaunchOptions(lanes=1)
    assert _nproc(options, num_gpus=8) == 1
    assert _nproc(options, num_gpus=0) == 1
    assert _nproc(LaunchOptions(), num_gpus=8) == 8


CTRL_C = """
import multiprocessing, os, signal, time
from evenstep.launcher import launch, warm_up

STATE = '''
import signal
blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
print("blocked" if blocked else "open", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
'''

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    warm_up()
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for _ in range(40):
        os.killpg(0, signal.SIGINT)
        time.sleep(0.03)
    child = multiprocessing.get_context("forkserver").Process(target=exec, args=(STATE,))
    child.start()
    child.join()
    blocked = launch(
        lambda world: signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), nproc=1, device="cpu"
    )
    print(blocked, server == multiprocessing.forkserver._forkserver._forkserver_pid)
"""


def test_ctrl_c_while_the_fork_server_imports_is_quiet_and_reaches_what_it_forks(tmp_path):
    done = run_script(CTRL_C, path=tmp_path / "script.py", start_new_session=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["open True", "False True"]
