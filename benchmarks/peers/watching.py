"""Run one command and watch it: its lines with their times, the memory of all its processes, its end."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

Lines = list[tuple[float, str]]
_SAMPLE_EVERY_S = 0.1
_LOOK_EVERY_S = 0.01
_LEFT_AFTER_S = 1.0
"""How long after the end a process that is still there counts as left behind."""
_SET_CHILD_SUBREAPER = 36
RESULT_KEYS = {
    "launch_to_first_step_s",
    "steady_images_per_s",
    "eval_images_per_s",
    "test_samples",
    "ended_at",
}


class Failed(Exception):
    """A run ended badly, took too long, or did not say its times."""


def adopt_orphans():
    """Have processes whose parent has died become children of this one, so that none is missed or left."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def descendants(root):
    """Return the ids of all processes below ``root``."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parts[2]))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def pss_mb(pids):
    """Return the proportional set size of some processes together, in MB (2**20 bytes)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def read_json(lines: Lines, started: float) -> dict:
    """Return the times that a script has printed, as the last line that has them."""
    for _, text in reversed(lines):
        with contextlib.suppress(ValueError):
            values = json.loads(text[max(0, text.find("{")) :])
            if isinstance(values, dict) and values.keys() >= RESULT_KEYS:
                return values
    raise Failed("it ended well and printed no times. Its last lines: " + tail(lines))


def tail(lines: Lines) -> str:
    """Return the end of what was printed."""
    return " | ".join(text.strip() for _, text in lines[-8:])[-1500:]


def run_once(words, reading, *, cwd, memory, timeout_s):
    """Run a command to its end and return what was measured.

    Args:
        words: the command line; ``{now}`` in it becomes the time of the start.
        reading: ``reading(lines, started)`` returns the times that the run tells.
        cwd: the directory to run in.
        memory: whether to measure the memory; it takes time from the processes.
        timeout_s: when to give up.

    Raises:
        Failed: it ended badly, took too long or did not tell its times.
    """
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    lines, peak = [], [0.0]
    before = frozenset(descendants(os.getpid()))  # none of this run's business
    started = time.time()
    process = subprocess.Popen(
        [word.replace("{now}", repr(started)) for word in words],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    threads = [threading.Thread(target=_collect, args=(s, lines)) for s in (process.stdout, process.stderr)]
    over = threading.Event()
    if memory:
        threads.append(threading.Thread(target=_sample, args=(peak, over, before)))
    for thread in threads:
        thread.start()
    try:
        code = process.wait(timeout_s)
        ended = time.time()
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {timeout_s:g} s. Its last lines: {tail(lines)}") from None
    finally:
        over.set()
        left, gone = _end_all(before)
        process.wait()
        for thread in threads:
            thread.join()
    if code != 0:
        raise Failed(f"exit code {code}. Its last lines: {tail(lines)}")
    times = reading(sorted(lines, key=lambda line: line[0]), started)
    ended_at = times.pop("ended_at")
    return {
        **times,
        "last_step_to_exit_s": ended - ended_at,
        "last_step_to_all_gone_s": gone - ended_at,
        "whole_s": ended - started,
        "peak_pss_mb": peak[0] if memory else None,
        "processes_left": left,
    }


def _collect(stream, lines):
    for line in stream:
        lines.append((time.time(), line.decode(errors="replace").rpartition("\r")[2].rstrip("\n")))
    stream.close()


def _sample(peak, over, before):
    while not over.is_set():
        peak[0] = max(peak[0], pss_mb(set(descendants(os.getpid())) - before))
        over.wait(_SAMPLE_EVERY_S)


def _end_all(before):
    """Wait until all processes of a run are gone; kill what is left after a second.

    Returns:
        How many processes were left, and when the last one was gone.
    """
    deadline = time.time() + _LEFT_AFTER_S
    while (left := _alive(before)) and time.time() < deadline:
        time.sleep(_LOOK_EVERY_S)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.time() + 10
    while _alive(before) and time.time() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return len(left), time.time()


def _alive(before):
    """Return the processes of the run; those that have ended are taken note of first."""
    found = set(descendants(os.getpid())) - before
    for pid in list(found):
        with contextlib.suppress(ChildProcessError):  # somebody else's child
            if os.waitpid(pid, os.WNOHANG)[0]:
                found.remove(pid)
    return found
