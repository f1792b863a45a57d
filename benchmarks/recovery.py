"""How long a run stands still when a process is killed: from kill -9 to the next committed step.

One run of net on the digits for each number of processes; a random rank is killed every time some steps have
been committed since the last kill. Beside it the same model under plain torchrun with a checkpoint every
``--every`` steps, restarted by torchrun itself (with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its
workers do not find each other again in most restarts).

    python benchmarks/recovery.py --kills 20
    python benchmarks/recovery.py --trace --kills 3 --nproc 4   # where the time goes, one line a moment
    python benchmarks/recovery.py --steady                      # what recovery costs while nobody dies
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from datetime import datetime
from pathlib import Path

import record

from evenstep import log
from evenstep.launcher import launch

STEPS_BETWEEN = 8
TIMEOUT_S = 30.0
_LINE = re.compile(r"step (\d+) (\d+) (\d+) ([\d.]+)")
_MOMENT = re.compile(
    r"([\d-]+ [\d:.]+) \| DEBUG +\| (rank \d+) \| .*\| moment: (.*) \(([\d.]+) ms of CPU time\)"
)
_AGENTS = ("torch.distributed.elastic.agent.server.api", "evenstep.launcher")


def train(world, steps):
    """Train net on the digits; tell the parent of each committed step."""
    import torch

    from evenstep import Loader, TrainState, cross_entropy, train_step
    from evenstep.data.sources import open_source
    from evenstep.models import build

    log.moment("main begins")
    source = open_source("digits", data_dir="data", cache_dir=None)
    log.moment("data opened")
    model = build("net", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    log.moment("model built")
    state = TrainState(model, optimizer)
    mean = cross_entropy()

    def loss(model, batch):
        log.moment("forward")
        value = mean(model, batch)
        log.moment("backward")
        return value

    for batch in Loader(source.train, 128, world=world).batches(state, steps=steps):
        before = state.step
        train_step(state, batch, loss)
        if state.step > before:
            world.send((state.step, os.getpid(), time.time()))
            log.moment(f"step {state.step} committed")
    return state.step, world.restart, world.recovery.steps_lost


def step_of(world, recovery):
    """Return a function that does one step of net, with what recovery needs in each step or without it."""
    import torch

    from evenstep import Loader, TrainState, cross_entropy, train_step
    from evenstep.data.sources import open_source
    from evenstep.models import build

    own = dataclasses.replace(world, recovery=recovery, staged=weakref.WeakSet())
    source = open_source("digits", data_dir="data", cache_dir=None)
    model = build("net", num_classes=10)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), world=own)
    batches = Loader(source.train, 128, world=own).batches(state)
    loss = cross_entropy()
    return lambda: train_step(state, next(batches), loss)


def steady(world, rounds, steps):
    """Return the seconds and the CPU seconds of a step, with and without recovery, round by round."""
    import torch

    kinds = {"on": step_of(world, world.recovery), "off": step_of(world, None)}
    found = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind in sorted(kinds, reverse=number % 2 == 0):
            torch.distributed.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                kinds[kind]()
            if number:  # the first round warms up
                now = time.perf_counter(), time.process_time()
                found[kind].append(((now[0] - begun) / steps, (now[1] - cpu) / steps))
    return found


def measure_steady(nproc: int, rounds: int, steps: int) -> dict[str, object]:
    """Return what recovery costs in a step in which nobody dies, as ratios of rounds that take turns."""
    found = launch(steady, rounds, steps, nproc=nproc, lanes=4, threads=1, device="cpu")
    pairs = list(zip(found["on"], found["off"], strict=True))
    return {
        "name": f"a step of net with recovery and without, {nproc} processes",
        "rounds": rounds,
        "steps": steps,
        "on_ms": round(1e3 * statistics.median(wall for wall, _ in found["on"]), 2),
        "off_ms": round(1e3 * statistics.median(wall for wall, _ in found["off"]), 2),
        "ratio": round(statistics.median(on[0] / off[0] for on, off in pairs), 4),
        "cpu_ratio": round(statistics.median(on[1] / off[1] for on, off in pairs), 4),
    }


class Killer:
    """Kills a random rank whenever enough steps have been committed since the last kill."""

    def __init__(self, nproc: int, kills: int) -> None:
        self.left, self.nproc = kills, nproc
        self.random = random.Random(nproc)
        self.pids: dict[int, int] = {}
        self.killed_at: float | None = None
        self.next_at = STEPS_BETWEEN
        self.times: list[float] = []
        self.spans: list[tuple[float, float, int]] = []
        self.victim = -1

    def __call__(self, rank: int, told: tuple[int, int, float]) -> None:
        """Take the word of a committed step, and kill if it is time."""
        step, pid, at = told
        self.pids[rank] = pid
        if self.killed_at is not None and at > self.killed_at and pid not in self.old:
            self.times.append(at - self.killed_at)
            self.spans.append((self.killed_at, at, self.victim))
            self.killed_at = None
            self.pids = {rank: pid}
            self.next_at = step + STEPS_BETWEEN
        elif self.killed_at is None and self.left and step >= self.next_at and len(self.pids) == self.nproc:
            self.left -= 1
            self.old = set(self.pids.values())
            self.victim = self.random.randrange(self.nproc)
            self.killed_at = time.time()
            os.kill(self.pids[self.victim], signal.SIGKILL)


def ours(nproc: int, kills: int, **more: object) -> tuple[Killer, int]:
    """Return the killer, with the times from each kill to the next committed step, and the steps lost."""
    killer = Killer(nproc, kills)
    steps = (STEPS_BETWEEN + 3) * (kills + 2)
    options = {"device": "cpu", "threads": 1, "lanes": 4, "max_restarts": kills + 5, "on_message": killer}
    *_, restarts, lost = launch(train, steps, nproc=nproc, **options, **more)
    assert restarts >= kills, f"{restarts} restarts for {kills} kills"
    return killer, lost


class Heard(logging.Handler):
    """What the agent says, with the times."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        text = record.getMessage().splitlines()[0].removeprefix("moment: ")
        self.lines.append((record.created, "agent", text[:80], ""))


