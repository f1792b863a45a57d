"""The drift alarm: ranks that no longer hold the same weights are found, and named."""

import pytest
import torch
from torch import nn

from evenstep import Cadence, Loader, TrainState, checkpoint, cli, cross_entropy, fit
from evenstep.drift import check_drift, checksum, factors
from evenstep.errors import ConfigError, DriftError
from evenstep.flat import from_flat
from evenstep.testing import run_ranks
from evenstep.world import World
from worlds import SmallNet, images

FACTORS = factors(torch.device("cpu"))


def number_of(tensor):
    return checksum(tensor, FACTORS).item()


SHAPES = [(1,), (), (7,), (1024,), (1025, 2), (3, 1000, 1000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_every_changed_bit_and_every_swap_changes_the_sum(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
    before = number_of(tensor)
    assert number_of(tensor.clone()) == before
    flat = tensor.view(-1)
    for position in {0, flat.numel() // 2, flat.numel() - 1}:
        changed = flat.clone()
        changed.view(torch.uint8)[position * tensor.element_size()] ^= 1
        assert number_of(changed) != before
    if flat.numel() > 1025:
        for other in (1, 1024, flat.numel() - 1):  # in one row, in one column, in neither
            swapped = flat.clone()
            swapped[0], swapped[other] = 3, 4
            back = flat.clone()
            back[0], back[other] = 4, 3
            assert number_of(swapped) != number_of(back)


def test_the_sum_does_not_depend_on_how_the_memory_lies():
    table = torch.arange(3000.0).view(50, 60)
    assert number_of(table.t().contiguous().t()) == number_of(table)
    assert number_of(torch.arange(-1.0, 3000.0)[1:]) == number_of(table.view(-1))  # 4 bytes off
    assert number_of(torch.empty(0)) == 0


def test_one_process_has_nobody_to_compare_with():
    check_drift(nn.Linear(2, 2), 1, World())


class Spoiler:
    """A watcher that changes one weight on one rank after a step, as a bad memory would."""

    def __init__(self, model, rank, world):
        self.model, self.is_here = model, world.rank == rank

    def step(self, step, epoch, loss, lr, images, grad_norm=None):
        if step == 3 and self.is_here:
            self.model.conv2.weight.data[3, 2, 1, 0] += 1e-7

    def evaluation(self, *args):
        pass

    checkpoint = epoch_end = evaluation


def spoiled(world, rank, cadence, steps=10):
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    spoiler = Spoiler(model, rank, world)
    fit(state, Loader(images(), 20), cross_entropy(), epochs=1, steps=steps, cadence=cadence, watcher=spoiler)
    state.lanes.close()


@pytest.mark.parametrize(
    ("world_size", "rank", "text"),
    [
        (2, 1, r"after step 4, conv2\.weight.* on rank 1 differs from rank 0;"),
        (3, 0, r"after step 4, .*on rank 0 differs from ranks 1, 2;"),
    ],
)
def test_the_tensor_and_the_ranks_are_named(world_size, rank, text):
    with pytest.raises(DriftError, match=text) as caught:
        run_ranks(spoiled, world_size, rank, Cadence(check_every=2))
    assert caught.value.exit_code == 5
    assert "the same error on rank" in str(caught.value.__cause__)  # raised on every rank
    for advice in ("evenstep verify", "--resume", "--check-every 0"):
        assert advice in str(caught.value)


def test_the_step_itself_is_named_if_each_is_checked():
    with pytest.raises(DriftError, match=r"after step 3, conv2\.weight on rank 1 differs from rank 0;"):
        run_ranks(spoiled, 2, 1, Cadence(check_every=1))


def test_no_checkpoint_is_written_of_ranks_that_differ(tmp_path):
    cadence = Cadence(check_every=100, checkpoint_every_steps=2)
    with pytest.raises(DriftError, match="after step 4"):
        run_ranks(spoiled, 2, 1, cadence, run_dir=str(tmp_path))
    assert [info.step for info in checkpoint.ls(tmp_path)] == [2]


def test_it_can_be_turned_off(tmp_path):
    run_ranks(spoiled, 2, 1, Cadence(check_every=0), 5, run_dir=str(tmp_path))
    assert [info.step for info in checkpoint.ls(tmp_path)] == [5]


def test_the_option():
    assert from_flat({}).output.check_every == 100
    with pytest.raises(ConfigError, match=r"check_every is -1; it must be 0 or more.*--check-every 0"):
        from_flat({"check_every": -1})


def test_the_command_passes_it_on(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("evenstep.drift.check_drift", lambda model, step, world: seen.append(step))
    monkeypatch.setattr("evenstep.loop.check_drift", lambda model, step, world: seen.append(step))
    monkeypatch.setattr("evenstep.jobs.Reporter", lambda config, world: _Quiet())
    from evenstep.jobs import train_job

    config = from_flat(
        {"data": "digits", "steps": 5, "check_every": 2, "lanes": 1, "batch_size": 8, "nproc": 1}
    )
    monkeypatch.setattr("evenstep.jobs._evaluation", lambda *args: None)
    train_job(World(), config)
    assert seen == [2, 4]
    assert "check_every" in _said(capsys, ["config", "show"])


def _said(capsys, words):
    assert cli.main(words) == 0
    return capsys.readouterr().out


class _Quiet:
    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def __getattr__(self, name):
        return lambda *args, **keywords: None
