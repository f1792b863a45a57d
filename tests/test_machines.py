import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from evenstep import checkpoint, failure, machines, rendezvous, rescue, snapshot, verdict, worker, world
from evenstep.errors import CheckpointError, ConfigError, MachineError, StoppedError, WorkerError
from evenstep.flat import from_flat
from evenstep.launcher import launch
from evenstep.recovery import Recovery
from evenstep.rendezvous import Agreed, Offer, settle
from evenstep.rundir import open_run_dir
from evenstep.testing import run_ranks
from machines_net import HERE, TRAIN, Network, missing, wait_for

REASON = missing()
needs_machines = pytest.mark.skipif(REASON is not None, reason=str(REASON))
STEPS = 150


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "expected"),
    [
        (1, None, None),
        (2, "node1", (2, 2, "node1", 29400)),
        ("1:4", "10.0.0.1:5", (1, 4, "10.0.0.1", 5)),
        (2, "[fd00::1]:5", (2, 2, "fd00::1", 5)),
    ],
)
def test_machines_of_the_options(nnodes, endpoint, expected):
    found = machines.machines_of(nnodes, endpoint)
    assert (found and (found.least, found.most, found.host, found.port)) == expected


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "message"),
    [
        ("x", None, "nnodes is 'x'; expected a number of machines above 0 or MIN:MAX"),
        ("3:2", "a", "nnodes is '3:2'"),
        (0, "a", "nnodes is 0"),
        (2, None, "nnodes is 2, and no rdzv_endpoint is given"),
        (2, "a:b", "rdzv_endpoint is 'a:b'; expected HOST:PORT"),
        (2, "a:70000", "rdzv_endpoint is 'a:70000'"),
    ],
)
def test_machines_that_cannot_be(nnodes, endpoint, message):
    with pytest.raises(ConfigError, match=message):
        machines.machines_of(nnodes, endpoint)


def test_this_machine_and_its_interface():
    assert machines.is_here("127.0.0.1")
    assert machines.is_here("localhost")
    assert not machines.is_here("192.0.2.7")
    assert machines.local_address("127.0.0.1") == "127.0.0.1"
    assert machines.interface_of("127.0.0.1") == "lo"
    assert machines.interface_of("192.0.2.7") is None
    with world.variables({"GLOO_SOCKET_IFNAME": "mine"}):
        assert machines.gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "mine"}
    with pytest.raises(MachineError, match=r"'no-such-host\.invalid' cannot be resolved"):
        machines.is_here("no-such-host.invalid")


def offer(number, nproc=2, *, lanes=None, threads=4, asked=False, resume=False, **run):
    address = f"10.0.0.{number}"
    return Offer(
        address=address,
        agent=1,
        nproc=nproc,
        is_host=number == 1,
        lanes=lanes,
        threads=threads,
        threads_asked=asked,
        resume=resume,
        run=run,
    )


def test_machines_settle_lanes_and_threads():
    assert settle([offer(1), offer(2, 3)], None) == Agreed(lanes=5, threads=4)
    assert settle([offer(1), offer(2, threads=3)], None) == Agreed(lanes=4, threads=3)
    assert settle([offer(1, lanes=8), offer(2)], None).lanes == 8
    assert settle([offer(1, threads=2, asked=True), offer(2)], None).threads == 2
    kept = Agreed(lanes=5, threads=4)
    assert settle([offer(1, threads=9)], kept) == kept
    assert settle([offer(1), offer(2, resume=True)], kept) == kept  # it came later
    assert settle([offer(1, resume=True), offer(2, resume=True)], None) == Agreed(lanes=4, threads=4)


def test_machines_that_do_not_settle():
    with pytest.raises(
        ConfigError, match=r"different lanes: 8 on 10\.0\.0\.1, 4 on 10\.0\.0\.2.*same --lanes"
    ):
        settle([offer(1, lanes=8), offer(2, lanes=4)], None)
    with pytest.raises(ConfigError, match=r"different mode: exact on 10\.0\.0\.1, fast on 10\.0\.0\.2"):
        settle([offer(1, mode="exact"), offer(2, mode="fast")], None)
    with pytest.raises(ConfigError, match=r"different threads: 3 on 10\.0\.0\.2, 4 on the run"):
        settle([offer(1), offer(2, threads=3, asked=True)], Agreed(lanes=4, threads=4))
    with pytest.raises(
        ConfigError, match=r"--resume was given on 10\.0\.0\.2, but not on 10\.0\.0\.1: .* or on none"
    ):
        settle([offer(1), offer(2, resume=True)], None)
    with pytest.raises(ConfigError, match=r"4 processes .* are above lanes 3.*--lanes 4"):
        settle([offer(1, lanes=3), offer(2)], None)


