"""What a loss and a loop may do with a model: the same on any number of processes, or an error on all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from evenstep import Loader, TrainState, train_step, weights_sha256
from evenstep.errors import ConfigError
from evenstep.parameters import Parameters, check_trained
from evenstep.staging import Staging
from evenstep.testing import kill_at, run_ranks
from evenstep.world import World

WIDTH = 6


def data(n=32):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, WIDTH, generator=generator), torch.arange(n) % 3)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(model, loss=mean_loss, *, n=32, batch_size=8, optimizer=sgd, after=None, **options):
    """Return a digest of the model, the losses, and for each step which parameters had a gradient."""
    state = TrainState(model, optimizer(model.parameters()), **options)
    losses, used = [], []
    for batch in Loader(data(n), batch_size).batches(state, epochs=1):
        losses.append(float(train_step(state, batch, loss).loss))
        used.append([p.grad is not None for p in model.parameters()])
        if after is not None:
            after(batch.step)
    state.lanes.close()
    return weights_sha256(model.state_dict()), losses, used


def two_layers():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))


# What a loss function may do with the model.


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(4, 3)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encode(x))


def a_model_called_by_closure(world):
    model = two_layers()
    return train(model, lambda _, batch: mean_loss(model, batch))


def methods_of_the_model(world):
    def loss(model, batch):
        assert isinstance(model, Encoder)
        hidden = model.encode(batch[0])
        return F.cross_entropy(model.decoder(hidden), batch[1]) + hidden.square().mean()

    return train(Encoder(), loss)


def a_criterion_inside_the_model(world):
    model = nn.ModuleDict({"net": nn.Linear(WIDTH, 4), "criterion": nn.Linear(4, 3)})

    def loss(model, batch):
        return F.cross_entropy(model["criterion"](model["net"](batch[0])), batch[1])

    return train(model, loss)


# Freezing and unfreezing.


def unfrozen_in_the_loop(world):
    model = two_layers()
    model[0].requires_grad_(False)
    return train(model, after=lambda step: model[0].requires_grad_(step >= 1))


def frozen_in_the_loop(world):
    model = two_layers()
    return train(model, after=lambda step: model[0].requires_grad_(step < 1))


def frozen_in_the_loop_with_an_empty_lane(world):
    model = two_layers()  # in the last batch, which is the first one that is frozen, lanes 0 and 2 are empty
    return train(model, n=10, after=lambda step: model[0].requires_grad_(False))


def frozen_in_the_loop_with_statistics_of_all(world):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return train(model, batchnorm="global", after=lambda step: model[0].requires_grad_(step < 1))


def frozen_and_unfrozen_by_the_losses_of_a_gan(world):
    """The generator's loss leaves the critic frozen; the critic's own loss unfreezes it."""
    generator, critic = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
    states = TrainState(generator, sgd(generator.parameters())), TrainState(critic, sgd(critic.parameters()))

    def critic_loss(model, batch):
        model.requires_grad_(True)
        return F.softplus(-model(batch[0])).mean() + F.softplus(model(generator(batch[0][:, :3]))).mean()

    def generator_loss(model, batch):
        critic.requires_grad_(False)
        return F.softplus(-critic(model(batch[0][:, :3]))).mean()

    for batch in Loader(data(), 8).batches(states[1], epochs=1):
        train_step(states[1], batch, critic_loss)
        train_step(states[0], batch, generator_loss)
    return [weights_sha256(model.state_dict()) for model in (generator, critic)]


# Parameters that not every pass uses.


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(x + self.inner(x) if len(x) > 1 else x)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)


def a_stand_in_that_uses_more_than_the_lanes_with_samples(world):
    # The last batch has 2 samples for 4 lanes; a stand-in has 2 samples, and runs `inner`.
    found = train(Branch(), n=10, optimizer=adamw, unused_parameters="allow")
    assert found[2] == [[True] * 4, [False, False, True, True]]
    return found


def lanes_whose_loss_does_not_depend_on_the_model(world):
    def loss(model, batch):
        return mean_loss(model, batch) if batch[0][0, 0] > 0 else torch.zeros(())

    return train(two_layers(), loss, unused_parameters="allow")


def no_lane_depends_on_the_model(world):
    found = train(two_layers(), lambda model, batch: batch[0].sum() * 0.0, unused_parameters="allow")
    assert not any(any(used) for used in found[2])
    return found


def two_passes_through_different_parts(world):
    def loss(model, batch):
        return mean_loss(model, batch) + mean_loss(model, [part[:1] for part in batch])

    return train(Branch(), loss, unused_parameters="allow")


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, x):
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=True))


def reentrant_checkpointing(world):
    return train(Reentrant(), unused_parameters="allow")


# Buffers.


class Quantiser(nn.Module):
    """Keeps statistics through ``.data``, as code for VQ-VAE does, and ones that some lanes leave alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.zeros(WIDTH))
        self.register_buffer("seldom", torch.zeros(1))
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x):
        if self.training:
            self.size.data.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
            if x[0, 0] > 0.5:
                self.seldom.data.add_(1.0)
        return self.linear(x / (1 + self.size))


