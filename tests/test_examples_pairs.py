"""The pairs plain.py and with_evenstep.py: both learn, and the processes do not change the weights."""

import difflib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
TABLE = (EXAMPLES / "README.md").read_text()
# Steps that are enough to learn something, and what is better than at the start by at least how much.
PAIRS = {
    "cifar10": (20, "accuracy", 0.15),
    "text": (15, "accuracy", 0.2),
    "tabular": (10, "accuracy", 0.5),
    "gan": (40, "distance", -0.3),
    "stream": (40, "accuracy", 0.2),
    "finetune": (10, "accuracy", 0.5),
}
FLAGS = {"cifar10": ("--data", "digits")}
LINE = re.compile(r"(accuracy|distance) (\d\.\d{3}), weights ([0-9a-f]{16})\n")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(random_state)
    assert not os.listdir(tmp_path)


def run(name, script, capsys, monkeypatch, *flags):
    """Run a script in this process as from the command line; return what it prints: name, value, digest."""
    path = str(EXAMPLES / name / script)
    monkeypatch.setattr(sys, "argv", [path, *FLAGS.get(name, ()), *map(str, flags)])
    runpy.run_path(path, run_name="__main__")
    printed = capsys.readouterr()
    assert printed.err == ""
    found = LINE.fullmatch(printed.out)
    assert found, printed.out
    return found[1], float(found[2]), found[3]


def has_learned(name, start, end):
    _, what, by = PAIRS[name]
    assert start[0] == end[0] == what
    assert (end[1] - start[1]) * by > 0
    return abs(end[1] - start[1]) >= abs(by)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair(name, capsys, monkeypatch):
    steps = PAIRS[name][0]
    start = run(name, "plain.py", capsys, monkeypatch, "--steps", 0)
    plain = run(name, "plain.py", capsys, monkeypatch, "--steps", steps)
    assert has_learned(name, start, plain), (start, plain)
    one, two = (
        run(name, "with_evenstep.py", capsys, monkeypatch, "--steps", steps, "--nproc", nproc)
        for nproc in (1, 2)
    )
    assert one == two
    assert has_learned(name, start, one), (start, one)
    assert len({start[2], plain[2], one[2]}) == 3  # a digest that never changes would show nothing


def rows():
    return re.findall(r"^\| \[(\w+)\]\((\w+)/with_evenstep\.py\) \| [^|]+ \| (\d+) \| (\d+) \|", TABLE, re.M)


def test_the_table_has_every_pair():
    there = {path.parent.name for path in EXAMPLES.glob("*/plain.py")}
    assert {name for name, _, _, _ in rows()} == there == {"quickstart", *PAIRS}
    assert all(name == folder for name, folder, _, _ in rows())


@pytest.mark.parametrize(
    ("name", "new", "gone"), [(name, int(new), int(gone)) for name, _, new, gone in rows()]
)
def test_the_table_counts_the_lines_that_differ(name, new, gone):
    old, changed = ((EXAMPLES / name / script).read_text() for script in ("plain.py", "with_evenstep.py"))
    lines = list(difflib.ndiff(old.splitlines(), changed.splitlines()))
    found = [sum(line.startswith(sign) and line.strip() != sign for line in lines) for sign in "+-"]
    assert found == [new, gone]
    assert new <= 10
