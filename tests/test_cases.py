"""Failures that others have met with other tools (docs/cases.md): each is held by a test that exists."""

import ast
import re
from pathlib import Path

import torch

from evenstep import Loader, TrainState, cross_entropy, train_step
from evenstep.testing import run_ranks
from evenstep.world import World, entered

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cases.md"
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")
ROW = re.compile(r"^\| \S+#\d+", re.M)


def rows():
    return [line for line in PAGE.read_text().splitlines() if ROW.match(line)]


def test_every_row_names_tests_that_exist():
    assert len(rows()) > 30
    there = {}
    for row in rows():
        found = NAMED.findall(row)
        assert found, row
        for module, name in found:
            if module not in there:
                tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
                there[module] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in there[module], f"{module}::{name} does not exist"


class Counted:
    """A million samples that note which of them are read."""

    def __init__(self, n=1_000_000):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return torch.zeros(2), 0


class Late:
    """A run that stands at nine tenths of its third epoch."""

    step, epoch, epoch_step = 2 * 1000 + 900, 2, 900


def test_a_resumed_epoch_reads_nothing_of_what_was_read_before():
    data = Counted()
    with entered(World()), Loader(data, 1000) as loader:
        batch = next(iter(loader.batches(Late())))
    assert (batch.step, batch.epoch_step, batch.size) == (2900, 900, 1000)
    assert len(data.read) == 1000


def test_dataloader_workers_beside_two_ranks_do_not_lock_each_other():
    def main(world):
        data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.zeros(12, dtype=torch.long))
        model = torch.nn.Linear(4, 2)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with Loader(data, 4, workers=2) as loader:
            for epoch in range(1, 9):  # one iteration, and so two new workers, for each epoch
                for batch in loader.batches(state, epochs=epoch):
                    train_step(state, batch, cross_entropy())
        return state.step

    assert run_ranks(main, 2) == [24, 24]


def test_only_the_first_rank_writes_and_all_read_the_same_checkpoint(tmp_path):
    def main(world):
        model = torch.nn.Linear(4, 2)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return str(state.save(wait=True)), str(state.resumed_from)

    written = run_ranks(main, 3, run_dir=str(tmp_path))
    path = str(tmp_path / "checkpoints" / "step-00000000")
    assert written == [(path, "None"), ("None", "None"), ("None", "None")]
    assert [found for _, found in run_ranks(main, 3, run_dir=str(tmp_path), resume=True)] == [path] * 3