def statistics_written_through_data(world):
    return train(Quantiser(), n=64)


def a_layer_that_the_loss_puts_into_training_mode(world):
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    before = model[1].running_mean.clone()

    def loss(model, batch):
        model.train()
        value = mean_loss(model, batch)
        model.eval()
        return value

    found = train(model, loss)
    assert not torch.equal(model[1].running_mean, before)
    return found


# Kinds of tensors.


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs() * self.scale + self.shift


def complex_parameters(world):
    return train(Complex(), clip_norm=1.0)


def buffers_of_all_dtypes(world):
    model = nn.Linear(WIDTH, 3)
    for dtype in (torch.int16, torch.bool, torch.bfloat16, torch.complex64, torch.int64):
        model.register_buffer(f"of_{str(dtype).partition('.')[2]}", torch.full((3,), world.rank).to(dtype))
    found = train(model)
    return found, [buffer.tolist() for buffer in model.buffers()]


class Cached(nn.Module):
    """Has a table that its first forward pass makes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(WIDTH).float()
        return self.linear(x * self.table)


def a_table_that_one_rank_has_cached_before(world):
    model = Cached()
    if world.rank == world.world_size - 1:
        model(torch.zeros(1, WIDTH))
    return train(model)


class SharedGradients(nn.Module):
    """Gives two parameters one gradient, two others parts of one, and one the same number everywhere."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.first, self.second = (nn.Parameter(torch.randn(n)) for n in (2, WIDTH - 2))
        self.flat = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return x * (self.a + self.b) * torch.cat([self.first, self.second])


def loss_with_a_plain_sum(model, batch):
    # The mean over a lane, so that the lanes' shares make the plain loss of the whole batch.
    return (model(batch[0]).sum(1).square()).mean() + model.flat.sum()


def gradients_that_share_memory(world):
    return train(SharedGradients(), loss_with_a_plain_sum, clip_norm=1.0)


def gradients_that_share_memory_with_statistics_of_all(world):
    return train(SharedGradients(), loss_with_a_plain_sum, clip_norm=1.0, batchnorm="global")


def gradients_that_share_memory_and_may_be_unused(world):
    return train(SharedGradients(), loss_with_a_plain_sum, clip_norm=1.0, unused_parameters="allow")


CASES = [
    a_model_called_by_closure,
    methods_of_the_model,
    a_criterion_inside_the_model,
    unfrozen_in_the_loop,
    frozen_in_the_loop,
    frozen_in_the_loop_with_an_empty_lane,
    frozen_in_the_loop_with_statistics_of_all,
    frozen_and_unfrozen_by_the_losses_of_a_gan,
    a_stand_in_that_uses_more_than_the_lanes_with_samples,
    lanes_whose_loss_does_not_depend_on_the_model,
    no_lane_depends_on_the_model,
    two_passes_through_different_parts,
    reentrant_checkpointing,
    statistics_written_through_data,
    a_layer_that_the_loss_puts_into_training_mode,
    complex_parameters,
    buffers_of_all_dtypes,
    a_table_that_one_rank_has_cached_before,
    gradients_that_share_memory,
    gradients_that_share_memory_with_statistics_of_all,
    gradients_that_share_memory_and_may_be_unused,
]


# What is refused.


class WrittenTo(nn.Module):
    """Writes into its parameter in the forward pass, from a certain pass on."""

    def __init__(self, write, first=0):
        super().__init__()
        self.bias, self.linear = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, 3)
        self.write, self.first, self.passes = write, first, 0

    def forward(self, x):
        self.passes += 1
        if self.passes > self.first:
            with torch.no_grad():
                self.write(self.bias, x)
        return self.linear(x + self.bias)


def written_through_data(world):
    # As ActNorm, which sees the first batch.
    return train(WrittenTo(lambda bias, x: bias.data.copy_(-x.mean(0))))


def written_late(world):
    # As a momentum encoder; the version tells of it in every step.
    return train(WrittenTo(lambda bias, x: bias.mul_(0.9), first=12 * len(world.own_lanes)), n=128)


def written_with_statistics_of_all(world):
    model = nn.Sequential(WrittenTo(lambda bias, x: bias.mul_(0.9)), nn.BatchNorm1d(3))
    return train(model, batchnorm="global")


def a_criterion_of_its_own(world):
    criterion = nn.Linear(4, 3)
    return train(nn.Linear(WIDTH, 4), optimizer=lambda params: sgd([*params, *criterion.parameters()]))


def sparse_gradients(world):
    return train(nn.Sequential(nn.Embedding(5, 4, sparse=True)))


