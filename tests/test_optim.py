import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenstep import models, optim
from evenstep.errors import ConfigError


def names_of(model, group):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return [by_id[id(p)] for p in group["params"]]


def small_model():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm((2, 4)), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("name", "kind", "lr"),
    [("sgd", torch.optim.SGD, 0.05), ("adam", torch.optim.Adam, 0.001), ("adamw", torch.optim.AdamW, 0.001)],
)
def test_the_default_is_one_group_with_the_default_lr(name, kind, lr):
    model = models.Net()
    optimizer = optim.make_optimizer(model, name)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert (group["name"], group["lr"], group["weight_decay"]) == ("all", lr, 0.0)
    assert len(group["params"]) == 6
    assert optim.make_optimizer(model, name, lr=0.7).param_groups[0]["lr"] == 0.7


def test_weight_decay_spares_biases_and_normalisation():
    model = small_model()
    decay, no_decay = optim.make_optimizer(model, "adamw", weight_decay=0.1).param_groups
    assert (decay["name"], decay["weight_decay"]) == ("decay", 0.1)
    assert names_of(model, decay) == ["0.weight", "3.weight"]
    assert (no_decay["name"], no_decay["weight_decay"]) == ("no_decay", 0.0)
    # 1.weight is that of a LayerNorm over two dimensions: two-dimensional, and spared all the same.
    assert names_of(model, no_decay) == [
        "0.bias",
        "1.weight",
        "1.bias",
        "2.weight",
        "2.bias",
        "3.bias",
    ]


def test_a_group_without_parameters_is_left_out():
    optimizer = optim.make_optimizer(nn.Linear(2, 2, bias=False), "sgd", weight_decay=0.1)
    assert [group["name"] for group in optimizer.param_groups] == ["decay"]


def test_frozen_parameters_are_left_out_and_shared_ones_are_in_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    (group,) = optim.make_optimizer(model, "sgd").param_groups
    assert names_of(model, group) == ["a.weight", "b.bias"]


