import os
import signal
import threading
import time
from pathlib import Path

import pytest

from conftest import descendants
from evenstep.errors import StoppedError, WorkerError
from evenstep.launcher import launch
from scripts import CPU, run_script


def test_messages_reach_the_callback_in_order():
    def main(world):
        for i in range(3):
            world.send((world.rank, i))

    got = []
    launch(main, nproc=2, on_message=lambda rank, obj: got.append((rank, obj)), **CPU)
    for rank in (0, 1):
        assert [obj for sender, obj in got if sender == rank] == [(rank, 0), (rank, 1), (rank, 2)]


def test_all_messages_are_through_when_launch_returns_or_raises():
    def main(world, fails):
        for i in range(20):
            world.send(i)
        if fails:
            raise ValueError("too late")
        return "value"

    def slow(rank, obj):
        time.sleep(0.02)
        got.append(obj)

    got = []
    assert launch(main, False, nproc=1, on_message=slow, **CPU) == "value"
    assert got == list(range(20))
    got = []
    with pytest.raises(WorkerError, match="too late"):
        launch(main, True, nproc=1, on_message=slow, **CPU)
    assert got == list(range(20))


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


FORGOTTEN = """
    import time
    from evenstep.launcher import launch
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