def trace(nproc: int, kills: int) -> None:
    """Print a time line for each kill: what every process came to, milliseconds after the kill."""
    heard = Heard()
    for name in _AGENTS:
        logging.getLogger(name).addHandler(heard)
        logging.getLogger(name).setLevel(logging.DEBUG)
    with tempfile.TemporaryDirectory() as directory:
        killer, _ = ours(nproc, kills, run_dir=directory, log_level="DEBUG")
        lines = list(heard.lines)
        for rank in range(nproc):
            for line in log.path_of(directory, rank).read_text(encoding="utf8").splitlines():
                if match := _MOMENT.fullmatch(line):
                    lines.append((datetime.fromisoformat(match[1]).timestamp(), *match.group(2, 3, 4)))
    for killed, recovered, victim in killer.spans:
        print(
            f"\nrank {victim} of {nproc} killed; the next step was committed after {recovered - killed:.3f} s"
        )
        for at, who, what, cpu in sorted(lines):
            if killed - 0.001 <= at <= recovered + 0.02:
                print(
                    f"{1e3 * (at - killed):7.0f} ms  {who:<7} {what}" + (f"  (CPU {cpu} ms)" if cpu else "")
                )


TORCHRUN = """
    import os, sys, time
    import torch, torch.distributed as dist
    from evenstep.data.sources import open_source
    from evenstep.models import build

    every, steps, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    source = open_source("digits", data_dir="data", cache_dir=None)
    model = build("net", num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    images = torch.from_numpy(source.train.images[:128 // size].copy()).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(source.train.labels[:128 // size].copy())
    while step < steps:
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % every == 0 and rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, path + ".t")
            os.replace(path + ".t", path)
        os.write(1, f"step {rank} {step} {os.getpid()} {time.time()}\\n".encode())
    dist.destroy_process_group()
"""


def torchrun(nproc: int, kills: int, every: int) -> tuple[list[float], int]:
    """Return the times from each kill to the next committed step that is new, and the steps done twice."""
    killer = Killer(nproc, kills)
    seen, twice = 0, 0
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        script.write_text(textwrap.dedent(TORCHRUN))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--max-restarts={kills + 5}",
        ]
        command += [f"--nproc-per-node={nproc}", str(script), str(every)]
        command += [str((STEPS_BETWEEN + every) * (kills + 2)), str(Path(directory) / "checkpoint.pt")]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as process:
            guard = threading.Timer(TIMEOUT_S * (kills + 2), process.kill)
            guard.start()
            for line in process.stdout or ():
                if not (match := _LINE.fullmatch(line.strip())):
                    continue
                rank, step, pid, at = match.groups()
                if int(rank) == 0 and int(step) <= seen:
                    twice += 1
                seen = max(seen, int(step)) if int(rank) == 0 else seen
                killer(int(rank), (int(step), int(pid), float(at)))
            guard.cancel()
    return killer.times, twice


def row(name: str, times: list[float], lost: int) -> dict[str, object]:
    """Return what is printed of one measurement."""
    return {
        "name": name,
        "kills": len(times),
        "first_s": round(times[0], 3),
        "median_s": round(statistics.median(times), 3),
        "max_s": round(max(times), 3),
        "steps_lost": lost,
    }


def main() -> None:
    """Measure, print one line a row, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints under torchrun")
    parser.add_argument("--torchrun-kills", type=int, default=5)
    parser.add_argument("--trace", action="store_true", help="print a time line for each kill, and no rows")
    parser.add_argument("--steady", action="store_true", help="measure a step in which nobody dies")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of --steady")
    options = parser.parse_args()
    if options.steady:
        rows = [measure_steady(nproc, options.rounds, STEPS_BETWEEN) for nproc in options.nproc]
        for each in rows:
            print(each)
        record.keep("recovery_steady", rows=rows)
        return
    if options.trace:
        for nproc in options.nproc:
            trace(nproc, options.kills)
        return
    rows = []
    for nproc in options.nproc:
        killer, lost = ours(nproc, options.kills)
        rows.append(row(f"evenstep, {nproc} processes", killer.times, lost))
        print(rows[-1], flush=True)
        if options.torchrun_kills:
            measured = torchrun(nproc, options.torchrun_kills, options.every)
            rows.append(row(f"torchrun, {nproc} processes, checkpoint every {options.every}", *measured))
            print(rows[-1], flush=True)
    record.keep("recovery", rows=rows)


if __name__ == "__main__":
    main()