def lazy_layers(world):
    model = nn.LazyLinear(3)
    return Parameters(model)


def all_frozen(world):
    model = two_layers()
    return train(model, after=lambda step: model.requires_grad_(False))


REFUSED = {
    written_through_data: r"wrote into the parameter 'bias' in step 0\. .*loop after train_step",
    written_late: r"wrote into the parameter 'bias' in step 12\. ",
    written_with_statistics_of_all: r"wrote into the parameter '0\.bias' in step 0\. ",
    a_criterion_of_its_own: r"2 parameters that are not the model's \(of shape \(3, 4\), \(3,\)\)",
    sparse_gradients: r"the layer '0' is an Embedding with sparse=True.*sparse=False",
    lazy_layers: r"the parameter 'weight' has no shape yet.*run the model once",
    all_frozen: r"the loss depends on no parameter that requires a gradient",
}


def outcome(case, world):
    torch.manual_seed(7)
    try:
        return case(world)
    except ConfigError as error:
        return str(error)


def outcomes(world, names):
    return {name: outcome(globals()[name], world) for name in names}


@pytest.fixture(scope="module")
def found():
    """What each rank of 1 and of 2 processes has: ``[{case: outcome}]``, with four lanes."""
    names = [case.__name__ for case in (*CASES, *REFUSED)]
    return [ranks for n in (1, 2) for ranks in run_ranks(outcomes, n, names, lanes=4)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_on_one_process_and_on_two(found, case):
    expected = found[0][case.__name__]
    assert not isinstance(expected, str), expected
    assert [rank[case.__name__] for rank in found] == [expected] * 3


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_an_error_on_every_rank(found, case):
    for rank in found:
        with pytest.raises(ConfigError, match=REFUSED[case]):
            raise ConfigError(rank[case.__name__])


def test_statistics_written_through_data_survive_a_kill(found):
    def killed(world):
        torch.manual_seed(7)
        return statistics_written_through_data(world)[0]

    # Late enough that the values are not compared any more.
    values = run_ranks(killed, 2, lanes=4, fault=kill_at(1, 5))
    assert values == [found[0]["statistics_written_through_data"][0]] * 2


def test_what_no_optimizer_trains_may_be_in_it():
    model = nn.Linear(2, 2)
    constant = nn.Parameter(torch.zeros(3), requires_grad=False)
    check_trained(sgd([*model.parameters(), constant]), model)


def test_every_bit_of_a_parameter_counts_in_the_first_steps():
    model = nn.Linear(3, 3, bias=False)
    parameters = Parameters(model)
    parameters.begin()
    parameters.check_unwritten(0)
    model.weight.data.view(torch.int32)[1, 1] ^= 1
    with pytest.raises(ConfigError, match="'weight' in step 0"):
        parameters.check_unwritten(0)


def test_a_buffer_that_the_loop_writes_through_data_is_not_put_back_to_an_old_value():
    model = nn.BatchNorm1d(2, track_running_stats=False)
    model.register_buffer("table", torch.zeros(2))
    staging = Staging(model)
    for step in range(5):
        model.table.data.fill_(step)
        staging.begin()
        model.table.add_(0.5)
        staging.rollback()
        assert model.table.tolist() == [step, step]


@pytest.mark.parametrize("options", [{"batchnorm": "global"}, {"unused_parameters": "allow"}, {}], ids=str)
def test_gradients_that_share_memory_are_those_of_plain_pytorch(options):
    torch.manual_seed(7)
    model = SharedGradients()
    state = TrainState(model, sgd(model.parameters()), world=World(lanes=4), **options)
    batch = next(iter(Loader(data(), 16, world=state.world).batches(state, epochs=1)))
    whole = [torch.cat([part.data[i] for part in batch.lanes]) for i in range(2)]
    loss = loss_with_a_plain_sum(model, whole)
    expected = [g.clone() for g in torch.autograd.grad(loss, list(model.parameters()))]
    train_step(state, batch, loss_with_a_plain_sum)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert len({p.grad.data_ptr() for p in model.parameters()}) == 5
    state.lanes.close()


def broadcasts_with_a_table_of_the_last_rank(world):
    """The number of objects that were broadcast in a short training, and the table after it."""
    model = Cached()
    if world.rank == world.world_size - 1:
        model(torch.zeros(1, WIDTH))
    calls = []
    broadcast = dist.broadcast_object_list
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "broadcast_object_list", lambda *args, **kw: (calls.append(1), broadcast(*args, **kw))
        )
        train(model)
    return len(calls), model.table.tolist()


def test_a_table_that_one_rank_has_cached_is_given_to_all_once():
    found = run_ranks(broadcasts_with_a_table_of_the_last_rank, 3, lanes=3)
    assert found == [(0, [float(i) for i in range(WIDTH)])] * 3
