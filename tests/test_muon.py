import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep import TrainState, optim
from evenstep.checkpoint import Checkpoint
from evenstep.muon import Muon, orthogonalised
from evenstep.whitenet import WhiteNet
from evenstep.world import World


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (6, 4, 3, 3)])
def test_singular_values_are_brought_near_1_and_the_directions_stay(shape, bf16):
    torch.manual_seed(0)
    update = torch.randn(shape)
    result = orthogonalised(update, bf16=bf16)
    assert (result.shape, result.dtype) == (update.shape, torch.float32)
    u, s, vh = torch.linalg.svd(result.flatten(1), full_matrices=False)
    assert s.min() > 0.3
    assert s.max() < 1.6
    expected, _, expected_vh = torch.linalg.svd(update.flatten(1), full_matrices=False)
    torch.testing.assert_close(u @ vh, expected @ expected_vh, atol=0.1 if bf16 else 1e-4, rtol=0)
    assert torch.equal(result, result.bfloat16().float()) == bf16


def test_a_step_scales_the_weight_and_follows_the_orthogonal_momentum():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 7))
    start, gradients = weight.detach().clone(), torch.randn(2, 5, 7)
    optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=0.1, momentum=0.5)
    buffer = torch.zeros(5, 7)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        buffer = 0.5 * buffer + gradient
        start = start * 5**0.5 / start.norm() - 0.1 * orthogonalised(gradient + 0.5 * buffer)
    torch.testing.assert_close(weight.detach(), start)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_are_made_orthogonal_in_the_precision_of_the_state(precision):
    def step(prepare):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(5, 7))
        optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=0.1)
        weight.grad = torch.randn(5, 7)
        prepare(weight, optimizer)
        optimizer.step()
        return weight

    def into_a_state(weight, optimizer):
        model = nn.Module()
        model.weight = weight
        state = TrainState(model, optimizer, precision=precision, world=World())
        assert copy.deepcopy(optimizer).param_groups[0]["bf16"] == (precision == "bf16")  # as verify does
        # What a checkpoint says of it is that of the run that wrote it.
        optimizer.param_groups[0]["bf16"] = precision != "bf16"
        saved = Checkpoint(Path(), 0, {}, state.model.state_dict(), state.training_state())
        state._take(saved, "a checkpoint")

    found = step(into_a_state)
    in_fp32 = step(lambda _, optimizer: optimizer.param_groups[0].update(bf16=False))
    in_bf16 = step(lambda _, optimizer: optimizer.param_groups[0].update(bf16=True))
    assert not torch.equal(in_fp32, in_bf16)
    assert torch.equal(found, in_bf16 if precision == "bf16" else in_fp32)


def test_the_other_groups_are_moved_by_nesterov_sgd_to_the_bit():
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(9)), nn.Parameter(torch.empty(9))
    theirs.data.copy_(ours.data)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.6, nesterov=True, weight_decay=0.01)
    muon = Muon([ours], lr=0.1, momentum=0.6, weight_decay=0.01)
    for _ in range(4):
        theirs.grad = torch.randn(9)
        ours.grad = theirs.grad.clone()
        plain.step()
        muon.step()
    assert torch.equal(ours, theirs)


def test_the_closure_gives_the_loss():
    weight = nn.Parameter(torch.ones(2))

    def closure():
        loss = (weight**2).sum()
        loss.backward()
        return loss.item()

    assert Muon([weight], lr=0.1).step(closure) == 2.0


def test_hidden_weights_are_orthogonal_and_the_rest_has_its_own_rate():
    model = WhiteNet(widths=(8, 8, 8))
    optimizer = optim.make_optimizer(model, "muon", lr=0.2, lr_rest=3.0, weight_decay=0.01)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["name"]: group for group in optimizer.param_groups}
    found = {name: {names[id(p)] for p in group["params"]} for name, group in groups.items()}
    assert found["orthogonal"] == {f"blocks.{i}.conv{j}.weight" for i in range(3) for j in (1, 2)}
    assert found["decay"] == {"linear.weight"}
    assert found["no_decay"] == {
        "whiten.bias",
        *(f"blocks.{i}.norm{j}.bias" for i in range(3) for j in (1, 2)),
    }
    assert [groups[name]["lr"] for name in ("orthogonal", "decay", "no_decay")] == [0.2, 3.0, 3.0]
    assert [groups[name]["weight_decay"] for name in ("orthogonal", "decay", "no_decay")] == [0.0, 0.01, 0.0]


def test_default_rates():
    groups = optim.make_optimizer(WhiteNet(), "muon").param_groups
    assert [(group["name"], group["lr"]) for group in groups] == [("orthogonal", 0.24), ("all", 0.05)]


def test_a_weight_of_zeros_is_no_division_by_zero():
    weight = nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.randn(3, 4)
    Muon([{"params": [weight], "orthogonal": True}], lr=0.1).step()
    assert weight.isfinite().all()
    assert weight.abs().sum() > 0
