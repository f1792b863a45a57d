"""BatchNorm over the global batch: the same bits everywhere, and torch's numbers on the whole batch."""

import copy
import json
import threading
import traceback

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from breadth import losses_of_samples
from evenstep import Loader, TrainState, cli, cross_entropy, evaluate, train_step
from evenstep.errors import ConfigError, DivergedError
from evenstep.globalnorm import GlobalBatchNorm2d
from evenstep.handover import HandOver
from evenstep.numerics import Numerics
from evenstep.testing import kill_at, run_ranks
from evenstep.world import World
from worlds import digest, images, trained

WIDTH = 6


class Mixed(nn.Module):
    """BatchNorm2d, and a BatchNorm1d that is used twice and has no momentum; dropout between them."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4 * 7 * 7, WIDTH)
        self.twice = nn.BatchNorm1d(WIDTH, momentum=None)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.drop(self.conv(x)))))
        x = self.drop(self.twice(self.linear(x.flatten(1))))
        return self.head(self.drop(self.twice(torch.tanh(self.inner(x)))))


def vectors(n=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(3 + 2 * torch.randn(n, WIDTH, generator=generator), torch.arange(n) % 5)


def several(world):
    """Trainings whose outcome no world size may change: one launch for all of them."""
    found = []
    # 205 images in batches of 101: the last batch has 3 for 4 lanes, so one lane is empty.
    for options in (
        {},
        {"precision": "bf16"},
        {"unused_parameters": "allow", "clip_norm": 0.5, "ema_decay": 0.9},
    ):
        torch.manual_seed(1)
        state, losses = trained(world, make=Mixed, batch_size=101, epochs=1, batchnorm="global", **options)
        metrics = evaluate(state.evaluated_model, images(30, seed=1), losses_of_samples, chunk_size=7)
        found.append((digest(state), losses, state.train_loss, metrics))
    return found


def test_the_same_bits_on_every_world_size():
    found = [value for n in (1, 2, 3, 4) for value in run_ranks(several, n, lanes=4)]
    assert all(value == found[0] for value in found[1:]), [[part[0][:8] for part in value] for value in found]
    assert len({part[0] for part in found[0]}) == 3


def made(model, lanes=2, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainState(model, optimizer, world=World(lanes=lanes), **{"batchnorm": "global", **options})


def steps_of(state, data, batch_size, loss=None, epochs=1):
    loader = Loader(data, batch_size, shuffle=False, world=state.world)
    return [
        train_step(state, batch, loss or cross_entropy()) for batch in loader.batches(state, epochs=epochs)
    ]


LAYERS = {
    "1d": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)),
    "sync": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.SyncBatchNorm(8), nn.Linear(8, 5)),
    "input": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH, eps=1e-2, momentum=0.3), nn.Linear(WIDTH, 5)),
    "not affine": lambda: nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.Linear(8, 5)
    ),
    "3d, channels_last and momentum None": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 2, 3)),
        nn.Conv3d(1, 4, 1),
        nn.BatchNorm3d(4, momentum=None),
        nn.Flatten(2),
        nn.Unflatten(2, (2, 3)),
        nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(8, 5),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_numbers_are_those_of_torch_on_the_whole_batch(kind):
    """Oracle: torch's BatchNorm in one process without lanes. The last of the 5 batches has 2 samples."""
    torch.manual_seed(2)
    ours = LAYERS[kind]()
    plain = copy.deepcopy(ours)
    if kind == "sync":
        plain[1] = nn.BatchNorm1d(8)
    state = made(ours, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in Loader(vectors(34), 8, shuffle=False, world=state.world).batches(state, epochs=1):
        used = [part.data for part in batch.lanes if part.size]
        inputs, labels = (torch.cat([part[i] for part in used]) for i in range(2))
        result = train_step(state, batch, cross_entropy())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(inputs), labels)
        loss.backward()
        optimizer.step()
        assert float(result.loss) == pytest.approx(loss.item(), rel=1e-5)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert state.step == 5
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.eval()(inputs), plain.eval()(inputs), rtol=1e-4, atol=1e-5)