def test_a_run_directory_must_be_given():
    with pytest.raises(ConfigError, match="nnodes is 2, and no run_dir is given"):
        open_run_dir(from_flat({"nnodes": 2, "rdzv_endpoint": "127.0.0.1:5"}))


def test_nobody_comes_or_the_port_is_taken(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_FIRST_LOOK_S", 1.0)
    monkeypatch.setattr(rendezvous, "_NOTICE_S", 0.1)
    options = {"device": "cpu", "nproc": 1, "nnodes": 2, "timeout_s": 1.0}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=rf"port {port} of 127\.0\.0\.1 cannot be opened"):
            launch(print, rdzv_endpoint=f"127.0.0.1:{port}", **options)
    with pytest.raises(MachineError, match=r"fewer than 2 machines were at .* within 1 s"):
        launch(print, rdzv_endpoint=f"127.0.0.1:{port}", **options)
    assert f"waiting for other machines at 127.0.0.1:{port}: 2 must be there" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="nproc_min is for one machine"):
        launch(print, rdzv_endpoint="127.0.0.1:5", nproc_min=1, **options)


def test_nobody_answers_at_the_endpoint():
    with pytest.raises(
        MachineError, match=r"nobody answers at 192\.0\.2\.7:5 within 1 s|no network interface"
    ):
        launch(print, device="cpu", nproc=1, nnodes=2, rdzv_endpoint="192.0.2.7:5", timeout_s=1.0)


