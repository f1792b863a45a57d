"""Run a job in a new Python interpreter under a chosen hash seed.

The order of a set of strings depends on Python's hash seed (PYTHONHASHSEED), which is chosen when an
interpreter starts. All workers of one launch are forked from one fork server and share its seed, so a sum in
the order of a set has the same bits on all of them, and another value in the next run, on another machine or
after a resume. To see that, the job has to run under several hash seeds, each in an interpreter of its own.
"""

from __future__ import annotations

import ctypes
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from evenstep import program, world
from evenstep.errors import WorkerError

_PROGRAM = "import sys; from evenstep.verify.fresh import child; child(sys.argv[1])"
_PR_SET_PDEATHSIG = 1


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A job and its arguments."""


def run_fresh(calls: Mapping[int, Sequence[Call]], options: dict[str, Any]) -> dict[int, list[Any]]:
    """Run ``job(world, *args)`` as a world of one process, in one new interpreter a hash seed, all at once.

    Args:
        calls: for each value of PYTHONHASHSEED the jobs to run one after the other.
        options: of :func:`evenstep.launcher.launch`.

    Returns:
        The jobs' values by hash seed.

    Raises:
        WorkerError: one failed; the text is the end of what it wrote.
    """
    directory = Path(tempfile.mkdtemp(prefix="evenstep-fresh-"))
    running: list[subprocess.Popen[str]] = []
    try:
        for seed, jobs in calls.items():
            place = directory / str(seed)
            place.mkdir()
            programs = [program.dumps(job, args) for job, args in jobs]
            (place / "payload.pkl").write_bytes(pickle.dumps((sys.path, programs, pickle.dumps(options))))
            running.append(
                subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(place)],
                    env={**world.environment(), "PYTHONHASHSEED": str(seed)},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in running:
            _, text = process.communicate()
            if process.returncode:
                raise WorkerError(
                    f"a fresh interpreter ended with exit code {process.returncode}:\n{text.strip()[-2000:]}"
                )
        return {seed: cloudpickle.loads((directory / str(seed) / "value.pkl").read_bytes()) for seed in calls}
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()
        shutil.rmtree(directory, ignore_errors=True)


def child(place: str) -> None:
    """Run in the new interpreter: launch the jobs on one process, and leave their values in ``place``."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    path, programs, options = pickle.loads(Path(place, "payload.pkl").read_bytes())
    sys.path[:] = path

    from evenstep.launcher import launch, warm_up

    warm_up()
    try:
        values = [
            launch(job, *args, **{**pickle.loads(options), "nproc": 1})
            for job, args in map(cloudpickle.loads, programs)
        ]
    except WorkerError as error:
        sys.stderr.write(str(error))
        raise SystemExit(1) from None
    Path(place, "value.pkl").write_bytes(cloudpickle.dumps(values))