def test_layers_keep_their_identity_and_their_names():
    model = Mixed()
    norm, keys = model.norm, list(model.state_dict())
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), batchnorm="global")
    assert model.norm is norm
    assert isinstance(norm, GlobalBatchNorm2d)
    assert isinstance(norm, nn.BatchNorm2d)
    assert list(model.state_dict()) == keys
    assert state.numerics.batchnorm == "global"
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.zeros(2, 4))


def test_a_frozen_layer_uses_its_running_statistics():
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    model[0].eval()
    state = made(model, 4)
    steps_of(state, vectors(), 8)
    assert model[0].num_batches_tracked == 0
    assert torch.equal(model[0].running_mean, torch.zeros(WIDTH))
    assert model[1].num_batches_tracked == 4


class Checkpointed(nn.Module):
    def __init__(self, is_on):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU())
        self.head, self.is_on = nn.Linear(8, 5), is_on

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.is_on else self.body(x))


def test_activation_checkpointing_counts_each_batch_once():
    def outcome(is_on):
        torch.manual_seed(3)
        model = Checkpointed(is_on)
        world = World(lanes=3)
        state = TrainState(
            model, torch.optim.SGD(model.parameters(), lr=0.1), world=world, batchnorm="global"
        )
        return [float(result.loss) for result in steps_of(state, vectors(), 8)], digest(state)

    assert outcome(True) == outcome(False)


def gan(world):
    """Each step runs the other model's BatchNorm layers, too."""
    torch.manual_seed(4)
    maker = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
    critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    made = TrainState(maker, torch.optim.SGD(maker.parameters(), lr=0.1), batchnorm="global")
    judged = TrainState(critic, torch.optim.SGD(critic.parameters(), lr=0.1), batchnorm="global")

    def loss_of_critic(model, batch):
        return model(batch[0]).mean() - model(maker(torch.randn_like(batch[0]))).mean()

    def loss_of_maker(model, batch):
        return critic(model(torch.randn_like(batch[0]))).mean()

    for batch in Loader(vectors(14), 11).batches(made, epochs=2):
        train_step(judged, batch, loss_of_critic)
        train_step(made, batch, loss_of_maker)
    assert maker[1].num_batches_tracked == 4
    assert critic[1].num_batches_tracked == 8
    return digest(made), digest(judged)


def test_two_models_that_run_each_other():
    found = [value for n in (1, 3) for value in run_ranks(gan, n, lanes=4)]
    assert all(value == found[0] for value in found[1:]), found


class Parting(nn.Module):
    """Skips a layer where the data say so."""

    def __init__(self, where="forward"):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)
        self.where = where

    def forward(self, x):
        x, parts = self.first(x), bool((x == 100).any())
        if self.where == "forward":
            return self.head(x if parts else self.norm(x))
        return self.head(x + (self.norm(x).detach() if parts else self.norm(x)))


def parting(world, where):
    model = Parting(where)
    state = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batchnorm="global", unused_parameters="allow"
    )
    data = vectors()
    data.tensors[0][30] = 100  # in the last lane
    try:
        steps_of(state, data, 32)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [1, 3])
def test_lanes_that_come_to_other_layers_are_named_on_every_rank(world_size):
    for where, end in [
        ("forward", "the end of the forward pass"),
        ("backward", "the end of the backward pass"),
    ]:
        expected = (
            f"lane 0 has come to the {where} pass of 'norm', but lane 3 to {end}. With --batchnorm global"
        )
        for text in run_ranks(parting, world_size, where, lanes=4):
            assert expected in text


