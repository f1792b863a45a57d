"""Buffers are the model's own only after the commit, whatever layer they belong to."""

import pytest
import torch
from torch import nn

import breadth
from evenstep import TrainState
from evenstep.errors import ConfigError
from evenstep.staging import Staging
from evenstep.testing import run_ranks
from evenstep.world import World


def step_by_hand(model, inputs):
    staging = Staging(model)
    out = torch.zeros(staging.begin(), dtype=torch.float64)
    model(inputs)
    staging.take(1.0, out)
    staging.take_others()
    staging.rollback()
    return staging, out


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_one_lane_has_the_buffers_of_plain_pytorch(layer):
    inputs = torch.randn(5, 4, 6)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(inputs)
    expected = {name: value.clone() for name, value in layer.state_dict().items()}
    assert any(not torch.equal(before[name], expected[name]) for name in expected)
    layer.load_state_dict(before)
    staging, out = step_by_hand(layer, inputs)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    staging.commit(out)
    assert all(torch.equal(value, expected[name]) for name, value in layer.state_dict().items())


class Caching(nn.Module):
    """Puts other tensors in the place of its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("longest", torch.zeros(1))
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x):
        self.table = torch.arange(x.shape[-1])
        self.longest = torch.full((2,), float(x.shape[-1]))
        return x


def test_buffers_that_are_replaced_are_put_back_and_committed():
    layer = Caching()
    longest = layer.longest
    staging, out = step_by_hand(layer, torch.zeros(2, 7))
    assert layer.table is None
    assert layer.longest is longest
    assert sorted(staging.others) == [0, 1]  # the mask has not changed
    staging.commit(out)
    assert layer.table.tolist() == list(range(7))
    assert layer.longest.tolist() == [7.0, 7.0]


def test_a_change_by_the_user_between_two_steps_stays():
    layer = Caching()
    staging, out = step_by_hand(layer, torch.zeros(2, 7))
    staging.commit(out)
    layer.mask.mul_(5)
    staging.begin()
    layer(torch.zeros(2, 7))
    staging.rollback()
    assert layer.mask.tolist() == [5.0, 5.0, 5.0]


def test_a_layer_that_only_some_lanes_use_counts_as_used():
    norm = nn.BatchNorm1d(3)
    staging = Staging(norm)
    total = torch.zeros(staging.begin(), dtype=torch.float64)
    for lane, share in enumerate((0.3, 0.3, 0.4)):
        out = torch.zeros_like(total)
        if lane == 1:
            norm(torch.randn(4, 3))
        staging.take(share, out)
        staging.rollback()
        total += out
    staging.commit(total)
    assert norm.num_batches_tracked == 1


def test_syncbatchnorm_is_refused_in_exact_mode_by_name():
    def make(world):
        model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)).lanes.close()

    for world_size in (1, 2):
        with pytest.raises(ConfigError, match=r"layer '1' is a torch\.nn\.SyncBatchNorm.*--mode fast"):
            run_ranks(make, world_size, lanes=2)
    assert run_ranks(make, 1, mode="fast") == [None]


def test_a_lane_of_one_sample_is_explained():
    from evenstep import Loader, cross_entropy, train_step

    model = nn.BatchNorm1d(3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), world=World(lanes=2))
    data = torch.utils.data.TensorDataset(torch.randn(6, 3), torch.arange(6) % 3)
    first, last = Loader(data, 4, world=state.world).batches(state, epochs=1)
    train_step(state, first, cross_entropy())
    with pytest.raises(ConfigError, match=r"a lane has 1 sample.*2 or more.*--batch-size.*--lanes"):
        train_step(state, last, cross_entropy())
    assert state.step == 1


def test_fast_mode_has_the_same_buffers_on_every_rank():
    def buffers(world):
        torch.manual_seed(7)
        return breadth.buffers_of_own_layers(world)[0]

    first, second = run_ranks(buffers, 2, lanes=4, mode="fast")
    assert first == second


def test_what_the_loop_writes_through_data_is_no_change_by_the_forward_pass():
    layer = Caching()
    staging = Staging(layer)
    for step in range(3):
        layer.mask.data.fill_(step)
        staging.begin()
        assert staging.first_changed() is None
        staging.take_others()
        staging.rollback()
        assert layer.mask.tolist() == [step] * 3
    assert staging.others == {}
    assert staging.newly_hidden == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_buffer_of_nan_is_equal_to_itself(dtype):
    layer = nn.Identity()
    layer.register_buffer("unknown", torch.full((3,), float("nan"), dtype=dtype))
    staging = Staging(layer)
    staging.begin()
    assert staging.first_changed() is None
    layer.unknown.data[1] = 0
    assert staging.first_changed() is not None
