"""Kill processes many times, at every named point and at random moments: the bits must not change.

Every run trains the same small model (convolutions, both kinds of BatchNorm, dropout, Adam, an average) on 4
lanes, on 2 to 4 processes, and is disturbed by several kills: of one rank or of two at once, at a named point
of a step, while the processes recover, while a checkpoint is written, or at a moment chosen at random from
outside. Each must end with the digest of the undisturbed run and without a lost step.

    python benchmarks/soak.py --kills 200
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import record

from evenstep.launcher import launch
from evenstep.testing import POINTS, KillAt

STEPS = 30


@dataclass(frozen=True)
class Faults:
    """The scripted faults of one run; tells the parent before it strikes."""

    faults: tuple[KillAt, ...]

    def __call__(self, rank: int, restart: int, point: str, step: int) -> None:
        """Let each of them strike."""
        for fault in self.faults:
            fault(rank, restart, point, step)


def train(world: Any) -> tuple[str, int, int, int]:
    """Train; save a checkpoint now and then."""
    import torch

    from evenstep import Loader, TrainState, cross_entropy, train_step
    from worlds import SmallNet, digest, images

    model = SmallNet()
    state = TrainState(model, torch.optim.Adam(model.parameters(), lr=0.01), ema_decay=0.9)
    world.send((os.getpid(), world.restart, state.step))
    for batch in Loader(images(), 50).batches(state, steps=STEPS):
        train_step(state, batch, cross_entropy())
        if state.step % 4 == 0:
            state.save()
        world.send((os.getpid(), world.restart, state.step))
    return digest(state), state.step, world.restart, world.recovery.steps_lost


class RandomKiller:
    """Kills from outside, some random time after a step."""

    def __init__(self, dice: random.Random, nproc: int, kills: int) -> None:
        self.dice, self.nproc, self.left = dice, nproc, kills
        self.done = 0
        self.pids: dict[int, int] = {}
        self.armed_in = self.restart = -1

    def __call__(self, rank: int, told: tuple[int, int, int]) -> None:
        """Take a worker's word."""
        pid, restart, step = told
        if restart != self.restart:
            self.restart, self.pids = restart, {}
        self.pids[rank] = pid
        # Once in a start: a survivor that is killed before it has saved leaves nobody to go on from.
        is_due = restart > self.armed_in and len(self.pids) == self.nproc
        if is_due and self.left and step < STEPS - 6:
            self.armed_in = restart
            self.timer = threading.Timer(self.dice.random() * 0.3, self.kill)
            self.timer.start()

    def kill(self) -> None:
        """Kill one rank, or two if a third is left."""
        several = self.nproc > 2 and self.dice.random() < 0.3
        for rank in self.dice.sample(range(self.nproc), 2 if several else 1):
            try:
                os.kill(self.pids[rank], signal.SIGKILL)
            except (KeyError, ProcessLookupError):
                continue
            self.done += 1
        self.left -= 1


def scripted(dice: random.Random, nproc: int, kills: int) -> Faults:
    """Return faults one after the other, each in the start that the one before has caused."""
    faults = []
    step = 0
    for restart in range(kills):
        point = dice.choice(POINTS if restart else [p for p in POINTS if p != "in_recovery"])
        ranks = dice.sample(range(nproc), 2 if nproc > 2 and dice.random() < 0.3 else 1)
        # The commit of the step before may have happened on a survivor, so the next fault is 2 steps on.
        step += dice.randint(2, 3)
        if point == "in_save":
            ranks, step = [0], step + -step % 4
        faults.append(KillAt(tuple(ranks), step, point, restart))
    return Faults(tuple(faults))


def disturbed(seed: int, expected: str) -> dict[str, Any]:
    """Do one run and return what became of it."""
    dice = random.Random(seed)
    nproc = dice.choice((2, 3, 4))
    # Not both in one run: together they may kill everybody at once, and then steps are lost, as they must be.
    scripted_kills, random_kills = dice.choice(((6, 0), (0, 5)))
    faults, killer = scripted(dice, nproc, scripted_kills), RandomKiller(dice, nproc, random_kills)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        options = {"lanes": 4, "device": "cpu", "threads": 1, "timeout_s": 60.0, "run_dir": directory}
        result = launch(train, nproc=nproc, max_restarts=100, on_message=killer, fault=faults, **options)
    digest, step, restarts, lost = result
    return {
        "seed": seed,
        "nproc": nproc,
        "restarts": restarts,
        "points": collections.Counter(f.point for f in faults.faults)
        + collections.Counter(outside=killer.done),
        "kills": sum(len(f.ranks) for f in faults.faults) + killer.done,
        "lost": lost,
        "same": digest == expected and step == STEPS,
        "s": round(time.monotonic() - began, 1),
        "faults": [dataclasses.astuple(fault) for fault in faults.faults],
    }


def main() -> int:
    """Run until enough processes have been killed or the time is over; return 1 if a run went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    expected = launch(train, nproc=1, lanes=4, device="cpu", threads=1)[0]
    end = time.monotonic() + options.seconds
    kills, bad, runs, restarts = 0, [], 0, 0
    points: collections.Counter[str] = collections.Counter()
    while kills < options.kills and time.monotonic() < end:
        try:
            found = disturbed(options.seed + runs, expected)
        except Exception as error:
            found = {"seed": options.seed + runs, "error": str(error), "same": False, "lost": 0}
        runs += 1
        kills += found.get("kills", 0)
        restarts += found.get("restarts", 0)
        points += found.get("points", {})
        if not found["same"] or found["lost"]:
            bad.append(found)
        print(found, flush=True)
    summary = {"runs": runs, "kills": kills, "restarts": restarts, "points": dict(points), "wrong": len(bad)}
    print(summary)
    record.keep(f"soak_{options.seed}", **summary, bad=bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
