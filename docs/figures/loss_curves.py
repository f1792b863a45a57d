"""Draw the loss curves of one and of four processes, exact and fast: python docs/figures/loss_curves.py.

Writes loss_curves.svg beside this file. Needs matplotlib (pip install matplotlib) and takes a minute or two.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
STEPS = 120


def losses(nproc: int, mode: str, directory: Path) -> list[float]:
    """Return the loss of each step of a run on the built-in digits with four lanes."""
    run_dir = directory / f"{mode}-{nproc}"
    flags = ["--lanes", 4, "--threads", 1, "--batch-size", 64, "--steps", STEPS, "--log-every", 1, "--quiet"]
    words = ["train", "--data", "digits", "--device", "cpu", "--nproc", nproc, "--mode", mode, *flags]
    command = [sys.executable, "-m", "evenstep", *map(str, words), "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def main() -> None:
    """Train four times and draw."""
    with tempfile.TemporaryDirectory() as directory:
        curves = {
            (mode, nproc): losses(nproc, mode, Path(directory))
            for mode in ("exact", "fast")
            for nproc in (1, 4)
        }
    assert curves["exact", 1] == curves["exact", 4], "exact mode must have the same bits"
    mpl.rcParams.update({"svg.hashsalt": "evenstep", "svg.fonttype": "path", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    steps = range(1, STEPS + 1)
    left.plot(steps, curves["exact", 1], color="#1b6ca8", linewidth=4, alpha=0.35, label="1 process")
    left.plot(steps, curves["exact", 4], color="#b3261e", linewidth=1, label="4 processes")
    left.set(title="evenstep, exact mode: the loss", xlabel="step", ylabel="loss")
    left.legend()
    for mode, colour, name in (
        ("fast", "#8a6d00", "plain DDP (--mode fast)"),
        ("exact", "#b3261e", "exact mode"),
    ):
        apart = [abs(a - b) for a, b in zip(curves[mode, 1], curves[mode, 4], strict=True)]
        right.plot(steps, apart, color=colour, linewidth=1.2, label=name)
    right.set(title="|loss on 4 processes - loss on 1 process|", xlabel="step")
    right.set_yscale("symlog", linthresh=1e-8)
    right.set_ylim(bottom=-2e-9)
    right.legend()
    figure.savefig(HERE / "loss_curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
