import os
import socket
import subprocess
import sys

import pytest

from evenstep import schedulers, world
from evenstep.errors import MachineError
from evenstep.launcher import launch

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[01-03,7]",
}
POD = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def test_a_task_of_srun_is_a_worker():
    place = world.placement(TASK)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 7, 1, 2)
    assert (place.node_rank, place.num_nodes, place.restart, place.launcher) == (2, 4, 0, "srun")
    host, port = place.meeting
    assert host == "n01"
    assert 20_000 <= port < 30_000
    assert place.variables() == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "n01",
        "MASTER_PORT": str(port),
    }
    assert world.placement({**TASK, "SLURM_STEP_ID": "1"}).meeting != place.meeting
    assert world.placement({**TASK, "MASTER_ADDR": "m", "MASTER_PORT": "5"}).meeting == ("m", 5)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "7"},  # salloc's shell
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},  # sbatch's script
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell as a step of its own; srun with one task
        {},
    ],
)
def test_an_allocation_alone_starts_nothing_elsewhere(variables):
    assert world.placement(variables) is None


def test_torchrun_within_a_task_of_srun_wins():
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place = world.placement({**TASK, **torchrun})
    assert (place.world_size, place.meeting, place.variables()) == (2, None, {})


def test_slurm_variables_that_contradict_each_other():
    with pytest.raises(MachineError, match=r"7 tasks, \[2, 2\] tasks on the nodes, and this is node 2"):
        world.placement({**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    with pytest.raises(MachineError, match="SLURM_LOCALID is 'x'; expected a whole number"):
        world.placement({**TASK, "SLURM_LOCALID": "x"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],m5", ["n01", "n02", "n03", "n7", "m5"]),
        ("a[1-2]b[08-10]", ["a1b08", "a1b09", "a1b10", "a2b08", "a2b09", "a2b10"]),
        ("gpu-a.x.org,gpu-b.x.org", ["gpu-a.x.org", "gpu-b.x.org"]),
        ("", []),
    ],
)
def test_node_lists(text, expected):
    assert list(schedulers.hosts(text)) == expected


@pytest.mark.parametrize("text", ["n[1-3", "n[a-b]", "n[]"])
def test_node_lists_that_cannot_be_read(text):
    with pytest.raises(MachineError, match=r"node list .* cannot be read.*Set MASTER_ADDR"):
        list(schedulers.hosts(text))


def test_tasks_per_node():
    assert schedulers.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(MachineError, match="'2x3'; expected such as"):
        schedulers.tasks_per_node("2x3")


def test_a_pod_of_a_pytorchjob_is_a_worker():
    place = world.placement({**POD, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 3, 0, 1)
    assert (place.node_rank, place.num_nodes, place.meeting) == (1, 3, None)
    assert world.placement({**POD, "PET_NPROC_PER_NODE": "auto"}).num_nodes == 3
    with pytest.raises(MachineError, match=r"nprocPerNode 4 .* Have torchrun start them"):
        world.placement({**POD, "PET_NPROC_PER_NODE": "4"})
    with pytest.raises(MachineError, match="LOCAL_RANK is missing"):
        world.placement(POD)  # not in a cluster: somebody has forgotten a variable


def test_the_port_of_a_job_is_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {**TASK, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        expected = rf"127.0.0.1:{port}, .* held by process {os.getpid()}\. Set MASTER_PORT"
        with world.variables(variables), pytest.raises(MachineError, match=expected):
            launch(lambda world: None, device="cpu")


def test_tasks_of_srun_meet():
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    code = (
        "from evenstep import launch\n"
        "def main(world):\n"
        "    import torch\n"
        "    total = torch.ones(1)\n"
        "    torch.distributed.all_reduce(total)\n"
        "    return world.rank, world.num_nodes, world.lanes, total.item()\n"
        "print(launch(main, device='cpu', threads=1, timeout_s=60))\n"
    )
    tasks = []
    for rank in range(2):
        variables = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
        variables |= {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
        variables |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        tasks.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
        )
    try:
        outputs = [task.communicate(timeout=90) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == ["(0, 2, 2, 2.0)", "(1, 2, 2, 2.0)"]
