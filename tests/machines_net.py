"""Several "machines" for the tests: network namespaces, joined by a bridge in another."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import processes

HERE = Path(__file__).parent
TRAIN = (
    "-m",
    "evenstep",
    "train",
    "--data",
    "digits",
    "--model",
    "machines_net:unhurried",
    "--device",
    "cpu",
)
TRAIN += ("--threads", "1", "--batch-size", "16", "--json")
_numbers = itertools.count()


def unhurried():
    """A model that takes its time: PAUSE_S seconds for each lane."""
    import torch

    class Unhurried(torch.nn.Sequential):
        def forward(self, images):
            time.sleep(float(os.environ.get("PAUSE_S", "0")))
            return super().forward(images)

    return Unhurried(torch.nn.Flatten(), torch.nn.Linear(3072, 10))


def missing():
    """Why the tests with several machines cannot run here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip`, from the package iproute2"
    name = f"es{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def ip(*words):
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stderr}"


class Network:
    """``num`` machines 10.77.0.1, 10.77.0.2, ... and what runs on them; a context manager."""

    def __init__(self, num):
        self.prefix = f"es{os.getpid()}-{next(_numbers)}"
        self.num = num
        self.started = []
        # Of its own: a machine that is killed whole leaves its temporary files behind.
        self.temporary = tempfile.mkdtemp(prefix="esm")

    def __enter__(self):
        switch = f"{self.prefix}s"
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number in range(1, self.num + 1):
                name = self.namespace(number)
                ip("netns", "add", name)
                ip(
                    "-n",
                    switch,
                    "link",
                    "add",
                    f"port{number}",
                    "type",
                    "veth",
                    "peer",
                    "net0",
                    "netns",
                    name,
                )
                ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "net0")
                ip("-n", name, "link", "set", "net0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                self.kill(process)
            process.wait()
            for stream in (process.stdout, process.stderr):
                stream.close()
        for name in (f"{self.prefix}s", *map(self.namespace, range(1, self.num + 1))):
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in left.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def namespace(self, number):
        return f"{self.prefix}m{number}"

    def start(self, number, *words, variables=None):
        """Start a Python program on a machine."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(number), sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": self.temporary, **(variables or {})},
        )
        self.started.append(process)
        return process

    def train(self, number, tmp_path, *words, nnodes=2, host=1, pause_s=0.03):
        """Start ``evenstep train`` on a machine; all meet at 10.77.0.``host``.

        ``pause_s`` is slept for each lane, so that a run lasts until another machine has started.
        """
        return self.start(
            number,
            *TRAIN,
            *("--nnodes", nnodes, "--rdzv-endpoint", f"10.77.0.{host}:29411"),
            *("--run-dir", tmp_path / "run", "--timeout-s", 60, *words),
            variables={"PAUSE_S": str(pause_s), "PYTHONPATH": str(HERE)},
        )

    def kill(self, process):
        """End a whole machine: its agent, its fork server and its workers at once."""
        family = [process.pid, *_family(process.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def cut(self, number):
        """Cut a machine's cable."""
        ip("-n", f"{self.prefix}s", "link", "set", f"port{number}", "down")

    def heal(self, number):
        ip("-n", f"{self.prefix}s", "link", "set", f"port{number}", "up")


def _family(root):
    table = processes()
    found = [pid for pid, (parent, _, _) in table.items() if parent == root]
    return found + [pid for child in found for pid in _family(child)]


def wait_for(condition, process, seconds=60):
    """Wait until ``condition()``; fail with what ``process`` says if it ends or takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


__all__ = ["Network", "missing", "wait_for"]