def test_two_agents_of_one_machine_and_what_launch_returns():
    code = (
        "import sys; from evenstep import launch\n"
        "def main(world): return world.rank, world.num_nodes, world.lanes\n"
        "print(launch(main, nproc=1, nnodes=2, rdzv_endpoint=sys.argv[1], device='cpu', timeout_s=60.0))"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    pipe = subprocess.PIPE
    agents = [
        subprocess.Popen([sys.executable, "-c", code, endpoint], stdout=pipe, stderr=pipe, text=True)
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert sorted(out.strip() for out, _ in outputs) == ["(0, 2, 2)", "None"], outputs


def test_a_main_that_has_returned_waits_for_those_of_other_machines():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = machines.Machines(least=1, most=2, host="127.0.0.1", port=store.port, run_id="waiting")
    job = types.SimpleNamespace(machines=where, setting=types.SimpleNamespace(timeout_s=20.0))
    place = types.SimpleNamespace(restart=0, world_size=2)
    waiting = threading.Thread(target=worker._wait_for_all, args=(job, place))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    worker._wait_for_all(job, place)  # the other rank's: now both have ended
    waiting.join(20)
    assert not waiting.is_alive()


def told(first, meeting, killed=False):
    """What a run says of its first failure, with what the meeting of the machines knows."""
    peers = {1: types.SimpleNamespace(killed=killed)}
    plan = types.SimpleNamespace(grace_s=0.0)
    judging = types.SimpleNamespace(
        _course=types.SimpleNamespace(meeting=meeting, stopped=False, plan=plan),
        _server=types.SimpleNamespace(peers=peers),
    )
    return verdict.Verdict._failure_elsewhere(judging, first)


def test_the_failure_of_another_machine_is_told_where_ours_only_follows_from_it(monkeypatch):
    monkeypatch.setattr(verdict, "_WORD_S", 0.1)
    lost = failure.record(RuntimeError("Connection closed by peer"), 1)
    own = failure.record(ValueError("ours"), 1)
    word = WorkerError("the run has failed on 10.0.0.2: rank 3 was killed by SIGKILL")
    speaks = types.SimpleNamespace(failure_elsewhere=lambda: word, lost_machine=None)
    silent = types.SimpleNamespace(
        failure_elsewhere=lambda: None, lost_machine="the machine 10.0.0.2 is silent"
    )
    knows_nothing = types.SimpleNamespace(failure_elsewhere=lambda: None, lost_machine=None)
    follows = failure.First(1, 0.0, 1, lost)
    assert told(follows, speaks) is word
    assert "10.0.0.2 is silent, and main has made no TrainState to go on from" in str(told(follows, silent))
    assert told(follows, knows_nothing) is None
    assert told(failure.First(1, 0.0, 1, own), speaks) is None
    assert told(failure.First(1, 0.0, 137), speaks) is None
    assert told(failure.First(1, 0.0, 137), speaks, killed=True) is word
    assert told(follows, None) is None


def test_a_stop_that_was_asked_for_on_another_machine_is_no_failure_of_it(monkeypatch):
    monkeypatch.setattr(verdict, "_WORD_S", 0.1)
    word = WorkerError("the run has failed on 10.0.0.2: asked to stop")
    speaks = types.SimpleNamespace(failure_elsewhere=lambda: word, lost_machine=None)
    stopped = failure.record(StoppedError("asked to stop: all ranks stopped after step 4"), 1)
    assert stopped.secondary
    assert told(failure.First(1, 0.0, 75, stopped), speaks) is None


def test_the_workers_have_left_when_the_agent_restarts_them_for_a_machine_that_came():
    """The agent's SIGTERM would come into the middle of their snapshots."""
    told = []
    calls = types.SimpleNamespace(on_lost=lambda *args: told.append(args))
    meeting = types.SimpleNamespace(_heard=time.monotonic(), _lost=None, _waiting=0, _calls=calls)
    assert (rendezvous.Meeting.num_nodes_waiting(meeting), told) == (0, [])
    meeting._waiting = 1
    assert rendezvous.Meeting.num_nodes_waiting(meeting) == 1
    assert told == [("1 machine came to take part", True)]  # True: it waits


def test_a_checkpoint_that_not_all_machines_have(tmp_path):
    def main(world, parent):
        run_dir = str(Path(parent) / str(world.rank))
        memory = Path(parent) / f"memory-{world.rank}"
        memory.mkdir()
        places = {"rank": world.rank, "local_rank": 0, "local_world_size": 1, "restart": 1}
        recovery = Recovery(memory, run_dir, **places)
        if world.rank == 0:
            weights = {"w": torch.ones(1)}
            checkpoint.save(run_dir, step=7, model=weights, training={}, meta={"epoch": 0})
        own = dataclasses.replace(world, run_dir=run_dir)
        with pytest.raises(CheckpointError, match=r"step 7 .* is not, .* on rank 1's machine.*--resume"):
            recovery.agree(own)
        # An older one that both have, and a snapshot that one of them has in its memory.
        checkpoint.save(run_dir, step=5, model={"w": torch.zeros(1)}, training={}, meta={"epoch": 0})
        recovery.agree(own)
        found = recovery.found_checkpoint.name
        if world.rank == 1:
            snapshot.save([memory], [{"model": {}, "training": {}, "meta": {}, "step": 6}], total=6, rank=1)
        recovery.agree(own)
        return found, recovery.found().step

    assert run_ranks(main, 2, str(tmp_path)) == [("step-00000005", 6)] * 2


def test_the_snapshot_of_the_last_machine_becomes_a_checkpoint(tmp_path):
    run_dir, memory = tmp_path / "run", tmp_path / "memory"
    assert rescue.save_as_checkpoint([memory], run_dir) is None
    state = {"model": {"w": torch.ones(2)}, "training": {"a": 1}, "meta": {"epoch": 0}, "step": 9}
    snapshot.save([memory], [state], total=9, rank=1)
    step, path = rescue.save_as_checkpoint([memory], run_dir)
    assert step == 9
    assert checkpoint.load(path).training == {"a": 1}
    assert rescue.save_as_checkpoint([memory], run_dir) == (9, path)


def test_threads_that_differ_under_another_launcher():
    def main(world):
        with pytest.raises(ConfigError, match=r"rank 0 has 1 threads and rank 1, .* 2: .*--threads 1"):
            worker._check_threads(dataclasses.replace(world, threads=world.rank + 1))
        return True

    assert run_ranks(main, 2) == [True, True]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a run of 150 steps on one machine."""
    words = ("--nproc", "1", "--lanes", "4", "--steps", str(STEPS), "--quiet")
    path = tmp_path_factory.mktemp("one")
    command = [sys.executable, *TRAIN, *words, "--run-dir", str(path / "run")]
    variables = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    return json.loads(done.stdout.splitlines()[-1])["weights_sha256"]


def lines(run_dir, kind):
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in found if line["kind"] == kind]


def result_of(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1]) if out else None


def trains(run_dir, process, *, starts=1, steps=10):
    """Wait until it trains, some steps into its start number ``starts``."""

    def it_does():
        begun = lines(run_dir, "start")
        done = lines(run_dir, "train")
        return len(begun) >= starts and done and done[-1]["step"] >= begun[-1]["step"] + steps

    wait_for(it_does, process)


OPTIONS = ("--lanes", 4, "--nproc", 1, "--steps", STEPS, "--log-every", 1)


@needs_machines
def test_two_machines_have_the_bits_of_one_and_go_on_without_one_of_them(tmp_path, undisturbed):
    run_dir = tmp_path / "run"
    with Network(2) as network:
        options = (*OPTIONS[:2], "--nproc", 2, *OPTIONS[4:])
        first, second = (network.train(number, tmp_path, *options, nnodes="1:2") for number in (1, 2))
        trains(run_dir, first)
        assert lines(run_dir, "start")[0]["world_size"] == 4
        network.kill(second)
        trains(run_dir, first, starts=2)
        result = result_of(first)
    assert (result["world_size"], result["lanes"], result["restarts"], result["steps_lost"]) == (2, 4, 1, 0)
    assert result["weights_sha256"] == undisturbed
    assert [line["step"] for line in lines(run_dir, "train")] == list(range(1, STEPS + 1))


@needs_machines
def test_without_the_endpoint_the_others_save_and_the_run_goes_on_elsewhere(tmp_path, undisturbed):
    run_dir = tmp_path / "run"
    with Network(2) as network:
        host, other = (network.train(number, tmp_path, *OPTIONS) for number in (1, 2))
        trains(run_dir, host)
        network.kill(host)
        _, err = other.communicate(timeout=60)
        assert other.returncode == 75, err
        assert "the machine of the endpoint 10.77.0.1:29411 is gone" in err
        assert "--resume --run-dir" in err
        assert "step-000" in err
        again = network.train(2, tmp_path, "--resume", *OPTIONS, nnodes=1, host=2, pause_s=0)
        assert result_of(again)["weights_sha256"] == undisturbed


@needs_machines
def test_a_cut_cable_and_a_machine_that_comes_back(tmp_path, undisturbed):
    run_dir = tmp_path / "run"
    with Network(2) as network:
        host, other = (network.train(number, tmp_path, *OPTIONS, nnodes="1:2") for number in (1, 2))
        trains(run_dir, host)
        network.cut(2)
        _, err = other.communicate(timeout=60)
        assert other.returncode == 75, err
        assert "is gone (no answer for" in err
        trains(run_dir, host, starts=2, steps=1)
        network.heal(2)
        again = network.train(2, tmp_path, *OPTIONS, nnodes="1:2")
        assert result_of(host)["weights_sha256"] == undisturbed
        assert again.wait(60) == 0
    log = (run_dir / "logs" / "rank0.log").read_text()
    assert "the machine 10.77.0.2 was lost" in log


@needs_machines
def test_a_machine_joins_and_three_train_together(tmp_path, undisturbed):
    run_dir = tmp_path / "run"
    with Network(3) as network:
        first, second = (network.train(number, tmp_path, *OPTIONS, nnodes="1:3", host=2) for number in (1, 2))
        trains(run_dir, first)
        third = network.train(3, tmp_path, *OPTIONS, nnodes="1:3", host=2)
        result = result_of(second)
        assert result_of(first) is None
        assert result_of(third) is None
    assert result["weights_sha256"] == undisturbed
    assert [line["world_size"] for line in lines(run_dir, "start")] == [2, 3]
    assert (result["world_size"], result["steps_lost"]) == (3, 0)
