"""N processes have the bits of one, and one process has the bits of plain PyTorch."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from evenstep import Loader, TrainState, cross_entropy, train_step
from evenstep.errors import ConfigError
from evenstep.lanes import naive_gradients
from evenstep.testing import run_ranks
from evenstep.world import World
from worlds import SmallNet, digest, images, outcome, trained


def same_everywhere(world_sizes, lanes, **options):
    """Return the outcome, after checking that all ranks of all world sizes have the same."""
    found = [
        value
        for world_size in world_sizes
        for value in run_ranks(lambda world: outcome(world, **options), world_size, lanes=lanes)
    ]
    assert all(value == found[0] for value in found[1:]), [value[0][:8] for value in found]
    return found[0]


@pytest.mark.parametrize("lanes", [4, 7])
def test_batchnorm_dropout_augmentation_clipping_and_average(lanes):
    # 205 samples in batches of 50: the last batch has 5, so with 7 lanes some are empty.
    _, losses, _ = same_everywhere((1, 2, 3, 4), lanes, clip_norm=0.5, ema_decay=0.9)
    assert losses[-1] < losses[0]


def test_fast_mode_is_the_negative_control():
    def run(world_size):
        return run_ranks(outcome, world_size, lanes=4, mode="fast")[0]

    one, four = run(1), run(4)
    assert one[0] != four[0]
    assert one[1] == pytest.approx(four[1], rel=1e-3)


def test_fast_mode_adds_up_the_lanes_of_a_process():
    one, two = (run_ranks(outcome, n, lanes=4, mode="fast")[0] for n in (1, 2))
    assert one[1] == pytest.approx(two[1], rel=1e-3)


@pytest.mark.parametrize("kind", ["adam", "adamw", "adam-decay", "nesterov"])
def test_optimizers(kind):
    make = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "adam-decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    }[kind]
    same_everywhere((1, 3), 4, optimizer=make, epochs=1)


def test_bf16():
    same_everywhere((1, 2, 3), 4, precision="bf16", epochs=1)


def test_fp16_with_a_scaler_whose_overflow_is_decided_on_the_reduced_gradient():
    # The scaler starts at 65536, so the first steps overflow and are skipped, on every rank alike.
    same_everywhere((1, 2, 3), 4, precision="fp16", epochs=1)


def test_one_lane_is_plain_pytorch():
    """Oracle: the plain loop with the same samples in the same order and the same seeds."""
    from evenstep.seeding import seed_step

    torch.manual_seed(0)
    state, losses = trained(World(), epochs=1)
    torch.manual_seed(0)
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    from evenstep.data.augment import Augment

    other = SmallNet()
    position = TrainState(other, torch.optim.SGD(other.parameters(), lr=1))
    expected = []
    for batch in Loader(images(), 50, augment=Augment()).batches(position, epochs=1):
        inputs, labels = batch.lanes[0].data
        seed_step(0, batch.step, 0, torch.device("cpu"))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=0, abs=0)
    for key, value in model.state_dict().items():
        assert torch.equal(state.model.state_dict()[key], value), key


def test_two_processes_of_one_lane_are_plain_ddp():
    """Oracle: torch DDP without a hook, its gradients and its update."""

    def both(world):
        torch.manual_seed(1)
        ours, plain = nn.Linear(20, 3), nn.Linear(20, 3)
        plain.load_state_dict(ours.state_dict())
        state = TrainState(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
        ddp = nn.parallel.DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 20), torch.arange(64) % 3)
        for batch in Loader(data, 16).batches(state, epochs=2):
            train_step(state, batch, cross_entropy())
            inputs, labels = batch.lanes[0].data
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        state.lanes.close()
        return [torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)]

    # Halving is exact in binary, so DDP's sum / 2 and our sum of halves have the same bits.
    assert run_ranks(both, 2) == [[True, True]] * 2


@pytest.mark.parametrize(("world_size", "lanes"), [(1, 3), (2, 4), (2, 5), (3, 4), (4, 8)])
def test_the_gradient_is_that_of_the_naive_twin(world_size, lanes):
    def both(world):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3))
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
        data = torch.utils.data.TensorDataset(torch.randn(19, 20), torch.arange(19) % 3)
        batch = next(Loader(data, 19).batches(state))
        loss = cross_entropy()
        losses = [
            (lambda part=part: loss(model, part.data) * (part.size / batch.size)) if part.size else None
            for part in batch.lanes
        ]
        expected = naive_gradients(model, world, losses)
        train_step(state, batch, loss)
        state.lanes.close()
        return [torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True)]

    assert run_ranks(both, world_size, lanes=lanes) == [[True] * 4] * world_size


class Branches(nn.Module):
    """Uses one of two layers, by what is in the batch, and never the third."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(20, 3) for _ in range(3))

    def forward(self, x):
        return self.first(x) if x[0, 0] > 0.4 else self.second(x)


def branches(world, allow):
    torch.manual_seed(3)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model, optimizer, unused_parameters="allow" if allow else "error")
    data = torch.utils.data.TensorDataset(torch.randn(64, 20), torch.arange(64) % 3)
    for batch in Loader(data, 16).batches(state, epochs=2):
        train_step(state, batch, cross_entropy())
    state.lanes.close()
    return digest(state), len(optimizer.state)


def test_unused_parameters_may_be_allowed():
    found = [v for n in (1, 2, 3, 4) for v in run_ranks(branches, n, True, lanes=4)]
    assert all(value == found[0] for value in found[1:]), found
    assert found[0][1] == 4  # two weights and two biases were ever trained; `never` has no optimizer state


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_parameters_are_named(world_size):
    with pytest.raises(ConfigError, match=r"no gradient for the parameters .*never\.weight, never\.bias"):
        run_ranks(branches, world_size, False, lanes=4)


def test_sum_and_count_give_the_mean_over_tokens():
    """Sequences of other lengths in each lane: the mean is over all tokens, not a mean of means."""

    def token_loss(model, batch):
        inputs, weights = batch
        return (model(inputs).squeeze(1) * weights).sum(), weights.sum()

    def gradient(world):
        model = nn.Linear(5, 1, bias=False)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
        generator = torch.Generator().manual_seed(4)
        inputs = torch.randn(12, 5, generator=generator)
        weights = torch.arange(12).float()
        data = torch.utils.data.TensorDataset(inputs, weights)
        batch = next(Loader(data, 12, shuffle=False).batches(state))
        train_step(state, batch, token_loss)
        state.lanes.close()
        expected = (inputs * weights[:, None]).sum(0) / weights.sum()
        return model.weight.grad[0], expected

    found = [v for n in (1, 2, 4) for v in run_ranks(gradient, n, lanes=4)]
    for ours, expected in found:
        torch.testing.assert_close(ours, expected)
        assert torch.equal(ours, found[0][0])


def test_a_state_that_is_dropped_is_freed_and_its_thread_ends():
    def kept(world):
        state, _ = trained(world, epochs=1)
        model = weakref.ref(state.model)
        del state
        following, _ = trained(world, epochs=0)  # a state that is dropped is kept until the next one is made
        gc.collect()
        deadline = time.monotonic() + 10
        while num_threads() > (world.lanes > 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        return model() is None, num_threads(), following.step

    def num_threads():
        return sum(t.name == "evenstep-communication" for t in threading.enumerate())

    assert run_ranks(kept, 2, lanes=2) == [(True, 0, 0)] * 2  # a plain all-reduce needs no thread
    assert run_ranks(kept, 3, lanes=4) == [(True, 1, 0)] * 3