def test_a_model_with_nothing_to_train_is_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"nothing to train: it has 2 parameter tensors.*requires_grad"):
        optim.make_optimizer(frozen, "sgd")
    with pytest.raises(ConfigError, match="nothing to train: it has 0 parameter tensors"):
        optim.make_optimizer(nn.ReLU(), "adam", weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamW", {}, "unknown optimizer 'adamW'. Did you mean 'adamw'.*--optimizer sgd, adam, adamw"),
        ("adam", {"nesterov": True}, "--nesterov does not go with --optimizer adam"),
        (
            "sgd",
            {"nesterov": True, "momentum": 0.0},
            "--nesterov does not go with --optimizer sgd, momentum 0",
        ),
        ("sgd", {"weight_decay": -0.1}, "weight_decay is -0.1; it must be 0 or more"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        optim.make_optimizer(models.Net(), name, **options)


@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("sgd", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("sgd", {"momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd", {"nesterov": True}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        ("adam", {}, lambda p: torch.optim.Adam(p, lr=0.1)),
        ("adamw", {"weight_decay": 0.2}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2)),
    ],
)
def test_it_steps_as_the_optimizer_of_torch_to_the_bit(name, options, plain):
    torch.manual_seed(0)
    ours = nn.Linear(5, 7, bias=False)
    theirs = nn.Linear(5, 7, bias=False)
    theirs.load_state_dict(ours.state_dict())
    start = ours.weight.detach().clone()
    optimizers = [optim.make_optimizer(ours, name, lr=0.1, **options), plain(theirs.parameters())]
    for _ in range(4):
        gradient = torch.randn(7, 5)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model.weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert not torch.allclose(ours.weight, start)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_bits_do_not_depend_on_threads_or_alignment(name):
    def run(threads, offset):
        torch.set_num_threads(threads)
        numbers = torch.Generator().manual_seed(0)
        model = nn.Linear(300, 211)
        with torch.no_grad():
            model.weight.copy_(torch.randn(211, 300, generator=numbers))
            model.bias.copy_(torch.randn(211, generator=numbers))
        optimizer = optim.make_optimizer(model, name, weight_decay=0.01)
        for _ in range(3):
            for p in model.parameters():
                gradient = torch.randn(p.shape, generator=numbers)
                p.grad = torch.empty(p.numel() + offset)[offset:].view(p.shape).copy_(gradient)
            optimizer.step()
        return model.weight.detach()

    before = torch.get_num_threads()
    try:
        results = [run(threads, offset) for threads, offset in [(1, 0), (2, 0), (3, 1), (1, 3)]]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_the_state_can_be_saved_and_loaded(name):
    def trained(steps, resume_at=None):
        torch.manual_seed(0)
        model = small_model()
        optimizer = optim.make_optimizer(model, name, weight_decay=0.01)
        for step in range(steps):
            if step == resume_at:
                saved = optimizer.state_dict()
                optimizer = optim.make_optimizer(model, name, weight_decay=0.01)
                optimizer.load_state_dict(saved)
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step()
        return model[0].weight.detach()

    assert torch.equal(trained(4), trained(4, resume_at=2))


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
@pytest.mark.parametrize("other", ["parameter", "gradient", "state"])
def test_memory_formats_may_differ(name, other):
    # torch's fused kernels on the CPU are silently wrong here.
    def run(other):
        formats = {"parameter": torch.contiguous_format, "gradient": torch.contiguous_format}
        formats[other] = torch.channels_last
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=formats["parameter"])
        optimizer = optim.make_optimizer(model, name)
        for _ in range(3):
            model.weight.grad = torch.randn(4, 3, 3, 3).to(memory_format=formats["gradient"])
            optimizer.step()
            if other == "state":
                state = optimizer.state[model.weight]
                state.update(
                    {k: v.to(memory_format=torch.channels_last) for k, v in state.items() if v.ndim == 4}
                )
        return model.weight.detach()

    assert torch.equal(run(other), run("nothing"))


# Schedules


def torch_lrs(make, steps, *, per_epoch=None, base=0.1):
    """Return the learning rates that a scheduler of torch gives, step by step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = make(optimizer)
    lrs = []
    for step in range(steps):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if per_epoch is None or (step + 1) % per_epoch == 0:
            scheduler.step()
    return lrs


def our_lrs(schedule, steps, per_epoch, base=0.1):
    return [base * schedule.factor(step, step // per_epoch) for step in range(steps)]


@pytest.mark.parametrize(("decay", "decay_epochs"), [(0.3, 5), (0.1, 1), (0.5, 3)])
def test_step_equals_StepLR(decay, decay_epochs):
    schedule = optim.make_schedule(
        "step", epochs=17, steps_per_epoch=4, decay=decay, decay_epochs=decay_epochs
    )
    theirs = torch_lrs(
        lambda o: torch.optim.lr_scheduler.StepLR(o, decay_epochs, gamma=decay), 17 * 4, per_epoch=4
    )
    assert our_lrs(schedule, 17 * 4, 4) == pytest.approx(theirs, rel=1e-12)


def test_step_is_times_0_3_every_5_epochs_by_default():
    schedule = optim.make_schedule("step", epochs=12, steps_per_epoch=None)
    factors = [schedule.factor(step=1000 * epoch, epoch=epoch) for epoch in (0, 4, 5, 9, 10)]
    assert factors == pytest.approx([1, 1, 0.3, 0.3, 0.09])


@pytest.mark.parametrize(("epochs", "per_epoch"), [(1, 1), (3, 7), (10, 13)])
def test_cosine_equals_CosineAnnealingLR(epochs, per_epoch):
    schedule = optim.make_schedule("cosine", epochs=epochs, steps_per_epoch=per_epoch)
    steps = epochs * per_epoch
    theirs = torch_lrs(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps), steps)
    assert our_lrs(schedule, steps, per_epoch) == pytest.approx(theirs, rel=1e-9)
    assert schedule.factor(steps, epochs) == pytest.approx(0, abs=1e-12)
    assert schedule.factor(steps + 5, epochs) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("epochs", "per_epoch"), [(1, 2), (1, 3), (1, 10), (3, 7), (10, 13)])
def test_onecycle_equals_OneCycleLR(epochs, per_epoch):
    schedule = optim.make_schedule("onecycle", epochs=epochs, steps_per_epoch=per_epoch)
    steps = epochs * per_epoch
    # Without its last step, which torch's scheduler would refuse to take.
    theirs = torch_lrs(
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps, cycle_momentum=False),
        steps - 1,
    )
    assert our_lrs(schedule, steps - 1, per_epoch) == pytest.approx(theirs, rel=1e-9)
    last = schedule.factor(steps - 1, epochs - 1)
    assert last == pytest.approx(1 / 25 / 1e4)
    assert schedule.factor(steps + 5, epochs) == last


def test_onecycle_of_a_single_step_has_a_factor():
    schedule = optim.make_schedule("onecycle", epochs=1, steps_per_epoch=1)
    assert schedule.factor(0, 0) == pytest.approx(1 / 25 / 1e4)


def test_constant_is_constant():
    schedule = optim.make_schedule("constant", epochs=2, steps_per_epoch=None)
    assert [schedule.factor(step, step) for step in (0, 1, 10**9)] == [1, 1, 1]


@pytest.mark.parametrize("name", ["step", "cosine", "constant"])
def test_warm_up_grows_linearly_to_the_full_rate(name):
    schedule = optim.make_schedule(name, epochs=4, steps_per_epoch=10, warmup_epochs=0.5)
    warm = [schedule.factor(step, 0) for step in range(5)]
    assert warm == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule.factor(5, 0) == 1.0


def test_cosine_after_a_warm_up_ends_at_the_last_step():
    schedule = optim.make_schedule("cosine", epochs=4, steps_per_epoch=10, warmup_epochs=1)
    assert schedule.factor(25, 2) == pytest.approx(0.5)
    assert schedule.factor(40, 4) == pytest.approx(0, abs=1e-12)


def test_step_decays_during_a_long_warm_up_too():
    schedule = optim.make_schedule(
        "step", epochs=4, steps_per_epoch=10, warmup_epochs=2, decay=0.5, decay_epochs=1
    )
    assert schedule.factor(9, 0) == pytest.approx(10 / 20)
    assert schedule.factor(10, 1) == pytest.approx(11 / 20 * 0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, "unknown learning-rate schedule 'cosin'. Did you mean 'cosine'"),
        (
            "cosine",
            {"steps_per_epoch": None},
            "--lr-schedule cosine needs.*no length. Use .* step or constant",
        ),
        ("onecycle", {"steps_per_epoch": None}, "--lr-schedule onecycle needs.*Use .* step or constant"),
        ("step", {"steps_per_epoch": None, "warmup_epochs": 1}, "--warmup-epochs 1 needs.*no length"),
        ("onecycle", {"warmup_epochs": 1}, "--warmup-epochs 1 does not go with --lr-schedule onecycle"),
        ("cosine", {"warmup_epochs": 4}, "warmup_epochs is 4; it must be at least 0 and below --epochs 4"),
        ("step", {"warmup_epochs": -1}, "warmup_epochs is -1; it must be at least 0"),
    ],
)
def test_wrong_schedules_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        optim.make_schedule(name, **{"epochs": 4, "steps_per_epoch": 10, **options})


@given(
    name=st.sampled_from(optim.SCHEDULES),
    epochs=st.integers(1, 20),
    per_epoch=st.integers(1, 50),
    data=st.data(),
)
def test_the_factor_is_between_0_and_1(name, epochs, per_epoch, data):
    warmup = 0.0 if name == "onecycle" else data.draw(st.floats(0, epochs, exclude_max=True))
    schedule = optim.make_schedule(name, epochs=epochs, steps_per_epoch=per_epoch, warmup_epochs=warmup)
    step = data.draw(st.integers(0, epochs * per_epoch + 3))
    factor = schedule.factor(step, step // per_epoch)
    assert math.isfinite(factor)
    assert -1e-12 <= factor <= 1 + 1e-12


def test_a_schedule_is_a_value():
    one, other = (optim.make_schedule("cosine", epochs=2, steps_per_epoch=3) for _ in range(2))
    assert one == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.decay = 1.0


def test_apply_schedule_sets_each_groups_rate():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.2)
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": rate}])
    optim.apply_schedule(optimizer, [0.1, 0.2], 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[1]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shorter"):
        optim.apply_schedule(optimizer, [0.1], 0.5)
