"""Time, CPU time and memory of a short `evenstep train`, and what each way of starting it takes.

    python benchmarks/startup.py [--nproc 2] [--rounds 5]

Rows take turns in each round:

* command: as it is; the command's process has no torch (apart.py).
* here: the command's process calls `launch` itself, and imports torch for that.
* script: `python own_loop.py`, a script of one's own that imports torch before it calls `launch`.
* run: `evenstep run own_loop.py`, which has the fork server start before the script.
* imports: the fork server's alone (preload.py), and "collected" the same with Python's garbage collector on.

Prints medians: seconds from the start to the end of the first step, CPU seconds of all processes, and the
peak of the sum of their proportional set sizes in a round of its own, which reading takes time from. On a
machine that does other things, look at the CPU seconds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import record

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from watching import adopt_orphans, descendants, pss_mb

OWN = """
import sys
import torch
import evenstep

def main(world):
    data = [(torch.full((3072,), float(i)), i % 10) for i in range(128)]
    model = torch.nn.Linear(3072, 10)
    state = evenstep.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in evenstep.Loader(data, batch_size=64).batches(state, steps=1):
        evenstep.train_step(state, batch, evenstep.cross_entropy())
        if world.is_first:
            print("step 1/1", flush=True)

if __name__ == "__main__":
    evenstep.launch(main, nproc=int(sys.argv[1]), device="cpu", threads=1)
"""
HERE = "import sys; from evenstep.cli import main; sys.exit(main(sys.argv[1:]))"
IMPORTS = "import evenstep.preload"
COLLECTED = "import gc; gc.disable = gc.freeze = lambda: None; import evenstep.preload"
NONE = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def rows(nproc, directory):
    """Return the command line of each row."""
    flags = ["train", "--data", "digits", "--nproc", str(nproc), "--threads", "1", "--device", "cpu"]
    flags += ["--steps", "1", "--log-every", "1", "--run-dir"]
    own = Path(directory, "own_loop.py")
    own.write_text(OWN)
    return {
        "command": [sys.executable, "-m", "evenstep", *flags, f"{directory}/command"],
        "here": [sys.executable, "-c", HERE, *flags, f"{directory}/here"],
        "script": [sys.executable, str(own), str(nproc)],
        "run": [sys.executable, "-m", "evenstep", "run", str(own), str(nproc)],
        "imports": [sys.executable, "-c", IMPORTS],
        "imports, collected": [sys.executable, "-c", COLLECTED],
    }


def cpu_s():
    """Return the CPU seconds of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def run(words, *, memory):
    """Run a command to its end; return its times and, if asked for, its memory."""
    before, begun, first, peak = cpu_s(), time.time(), None, 0.0
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, env={**os.environ, **NONE, "PYTHONUNBUFFERED": "1"}, **pipes) as process:
        over = threading.Event()

        def watch():
            nonlocal peak
            while not over.wait(0.05):
                peak = max(peak, pss_mb(descendants(os.getpid())))

        watcher = threading.Thread(target=watch)
        if memory:
            watcher.start()
        for line in process.stdout:
            if first is None and line.startswith("step 1/"):
                first = time.time() - begun
        code = process.wait()
        over.set()
        if memory:
            watcher.join()
    while descendants(os.getpid()):  # what the command started ends just after it, and its time counts
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    if code != 0:
        raise SystemExit(f"{words} ended with exit code {code}")
    return {"first_step_s": first, "cpu_s": cpu_s() - before, "whole_s": time.time() - begun, "pss_mb": peak}


def main():
    """Measure, print, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    adopt_orphans()
    found = {}
    for number in range(options.rounds + 1):  # the first one is for the memory, and warms the page cache
        with tempfile.TemporaryDirectory() as directory:
            for name, words in rows(options.nproc, directory).items():
                found.setdefault(name, []).append(run(words, memory=number == 0))
    table = []
    for name, runs in found.items():
        row = {"row": name, "peak_pss_mb": round(runs[0]["pss_mb"])}
        for key in ("first_step_s", "cpu_s", "whole_s"):
            values = [each[key] for each in runs[1:] if each[key] is not None]
            row[key] = round(statistics.median(values), 2) if values else None
            row[f"{key}_range"] = [round(min(values), 2), round(max(values), 2)] if values else None
        table.append(row)
        first = "" if row["first_step_s"] is None else f"first step {row['first_step_s']} s, "
        print(f"{name:20} {first}CPU {row['cpu_s']} s, peak {row['peak_pss_mb']:,} MB", flush=True)
    record.keep("startup", nproc=options.nproc, rounds=options.rounds, rows=table)


if __name__ == "__main__":
    main()
