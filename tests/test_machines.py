import json
import os
import socket
import subprocess
import sys

import pytest

from evenstep import machines, rendezvous, world
from evenstep.config import from_flat
from evenstep.errors import ConfigError, MachineError
from evenstep.launcher import launch
from evenstep.rendezvous import Agreed, Offer, settle
from evenstep.rundir import open_run_dir
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


def offer(number, nproc=2, *, lanes=None, threads=4, asked=False, **run):
    address = f"10.0.0.{number}"
    return Offer(
        address=address,
        agent=1,
        nproc=nproc,
        is_host=number == 1,
        lanes=lanes,
        threads=threads,
        threads_asked=asked,
        run=run,
    )


def test_machines_settle_lanes_and_threads():
    assert settle([offer(1), offer(2, 3)], None) == Agreed(lanes=5, threads=4)
    assert settle([offer(1), offer(2, threads=3)], None) == Agreed(lanes=4, threads=3)
    assert settle([offer(1, lanes=8), offer(2)], None).lanes == 8
    assert settle([offer(1, threads=2, asked=True), offer(2)], None).threads == 2
    kept = Agreed(lanes=5, threads=4)
    assert settle([offer(1, threads=9)], kept) == kept


def test_machines_that_do_not_settle():
    with pytest.raises(
        ConfigError, match=r"different lanes: 8 on 10\.0\.0\.1, 4 on 10\.0\.0\.2.*same --lanes"
    ):
        settle([offer(1, lanes=8), offer(2, lanes=4)], None)
    with pytest.raises(ConfigError, match=r"different mode: exact on 10\.0\.0\.1, fast on 10\.0\.0\.2"):
        settle([offer(1, mode="exact"), offer(2, mode="fast")], None)
    with pytest.raises(ConfigError, match=r"different threads: 3 on 10\.0\.0\.2, 4 on the run"):
        settle([offer(1), offer(2, threads=3, asked=True)], Agreed(lanes=4, threads=4))
    with pytest.raises(ConfigError, match=r"4 processes .* are above lanes 3.*--lanes 4"):
        settle([offer(1, lanes=3), offer(2)], None)


def test_a_run_directory_must_be_given():
    with pytest.raises(ConfigError, match="nnodes is 2, and no run_dir is given"):
        open_run_dir(from_flat({"nnodes": 2, "rdzv_endpoint": "127.0.0.1:5"}))


def test_nobody_answers_or_the_port_is_taken(monkeypatch):
    monkeypatch.setattr(rendezvous, "_FIRST_LOOK_S", 1.0)
    options = {"device": "cpu", "nproc": 1, "nnodes": 2, "timeout_s": 1.0}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=rf"port {port} of 127\.0\.0\.1 cannot be opened"):
            launch(print, rdzv_endpoint=f"127.0.0.1:{port}", **options)
    with pytest.raises(MachineError, match=r"fewer than 2 machines were at .* within 1 s"):
        launch(print, rdzv_endpoint=f"127.0.0.1:{port}", **options)
    with pytest.raises(ConfigError, match="nproc_min is for one machine"):
        launch(print, rdzv_endpoint="127.0.0.1:5", nproc_min=1, **options)


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