def test_an_error_in_a_lane_reaches_the_caller_and_leaves_no_thread():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    state = made(model, 4)
    before = digest(state)

    def broken_loss(model, batch):
        output = model(batch[0])
        if bool((batch[0] == 100).any()):
            raise KeyError("label of sample 20")
        return nn.functional.cross_entropy(output, batch[1])

    data = vectors()
    data.tensors[0][20] = 100
    with pytest.raises(KeyError, match="label of sample 20") as raised:
        steps_of(state, data, 32, broken_loss)
    assert "broken_loss" in "".join(traceback.format_tb(raised.value.__traceback__))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evenstep-lane")]
    assert digest(state) == before
    data.tensors[0][20] = 1
    assert len(steps_of(state, data, 32, broken_loss)) == 1


def with_a_sample_of_nan(world):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), batchnorm="global")
    before = digest(state)

    def loss(model, batch):
        factor = torch.where(batch[0][:, 0] == 100, torch.nan, 1.0)
        return (nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * factor).mean()

    data = vectors()
    data.tensors[0][20, 0] = 100
    try:
        steps_of(state, data, 32, loss)
    except DivergedError as error:
        return str(error), digest(state) == before


def test_the_lane_whose_loss_is_not_finite_is_named():
    for text, is_unchanged in run_ranks(with_a_sample_of_nan, 3, lanes=4):
        assert text.startswith("the loss is nan at step 0 (epoch 0), in lane 2. ")
        assert is_unchanged


def test_parameters_without_a_gradient_are_named():
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    model.register_module("never", nn.Linear(2, 2))
    state = made(model, 3)
    with pytest.raises(ConfigError, match=r"no gradient for the parameters never\.weight, never\.bias: "):
        steps_of(state, vectors(), 8, lambda model, batch: model[1](model[0](batch[0])).sum())


def goes_on_after(world, *, together):
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), batchnorm="global")

    def loss(model, batch):
        if not together:
            raise KeyError("on every rank, but none knows of the others")
        return (
            model[1](batch[0]) if batch[1][0] == 0 else model(batch[0])
        ).sum()  # lane 0 leaves a layer out

    with pytest.raises(ConfigError if together else KeyError):
        steps_of(state, vectors(), 8, loss)
    try:
        steps_of(state, vectors(), 8)
    except ConfigError as error:
        return str(error)
    return state.step


def test_a_step_after_a_failed_one_is_refused_where_ranks_may_wait_for_each_other():
    assert run_ranks(lambda world: goes_on_after(world, together=True), 2, lanes=4) == [4, 4]
    for text in run_ranks(lambda world: goes_on_after(world, together=False), 2, lanes=4):
        assert "failed before its gradients were summed" in text


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_mixed_precision_in_both_modes(mode):
    """The scaler's first steps overflow and are skipped, on every rank alike."""

    def outcome(world):
        torch.manual_seed(1)
        model = LAYERS["1d"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model, optimizer, batchnorm="global", precision="fp16")
        losses = [float(result.loss) for result in steps_of(state, vectors(), 8)]
        return digest(state), losses

    found = [value for n in (1, 2) for value in run_ranks(outcome, n, lanes=3, mode=mode)]
    assert all(value == found[0] for value in found[1:]), found


def test_tasks_take_turns_and_find_their_own_random_states():
    order = []

    def task(number):
        torch.manual_seed(number)
        values = [torch.rand(1).item()]
        for meeting in range(2):
            order.append((meeting, number))
            answer = hand_over.arrive(number)
            values.append(torch.rand(1).item())
            assert answer == [0, 1, 2]
        generator = torch.Generator().manual_seed(number)
        assert values == [torch.rand(1, generator=generator).item() for _ in range(3)]

    hand_over = HandOver([lambda n=n: task(n) for n in range(3)], list)
    hand_over.run()
    assert order == [(meeting, number) for meeting in range(2) for number in range(3)]


def test_tasks_that_do_not_meet_as_often_are_an_error():
    hand_over = HandOver([lambda: None, lambda: hand_over.arrive(1)], list)
    with pytest.raises(RuntimeError, match="1 of 2 tasks ended before a meeting"):
        hand_over.run()


