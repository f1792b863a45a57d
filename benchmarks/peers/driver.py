"""Run all peers in turn, several rounds, and write medians, spread and ratios to results/.

    .venv/bin/python driver.py --source PATH      all peers: 70 steps, 2,001 test images, 3 rounds
    .venv/bin/python driver.py --quick            a smoke run: 15 steps, 101 test images, 1 round
    .venv/bin/python driver.py --epochs 3 --eval 10000 --steps 0     a whole job
    .venv/bin/python driver.py --nproc 4 --peers handwritten_torchrun evenstep

README.md says what is measured and how. Only the standard library is used here, so the driver costs little.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import peers
import summary
from watching import Failed, adopt_orphans, run_once

HERE = Path(__file__).resolve().parent
PACKAGES = [
    *("torch", "torchvision", "numpy", "pillow", "evenstep"),
    *("accelerate", "lightning", "torchmetrics", "pytorch-ignite", "ray", "torchft"),
]


def machine():
    """Return what the numbers depend on besides the software."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def versions(python):
    """Return the versions of Python and of the packages in the peers' environment."""
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(), **{n: found.get(n) for n in sys.argv[1:]}}))"
    )
    answer = subprocess.run([python, "-c", code, *PACKAGES], check=True, capture_output=True, text=True)
    found = json.loads(answer.stdout)
    return {**found, "evenstep commit": commit(python)}


def commit(python):
    """Return the commit of the evenstep that the peers' Python imports; "-dirty" follows changed files.

    None if it is not imported from a checkout.
    """
    code = "import importlib.util as u; print(u.find_spec('evenstep').origin)"
    origin = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    words = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(words, cwd=Path(origin).parent, capture_output=True, text=True)
    return git.stdout.strip() or None


def arguments(argv=None):
    """Return the driver's arguments, with --quick put in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", help="images, as for evenstep train --data; needed the first time")
    parser.add_argument("--data", type=Path, default=HERE / ".data", help="where data.py's files are")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(peers.PEERS),
        choices=list(peers.PEERS),
        metavar="NAME",
        help="run these alone: " + ", ".join(peers.PEERS),
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=70, help="steps of an epoch; 0: the whole epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--eval", type=int, default=2001, help="test images, evaluated after each epoch")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument(
        "--no-memory-round", action="store_true", help="leave out the round before the others"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="for one run of one peer; raise it for whole jobs"
    )
    parser.add_argument("--python", default=str(HERE / ".venv/bin/python"), help="the peers' Python")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    parser.add_argument("--quick", action="store_true", help="15 steps, 101 test images, 1 round")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.eval, args.rounds, args.no_memory_round = 15, 101, 1, True
    args.peers = list(dict.fromkeys(args.peers))
    if args.steps and args.epochs > 1:
        parser.error("several epochs are whole ones: give --steps 0 with --epochs")
    return args


def prepare(args):
    """Have the data files made, if they are not there."""
    have_arrays = (args.data / "meta.json").exists()
    if have_arrays and args.source is None and (args.data / f"data-{args.eval}.npz").exists():
        return
    if not have_arrays and args.source is None:
        raise SystemExit(f"there are no data in {args.data} yet; give --source PATH once")
    words = [args.python, str(HERE / "data.py"), str(args.data), "--test", str(args.eval)]
    words += [] if args.source is None else ["--source", args.source]
    if subprocess.run(words).returncode != 0:
        raise SystemExit("the data files could not be made; the lines above say why")


def in_turn(names, number, rounds):
    """Return the peers in the order of a round: each round begins at another one, evenly spread over them."""
    first = (number - 1) * len(names) // rounds if number else 0
    return [*names[first:], *names[:first]]


def run_all(args):
    """Run every peer in every round; return one record for each run.

    The round before the others, round 0, is for memory alone: reading /proc/*/smaps_rollup takes time from
    the processes, so times of that round do not count.
    """
    records = []
    for number in range(int(args.no_memory_round), args.rounds + 1):
        for name in in_turn(args.peers, number, args.rounds):
            record = {"round": number, "peer": name, **one_run(args, name, memory=number == 0)}
            records.append(record)
            print(summary.progress_line(record), file=sys.stderr, flush=True)
    return records


def one_run(args, name, *, memory):
    """Return what one run of one peer gave, or its error."""
    scratch = args.data / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    peer = peers.PEERS[name]
    try:
        return run_once(
            peer.words(args, scratch), peer.reading(args), cwd=HERE, memory=memory, timeout_s=args.timeout_s
        )
    except Failed as error:
        return {"error": str(error)}


def main(argv=None):
    """Run, summarise, write."""
    args = arguments(argv)
    prepare(args)
    adopt_orphans()
    begun = time.time()
    report = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "argv": sys.argv[1:] if argv is None else list(argv),
        "settings": {
            key: getattr(args, key) for key in ("steps", "epochs", "eval", "nproc", "augment", "rounds")
        },
        "machine": machine(),
        "versions": versions(args.python),
    }
    records = run_all(args)
    report |= {
        "took_s": round(time.time() - begun, 1),
        "summary": summary.summarise(records),
        "records": records,
    }
    report["targets"] = summary.targets(report["summary"], args.nproc, augment=args.augment)
    args.results.mkdir(parents=True, exist_ok=True)
    kind = "quick_" if args.quick else ""
    path = args.results / f"peers_{kind}{report['date'].replace(':', '')}"
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(summary.page(report))
    print(summary.page(report))
    print(f"written: {path}.json and .md", file=sys.stderr)
    return 0 if all("error" not in record for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
