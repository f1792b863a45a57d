"""Time to accuracy of a recipe on CIFAR-10, from the return key on, and of the hand-written script beside it.

    python benchmarks/recipe.py --data PATH                 seeds 0, 1, 2 of the fast recipe
    python benchmarks/recipe.py --data PATH --first 30      and each once more, ended after 30 steps
    python benchmarks/recipe.py --data PATH --baseline 10   and the hand-written script, for 10 epochs

PATH is CIFAR-10 in any form that ``evenstep train --data`` takes. It is decoded before the clock starts. The
hand-written script is ``peers/handwritten_spawn.py`` with the options of the mission recipe. Every run is a
start of its own, with all cores. It prints a table and keeps ``results/recipe_DATE.json``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

from evenstep.data.sources import prepare
from evenstep.recipes import RECIPES

PEERS = Path(__file__).parent / "peers"
TARGETS = (0.48, 0.90)


def arguments(argv=None):
    """Return the arguments of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="CIFAR-10, as for evenstep train --data")
    parser.add_argument("--cache-dir", help="where decoded images are kept, as for evenstep train")
    parser.add_argument("--recipe", default="fast", choices=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--baseline", type=int, default=0, help="epochs of the hand-written script; 0: not run"
    )
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for evenstep train")
    parser.add_argument("--first", type=int, default=0, help="steps of a short run of each seed; 0: none")
    parser.add_argument("--no-keep", action="store_true", help="write no file into results/")
    return parser.parse_args(argv)


def reached(evaluations, target):
    """Return the seconds at which an accuracy was seen first, of ``[seconds, accuracy]`` pairs; or None."""
    return next((seconds for seconds, accuracy in evaluations if accuracy >= target), None)


def evaluations_of(metrics, started):
    """Return ``[seconds since started, accuracy]`` for each evaluation in the lines of a metrics.jsonl."""
    found, begun = [], started
    for line in map(json.loads, metrics):
        if line["kind"] == "start":
            begun = line["time"]
        if line["kind"] == "eval":
            found.append([round(begun + line["wall_s"] - started, 2), line["accuracy"]])
    return found


def run_recipe(args, seed, steps=0):
    """Train once as a user does, to the end or to a step, and return times and accuracies."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        words = [sys.executable, "-m", "evenstep", "train", "--recipe", args.recipe, "--data", args.data]
        words += ["--cache-dir", args.cache_dir] if args.cache_dir else []
        words += ["--steps", str(steps), "--tta", "none"] if steps else []
        words += ["--seed", str(seed), "--run-dir", str(run_dir), "--json", "--quiet", *args.flags]
        started = time.time()
        shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        whole_s = time.time() - started
        result = json.loads(shown.splitlines()[-1])
        evaluations = evaluations_of((run_dir / "metrics.jsonl").read_text().splitlines(), started)
    return {
        "what": f"recipe {args.recipe}, seed {seed}" + (f", first {steps} steps" if steps else ""),
        "steps": result["step"],
        "whole_s": round(whole_s, 2),
        "first_step_s": round(result["first_step_s"], 2),
        "images_per_s": result["images_per_s"],
        "test_accuracy": result["test_accuracy"],
        "world_size": result["world_size"],
        "weights_sha256": result["weights_sha256"],
        "evaluations": evaluations,
    }


def run_baseline(args, data):
    """Run the hand-written script with the mission recipe, and return times and accuracies."""
    mission = RECIPES["mission"]
    words = [sys.executable, str(PEERS / "handwritten_spawn.py"), "--data", str(data), "--eval", "10000"]
    words += ["--epochs", str(args.baseline), "--processes", "2"]
    words += ["--lr", str(mission["lr"]), "--batch-size", str(mission["batch_size"])]
    started = time.time()
    words += ["--started", str(started)]
    shown = subprocess.run(
        words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    whole_s = time.time() - started
    result = json.loads(shown.splitlines()[-1])
    return {
        "what": f"hand-written script, mission, {args.baseline} epochs",
        "whole_s": round(whole_s, 2),
        "first_step_s": round(result["launch_to_first_step_s"], 2),
        "images_per_s": result["steady_images_per_s"],
        "test_accuracy": result["evaluations"][-1][1],
        "evaluations": result["evaluations"],
    }


def line(run):
    """Return a run as a row of the table."""
    times = [reached(run["evaluations"], target) for target in TARGETS]
    return " | ".join(
        [
            f"| {run['what']}",
            f"{100 * run['test_accuracy']:.2f} %",
            *("-" if seconds is None else f"{seconds:.1f} s" for seconds in times),
            f"{run['whole_s']:.1f} s",
            "- |" if run["images_per_s"] is None else f"{run['images_per_s']:.0f} |",
        ]
    )


def main(argv=None):
    """Run, print the table, keep the record."""
    args = arguments(argv)
    prepare(args.data, data_dir="data", cache_dir=args.cache_dir)
    targets = " | ".join(f"to {100 * target:.0f} %" for target in TARGETS)
    print(
        f"| run | test accuracy | {targets} | whole run | images/s |\n|---|---|---|---|---|---|", flush=True
    )
    runs = []
    with tempfile.TemporaryDirectory() as data:
        if args.baseline:
            words = [sys.executable, str(PEERS / "data.py"), data, "--source", args.data, "--test", "10000"]
            subprocess.run(words, check=True)
        for number, seed in enumerate(args.seeds):
            for steps in [args.first, 0] if args.first else [0]:
                runs.append(run_recipe(args, seed, steps))
                print(line(runs[-1]), flush=True)
            if number == 0 and args.baseline:
                runs.append(run_baseline(args, data))
                print(line(runs[-1]), flush=True)
    most = max(run.get("steps", 0) for run in runs)
    ours = [run for run in runs if run.get("steps") == most]
    medians = {
        key: statistics.median(run[key] for run in ours)
        for key in ("test_accuracy", "whole_s", "images_per_s")
    }
    print(
        "medians of the seeds: " + ", ".join(f"{key} {value:.4g}" for key, value in medians.items()),
        flush=True,
    )
    if not args.no_keep:
        record.keep("recipe", medians=medians, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