def part_of_a_run(world, steps):
    torch.manual_seed(7)
    model = Mixed()
    state = TrainState(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), ema_decay=0.8, batchnorm="global"
    )
    for batch in Loader(images(60), 25).batches(state, steps=steps):
        train_step(state, batch, cross_entropy())
    state.save()
    return digest(state), state.train_loss, state.step


def test_a_run_goes_on_with_another_number_of_processes_and_after_a_kill(tmp_path):
    def part(steps, n, directory, **options):
        return run_ranks(part_of_a_run, n, steps, lanes=4, run_dir=str(tmp_path / directory), **options)

    whole = part(5, 2, "whole")[0]
    part(2, 3, "parts")
    assert part(5, 1, "parts", resume=True) == [whole]
    # A process dies while its second lane waits to begin backward.
    assert part(5, 2, "killed", fault=kill_at(1, 3)) == [whole] * 2


class Own(nn.BatchNorm1d):
    pass


INSTANCE = (nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
REFUSED = {
    "spectral": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 5)),
        r"changes the buffer '_[uv]' of a _SpectralNorm",
    ),
    "instance": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *INSTANCE),
        r"changes the running statistics of a layer.*track_running_stats=False",
    ),
    "own class": (
        lambda: nn.Sequential(Own(WIDTH)),
        r"layer '0' is a Own, a class of its own.*--batchnorm lane",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_are_refused(kind):
    make, text = REFUSED[kind]

    def step():
        steps_of(made(make()), vectors(), 8, lambda model, batch: model(batch[0]).sum())

    with pytest.raises(ConfigError, match=text):
        step()


def test_options_that_are_refused():
    with pytest.raises(ConfigError, match="--batchnorm global cannot go with --compile"):
        made(nn.Linear(3, 3), compile=True)
    with pytest.raises(ConfigError, match="batchnorm is 'all'; choose lane or global"):
        made(nn.Linear(3, 3), batchnorm="all")


def test_a_batch_of_one_value_is_explained():
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
    state = made(model, 2)
    with pytest.raises(
        ConfigError, match=r"has 1 value for each channel in the forward pass of '0'.*--batch-size"
    ):
        steps_of(state, vectors(9), 8)
    assert state.step == 1


def test_gpus_can_have_one_lane_each():
    from evenstep.globallanes import GlobalLanes

    with pytest.raises(ConfigError, match=r"4 lanes on 2 processes.*--nproc 4.*--lanes 2"):
        GlobalLanes(nn.BatchNorm1d(3), World(lanes=4, world_size=2, device="cuda:0"))


def test_the_numerics_key_tells_of_it():
    key = dict(lanes=1, threads=1, mode="exact", precision="fp32", compile=False, device="cpu", torch="2")
    now = Numerics(**key, batchnorm="global")
    assert now.differences({**key, "batchnorm": "lane"}) == [
        "batchnorm: 'lane' in the checkpoint, 'global' now"
    ]


def test_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    pictures, labels = (
        np.random.default_rng(0).integers(0, 256, (14, 16, 16, 3), dtype=np.uint8),
        np.arange(14),
    )
    np.savez("data.npz", x_train=pictures, y_train=labels, x_test=pictures[:5], y_test=labels[:5])
    flags = (
        "--data data.npz --cache-dir cache --device cpu --model resnet9 --batch-size 7 --steps 2 --lanes 4"
    )
    found = []
    for nproc in (1, 2):
        # Two threads: a lane's own thread has to use as many as the process does.
        more = f"--batchnorm global --nproc {nproc} --threads 2 --run-dir run{nproc} --json"
        assert cli.main(["train", *flags.split(), *more.split()]) == 0
        values = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert values["numerics"]["batchnorm"] == "global"
        found.append([values[key] for key in ("weights_sha256", "train_loss", "test_loss")])
    assert found[0] == found[1]
    assert 'batchnorm = "global"' in (tmp_path / "run1" / "config.toml").read_text()
