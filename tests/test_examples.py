"""The examples run as they are written, and give the same bits on any number of processes."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from evenstep import launch
from scripts import CPU

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# One thread each: several processes on few cores would wait for each other.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(name, directory):
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def accuracy_in(text):
    return float(re.search(r"accuracy (\d\.\d+)", text)[1])


def test_the_quick_start(tmp_path):
    for name in ("plain.py", "with_evenstep.py"):
        assert accuracy_in(run(f"quickstart/{name}", tmp_path)) > 0.9
        (tmp_path / "spirals.pt").unlink()


def test_the_quick_start_on_one_process_and_on_two():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (block,) = re.findall(r"<!-- runs: quickstart -->\n```python\n(.*?)```", page, re.S)
    names = runpy.run_path(str(EXAMPLES / "quickstart" / "with_evenstep.py"))
    exec(block, names)  # its assert compares the weights
    assert len(names["digests"]) == 2


def test_your_own_loop():
    example = runpy.run_path(str(EXAMPLES / "own_loop.py"))
    found = [launch(example["main"], nproc=nproc, lanes=4, **CPU) for nproc in (1, 2)]
    assert found[0] == found[1]
    assert found[0][0] > 0.85


def test_talking(tmp_path):
    assert run("talk.py", tmp_path).splitlines() == ["go on True", "6 messages"]
