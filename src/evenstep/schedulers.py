"""What Slurm and Kubernetes tell a process about its place, from the environment variables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from evenstep.errors import MachineError

_FIRST_PORT = 20_000
_NUM_PORTS = 10_000


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process as one of several.

    The shell of ``salloc`` and the script of ``sbatch`` have most of Slurm's variables, too, and a rank of 0;
    a run there is one on this machine alone, and so is a step with one task.
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return False
    return _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default="1") > 1


def slurm_place(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return rank, world_size, local_rank, local_world_size, node_rank and num_nodes of a task.

    Raises:
        MachineError: a variable is missing or is not what Slurm sets.
    """
    num_tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node_rank = _number(environ, "SLURM_NODEID", default="0")
    per_node = tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(num_tasks)
    )
    if node_rank >= len(per_node) or sum(per_node) != num_tasks:
        raise MachineError(
            f"Slurm's variables contradict each other: {num_tasks} tasks, {per_node} tasks on the nodes, and "
            f"this is node {node_rank}. Start evenstep with srun itself, not from within another step."
        )
    return {
        "rank": _number(environ, "SLURM_PROCID"),
        "world_size": num_tasks,
        "local_rank": _number(environ, "SLURM_LOCALID"),
        "local_world_size": per_node[node_rank],
        "node_rank": node_rank,
        "num_nodes": len(per_node),
    }


def slurm_meeting(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return where the tasks of a step meet: a host and a port that all of them find out by themselves.

    It is MASTER_ADDR and MASTER_PORT where they are set, else the step's first node, and a port that depends
    on the job and the step, so that two runs on a node do not meet each other.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = environ.get("MASTER_ADDR") or next(hosts(nodes), "127.0.0.1")
    if "MASTER_PORT" in environ:
        return host, _number(environ, "MASTER_PORT")
    job = _number(environ, "SLURM_JOB_ID", default="0")
    return host, _FIRST_PORT + (31 * job + _number(environ, "SLURM_STEP_ID", default="0")) % _NUM_PORTS


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node: ``"2(x3),1"`` is ``[2, 2, 2, 1]``.

    Raises:
        MachineError: it is not of this form.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise MachineError(
                f"Slurm's tasks per node are {text!r}; expected such as 2(x3),1. Set "
                "SLURM_TASKS_PER_NODE right."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def hosts(nodelist: str) -> Iterator[str]:
    """Yield the hosts of a Slurm node list: ``n[01-03,7],m5`` is n01, n02, n03, n7, m5.

    Raises:
        MachineError: a bracket is not closed, or holds something else than numbers.
    """
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", part.strip())
        if "[" in "".join(pieces) or any(not _is_ranges(text) for text in pieces[1::2]):
            raise MachineError(
                f"Slurm's node list {nodelist!r} cannot be read at {part!r}; expected such as n[01-03,7],m5. "
                "Set MASTER_ADDR to the first node's name."
            )
        choices = [[text] if i % 2 == 0 else list(_numbers(text)) for i, text in enumerate(pieces)]
        yield from map("".join, itertools.product(*choices))


def _is_ranges(text: str) -> bool:
    return re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text) is not None


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def is_pytorchjob(environ: Mapping[str, str]) -> bool:
    """Return whether Kubeflow's PyTorchJob started this pod: RANK counts pods then, and is no process's."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    in_cluster = "KUBERNETES_SERVICE_HOST" in environ or any(name.startswith("PET_") for name in environ)
    return in_cluster and "LOCAL_RANK" not in environ and all(name in environ for name in names)


def pytorchjob_place(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the place of a pod's only process, as :func:`slurm_place` does.

    Raises:
        MachineError: the job wants several processes in a pod.
    """
    nproc = environ.get("PET_NPROC_PER_NODE", "1")
    if nproc not in ("1", "auto"):
        raise MachineError(
            f"the PyTorchJob has nprocPerNode {nproc} and starts one process in each pod, which would train "
            'alone. Have torchrun start them: command: ["torchrun", "-m", "evenstep", "train", ...]; it '
            "reads the job's variables. Or leave out nprocPerNode."
        )
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": rank,
        "num_nodes": world_size,
    }


def _number(environ: Mapping[str, str], *names: str, default: str | None = None) -> int:
    name = next((name for name in names if name in environ), names[0])
    text = environ.get(name, default)
    if text is None or not text.isdigit():
        raise MachineError(
            f"environment variable {name} is {'missing' if text is None else repr(text)}; expected a whole "
            "number, as the scheduler sets it. Set it right, or unset RANK and SLURM_PROCID to start "
            "processes with --nproc."
        )
    return int(text)
