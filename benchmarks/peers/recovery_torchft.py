"""How long torchft stands still when a process is killed: from kill -9 to the next committed step.

As benchmarks/recovery.py for evenstep: same model, batch and kind of kill. Each process is a replica group
of its own, which this script starts again after a kill, as the scheduler of a cluster would. The lighthouse
takes a group for dead after a second without a heartbeat (``--heartbeat-ms``; torchft's default is 5 s). The
survivors go on without the dead group's samples and gradients, so the weights are not those of an undisturbed
run; the step in hand is thrown away and done again.

    benchmarks/peers/.venv/bin/python benchmarks/peers/recovery_torchft.py --kills 5 --nproc 2 4
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta

STEPS_BETWEEN = 8
PATIENCE_S = 90.0


def train(group, batch_size):
    """Train for ever in one replica group, and tell of each committed step on standard output."""
    import torch
    from common import LR, MOMENTUM, Net
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)

    def load_state(state):
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"peer_{group}",
        timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    images = torch.rand(batch_size, 3, 32, 32)
    labels = torch.randint(0, 10, (batch_size,))
    step = -1
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if manager.current_step() > step:
            step = manager.current_step()
            line = f"step {group} {step} {os.getpid()} {time.time()} {manager.num_participants()}\n"
            os.write(1, line.encode())


class Run:
    """The replica groups of one run, and what they tell."""

    def __init__(self, nproc, lighthouse):
        self.nproc, self.lighthouse = nproc, lighthouse
        self.told = []
        self.new = threading.Condition()
        self.processes = [self.start(group) for group in range(nproc)]

    def start(self, group):
        """Start a replica group."""
        command = [sys.executable, __file__, "--group", str(group), "--batch-size", str(128 // self.nproc)]
        variables = {"TORCHFT_LIGHTHOUSE": self.lighthouse, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **variables},
        )
        threading.Thread(target=self.listen, args=(process,), daemon=True).start()
        return process

    def listen(self, process):
        """Note what a group says."""
        for line in process.stdout:
            word, *values = line.split()
            if word == "step":
                group, step, pid, at, members = map(float, values)
                with self.new:
                    self.told.append((at, int(group), int(step), int(pid), int(members)))
                    self.new.notify_all()

    def wait(self, condition):
        """Return the first line for which ``condition(line)``; TimeoutError if there is none in time."""
        with self.new:
            if not self.new.wait_for(lambda: any(map(condition, self.told)), PATIENCE_S):
                last = self.told[-1] if self.told else "nothing"
                raise TimeoutError(f"no such step in {PATIENCE_S} s; the last word was {last}")
            return next(filter(condition, self.told))

    def close(self):
        """End all groups."""
        for process in self.processes:
            process.kill()
            process.wait()


def measure(nproc, kills, heartbeat_ms):
    """Return the seconds to the next committed step, and to the first one with all groups, for each kill."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=100,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=heartbeat_ms,
    )
    dice = random.Random(nproc)
    run = Run(nproc, f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    steps, wholes = [], []
    try:
        for _ in range(kills):
            since = time.time()
            together = run.wait(lambda line, since=since: line[0] > since and line[4] == nproc)
            run.wait(lambda line, step=together[2]: line[2] >= step + STEPS_BETWEEN)
            victim = dice.randrange(nproc)
            killed_at, killed_step = time.time(), max(line[2] for line in run.told)
            os.kill(run.processes[victim].pid, signal.SIGKILL)
            run.processes[victim].wait()
            run.processes[victim] = run.start(victim)
            found = run.wait(lambda line, a=killed_at, s=killed_step: line[0] > a and line[2] > s + 1)
            whole = run.wait(lambda line, a=found[0]: line[0] > a and line[4] == nproc)
            steps.append(found[0] - killed_at)
            wholes.append(whole[0] - killed_at)
    finally:
        run.close()
        lighthouse.shutdown()
    return steps, wholes


def main():
    """Measure, and print one line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--heartbeat-ms", type=int, default=1000)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group is not None:
        train(options.group, options.batch_size)
        return
    for nproc in options.nproc:
        steps, wholes = measure(nproc, options.kills, options.heartbeat_ms)
        row = {
            "name": f"torchft, {nproc} processes",
            "kills": len(steps),
            "first_s": round(steps[0], 3),
            "median_s": round(statistics.median(steps), 3),
            "max_s": round(max(steps), 3),
            "all_back_median_s": round(statistics.median(wholes), 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
