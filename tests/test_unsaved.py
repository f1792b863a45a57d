"""What of a model and an optimizer is saved that has no place in a state_dict, and what is refused."""

import os
import signal

import pytest
import torch
from torch import nn

from evenstep import Loader, TrainState, train_step, weights_sha256
from evenstep.errors import ConfigError
from evenstep.optim import make_schedule
from evenstep.testing import run_ranks
from test_together import CPU, classifier, points


class Scaled(nn.Module):
    """Divides by a moving mean that is in no state_dict; has a table, and a cache made on first use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.zeros(6), persistent=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        if self.training:
            self.size.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
            if self.cache is None:
                self.cache = x.detach().mean(0)
        return self.linear(x / (1 + self.size.clone()) + self.table + self.cache)


class Views(nn.Module):
    """A buffer is a view of another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("big", torch.arange(24.0).view(4, 6))
        self.register_buffer("first", self.big[0])
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(self.norm(x) + self.first * 0.01)


def trained(world, make, kill=None, stop=None):
    torch.manual_seed(7)
    model = make()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in Loader(points(), 8).batches(state, epochs=2):
        if batch.step == kill and world.rank == 1 and world.restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(state, batch, classifier)
        if batch.step == stop:
            state.save(wait=True)
            return sorted(state.training_state()["buffers"])
    return weights_sha256({**model.state_dict(), **dict(model.named_buffers())})


@pytest.mark.parametrize("make", [Scaled, Views])
def test_buffers_are_as_they_were_after_a_death(make):
    whole = run_ranks(trained, 2, make, **CPU)
    assert run_ranks(trained, 2, make, 5, max_restarts=1, **CPU) == whole


def test_buffers_that_are_in_no_state_dict_are_in_checkpoints_if_steps_change_them(tmp_path):
    whole = run_ranks(trained, 1, Scaled, **CPU)
    changed = run_ranks(trained, 1, Scaled, None, 4, run_dir=str(tmp_path), **CPU)
    assert changed == [["cache", "size"]]
    assert run_ranks(trained, 1, Scaled, run_dir=str(tmp_path), resume=True, **CPU) == whole


def test_only_what_the_optimizer_steps_is_clipped():
    """The gradients of the others stay scaled in fp16: their norm would be that of all."""

    def main(world):
        norms = {}
        for precision in ("fp32", "fp16"):
            torch.manual_seed(7)
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
            optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
            state = TrainState(model, optimizer, precision=precision, clip_norm=1.0)
            batch = next(Loader(points(), 8).batches(state))
            loss = classifier(model, batch.lanes[0].data)
            gradients = torch.autograd.grad(loss, list(model[2].parameters()))
            norms["plain"] = float(torch.cat([g.flatten() for g in gradients]).norm())
            norms[precision] = train_step(state, batch, classifier).grad_norm
        return norms

    (norms,) = run_ranks(main, 1, lanes=1)
    assert norms["fp32"] == pytest.approx(norms["plain"], rel=1e-5)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=1e-2)


def test_an_optimizer_that_asks_for_the_loss_again_is_refused():
    model = nn.Linear(6, 3)
    with pytest.raises(ConfigError, match=r"LBFGS\.step needs a closure"):
        TrainState(model, torch.optim.LBFGS(model.parameters()))


def test_a_group_that_comes_later_is_refused_on_all_ranks_before_the_step():
    def main(world):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        schedule = make_schedule("constant", epochs=1, steps_per_epoch=4)
        state = TrainState(model, optimizer, schedule=schedule)
        for batch in Loader(points(), 8).batches(state, epochs=1):
            try:
                train_step(state, batch, classifier)
            except ConfigError as error:
                return state.step, str(error)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        return None

    for step, text in run_ranks(main, 2, **CPU):
        assert step == 1
        assert text.startswith(
            "the optimizer had 1 groups of parameters when its TrainState was made, and has 2"
        )
