import math
from collections import namedtuple

import pytest
import torch
from torch import nn

from evenstep import Loader, TrainState, cross_entropy, train_step
from evenstep.errors import DivergedError, StoppedError
from evenstep.step import to_device
from evenstep.testing import run_ranks
from evenstep.world import World
from worlds import digest, images, outcome, trained


class NanFrom(nn.Module):
    """Gives NaN for one sample from a certain call on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 10)

    def forward(self, x):
        return self.linear(x) * torch.where(x == 41.0, math.nan, 1.0)


def diverges(world):
    model = NanFrom()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
    data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None], torch.arange(64) % 10)
    before = digest(state)
    try:
        for batch in Loader(data, 16, shuffle=False).batches(state, epochs=1):
            train_step(state, batch, cross_entropy())
    except DivergedError as error:
        return str(error), state.step, digest(state) == before
    finally:
        state.lanes.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_is_not_finite_stops_every_rank_before_the_commit(world_size):
    for text, step, unchanged in run_ranks(diverges, world_size, lanes=4):
        # Sample 41 is the tenth of the third batch: in the third of four lanes with four samples each.
        assert text.startswith("the loss is nan at step 2 (epoch 0), in lane 2. ")
        assert "Lower --lr" in text
        assert step == 2
        assert unchanged


def test_a_gradient_that_is_not_finite_stops_before_the_commit():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.weight.sqrt() + 0 * x

    model = Root()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    batch = next(Loader(data, 4).batches(state))
    with pytest.raises(DivergedError, match="gradient's norm is inf at step 0, although the loss is finite"):
        train_step(state, batch, lambda model, batch: model(batch[0]).mean())
    assert state.step == 0
    assert model.weight.item() == 0.0


def stops(world, run_dir):
    state, _ = trained(world, epochs=0)
    done = 0
    try:
        for batch in Loader(images(), 50).batches(state, epochs=2):
            if world.rank == world.world_size - 1 and batch.step == 3:
                world.stop.set()  # what a signal handler does, on one rank only
            train_step(state, batch, cross_entropy())
            done += 1
    except StoppedError as error:
        return done, state.step, str(error)
    finally:
        state.lanes.close()


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_rank_that_wishes_to_stop_stops_all_after_the_same_step(world_size, tmp_path):
    found = run_ranks(stops, world_size, str(tmp_path), lanes=4, run_dir=str(tmp_path))
    assert [value[:2] for value in found] == [(3, 4)] * world_size
    assert "stopped and saved after step 4" in found[0][2]
    assert (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").exists()


def test_the_result_of_a_step():
    model = nn.Linear(2, 10)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.25), clip_norm=1e-3)
    data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
    batch = next(Loader(data, 4).batches(state))
    expected = nn.functional.cross_entropy(model(torch.ones(4, 2)), torch.zeros(4, dtype=torch.long))
    result = train_step(state, batch, cross_entropy())
    assert (result.step, result.lr) == (0, 0.25)
    assert float(result.loss) == expected.item()
    assert result.grad_norm > 1e-3
    assert (state.step, state.epoch, state.epoch_step) == (1, 1, 0)
    assert state.train_loss == pytest.approx(expected.item())


def test_a_torch_scheduler_is_stepped_once_a_step_or_once_an_epoch():
    def lr_after(every):
        model = nn.Linear(2, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state = TrainState(model, optimizer, schedule=schedule, schedule_every=every)
        data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))
        for batch in Loader(data, 2).batches(state, epochs=2):  # 8 steps
            train_step(state, batch, cross_entropy())
        return optimizer.param_groups[0]["lr"]

    assert lr_after("step") == 0.5**8
    assert lr_after("epoch") == 0.5**2


def test_to_device_looks_into_containers():
    Pair = namedtuple("Pair", "a b")
    data = {"x": [torch.ones(1), "text"], "pair": Pair(torch.zeros(2), None), "tuple": (1, torch.ones(1))}
    moved = to_device(data, torch.device("meta"))
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1] == "text"
    assert moved["pair"].a.device.type == "meta"
    assert isinstance(moved["pair"], Pair)
    assert moved["tuple"][1].device.type == "meta"


def test_every_rank_has_the_same_state_and_the_same_values():
    values = run_ranks(outcome, 3, lanes=4)
    assert values[0] == values[1] == values[2]


def test_without_a_launch_the_world_is_one_process():
    state, losses = trained(World(), epochs=1)
    assert state.step == len(losses) == 5
