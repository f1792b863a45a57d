"""The cases of test_breadth.py: each trains something shortly and returns what no world size may change."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evenstep import Loader, TrainState, cross_entropy, evaluate, train_step
from evenstep.optim import make_schedule
from worlds import SmallNet, digest, images

WIDTH = 12


def vectors(n=90, width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, width, generator=generator), torch.arange(n) % 5)


def sequential(*layers):
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


def sgd(params, **options):
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def train(
    world,
    model,
    data=None,
    *,
    batch_size=32,
    epochs=2,
    loss=None,
    optimizer=sgd,
    schedule=None,
    loading=None,
    after_epoch=None,
    **options,
):
    """Train and return (digest, losses, learning rates, gradient norms)."""
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    if schedule is not None:
        options["schedule"] = schedule(made)
    state = TrainState(model, made, **options)
    results = []
    with Loader(vectors() if data is None else data, batch_size, **(loading or {})) as loader:
        for batch in loader.batches(state, epochs=epochs):
            results.append(train_step(state, batch, loss or cross_entropy()))
            if after_epoch is not None and batch.last_in_epoch:
                after_epoch(state)
    state.lanes.close()
    losses = [float(result.loss) for result in results]
    return digest(state), losses, [result.lr for result in results], [r.grad_norm for r in results]


# Layers


def batchnorm1d(world):
    return train(world, sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()))


def batchnorm1d_momentum_none(world):
    return train(world, sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)))


def batchnorm_used_twice(world):
    norm = nn.BatchNorm1d(WIDTH, momentum=None)
    return train(world, sequential(norm, nn.Linear(WIDTH, WIDTH), norm))


def batchnorm2d(world):
    return train(world, SmallNet(4), images(70), loading={"shuffle": True}, epochs=1)


def dropout(world):
    return train(world, sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.AlphaDropout(0.1)))


def groupnorm_and_layernorm(world):
    return train(world, sequential(nn.Linear(WIDTH, WIDTH), nn.GroupNorm(3, WIDTH), nn.LayerNorm(WIDTH)))


def instancenorm_with_running_statistics(world):
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    return train(world, sequential(nn.Unflatten(1, (3, 4)), norm, nn.Flatten()))


def spectral_norm(world):
    # Its power iteration changes buffers in every forward pass.
    return train(world, sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))


class OwnStatistics(nn.Module):
    """Keeps statistics of the data in buffers of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.scale.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
            self.seen = self.seen + len(x)
        return x / self.scale.clone()


def buffers_of_own_layers(world):
    return train(world, sequential(OwnStatistics()))


class Words(Dataset):
    """Sentences of different lengths; the label of a sentence is its first word."""

    def __init__(self, n=60, vocabulary=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 9, (n,), generator=generator).tolist()
        self.sentences = [torch.randint(1, vocabulary, (k,), generator=generator) for k in lengths]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return self.sentences[index]


def padded(sentences):
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


class TinyTransformer(nn.Module):
    def __init__(self, vocabulary=20, width=16, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.out(self.block(self.embedding(words), src_mask=mask, is_causal=True))


def token_loss(model, words):
    logits = model(words)[:, :-1].flatten(0, 1)
    targets = words[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum"), (targets > 0).sum()


def transformer_on_padded_text(world):
    loading = {"collate_fn": padded}
    return train(world, TinyTransformer(), Words(), loss=token_loss, loading=loading, batch_size=24)


def tied_weights(world):
    loading = {"collate_fn": padded}
    return train(world, TinyTransformer(tied=True), Words(), loss=token_loss, loading=loading, batch_size=24)


class TinyLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(16, 20)

    def forward(self, words):
        return self.out(self.lstm(self.embedding(words))[0])


def lstm_and_embedding(world):
    loading = {"collate_fn": padded}
    return train(world, TinyLstm(), Words(), loss=token_loss, loading=loading, batch_size=24)


# How parameters are used


class SometimesUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(WIDTH, 5) for _ in range(3))

    def forward(self, x):
        return self.first(x) if x[0, 0] > 0 else self.second(x)


def unused_parameters(world):
    return train(world, SometimesUsed(), unused_parameters="allow")


class FrozenBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.norm(self.backbone(x)))


def frozen_backbone(world):
    seen = []

    def after_epoch(state):
        seen.append(evaluate(state.model, vectors(11), losses_of_samples, chunk_size=3))
        seen.append([module.training for module in state.model.modules()])

    result = train(world, FrozenBackbone().train(), after_epoch=after_epoch)
    assert seen[1][0], "evaluation puts each module back into its own mode"
    assert not any(seen[1][1:4])
    return *result, seen


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def parameter_used_twice(world):
    return train(world, UsedTwice())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.ReLU())
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def activation_checkpointing(world):
    return train(world, Checkpointed())


# What belongs to the step


def plain():
    return sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def smooth():
    """Without BatchNorm, which cannot train a lane of a single sample."""
    return sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2))


def gradient_clipping(world):
    return train(world, plain(), clip_norm=0.2)


def moving_average(world):
    return train(world, plain(), ema_decay=0.8)


def adamw(world):
    return train(world, plain(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))


def adam_with_weight_decay(world):
    return train(world, plain(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1))


def nesterov(world):
    return train(world, plain(), optimizer=lambda p: sgd(p, nesterov=True, weight_decay=1e-3))


def torch_schedule_by_step(world):
    make = torch.optim.lr_scheduler.OneCycleLR
    return train(world, plain(), schedule=lambda o: make(o, max_lr=0.3, total_steps=20))


def torch_schedule_by_epoch(world):
    make = torch.optim.lr_scheduler.StepLR
    return train(world, plain(), schedule=lambda o: make(o, 1, gamma=0.5), schedule_every="epoch")


def own_schedule(world):
    make = make_schedule("cosine", epochs=2, steps_per_epoch=3, warmup_epochs=0.5)
    return train(world, plain(), schedule=lambda _: make)


def losses_of_samples(model, batch):
    inputs, labels = batch
    return {"loss": nn.functional.cross_entropy(model(inputs), labels, reduction="none")}


def plateau_of_the_evaluation(world):
    def after_epoch(state):
        found = evaluate(state.model, vectors(23, seed=1), losses_of_samples, chunk_size=4)
        state.schedule.step(found["loss"])

    make = torch.optim.lr_scheduler.ReduceLROnPlateau
    schedule = {"schedule": lambda o: make(o, factor=0.5, patience=0, threshold=0.05)}
    result = train(world, plain(), epochs=5, after_epoch=after_epoch, **schedule)
    assert result[2][-1] < result[2][0], "the learning rate has never been lowered"
    return result


def bf16(world):
    return train(world, plain(), precision="bf16")


def channels_last(world):
    return train(world, SmallNet(4).to(memory_format=torch.channels_last), images(70), epochs=1)


# Data


class RandomItems(Dataset):
    """Every source of random numbers that an item may use."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        noise = np.random.rand(WIDTH) + random.random()
        return torch.as_tensor(noise, dtype=torch.float32) + torch.randn(WIDTH), index % 5


def random_items(world):
    return train(world, plain(), RandomItems())


def random_items_from_workers(world):
    return train(world, plain(), RandomItems(), loading={"workers": 2}, epochs=1)


def random_items_without_workers(world):
    return train(world, plain(), RandomItems(), loading={"workers": 0}, epochs=1)


class Transformed(Dataset):
    def __init__(self):
        from torchvision.transforms import v2

        self.images = images(50)
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(16, scale=(0.5, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(0.4, 0.4, 0.4),
                v2.RandomErasing(),
            ]
        )

    def __len__(self):
        return 50

    def __getitem__(self, index):
        image, label = self.images[index]
        return self.transform(image), label


def random_transforms_of_torchvision(world):
    return train(world, SmallNet(4), Transformed(), epochs=1)


class Counted(IterableDataset):
    def __init__(self):
        self.rows = vectors(75)

    def __iter__(self):
        return iter([self.rows[i] for i in range(75)])


def iterable_dataset(world):
    return train(world, smooth(), Counted())


def batch_that_lanes_do_not_divide(world):
    # 53 images in batches of 25: the last one has 3 for 8 lanes, so some lanes are empty.
    return train(world, SmallNet(4), images(53), batch_size=25)


class Nested(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        inputs, label = self.rows[index]
        return {"inputs": {"x": inputs, "scale": (inputs.sum(), 2.0)}, "label": label, "name": f"row {index}"}

    rows = vectors(40)


def nested_batches(world):
    def loss(model, batch):
        scale = batch["inputs"]["scale"][0].abs().float()
        logits = model(batch["inputs"]["x"]) * scale[:, None]
        return nn.functional.cross_entropy(logits, batch["label"])

    return train(world, smooth(), Nested(), loss=loss)


def unequal_tensors(world):
    def loss(model, sentences):
        return torch.stack([model(sentence).logsumexp(-1).mean() for sentence in sentences]).mean()

    model = nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 5))
    return train(world, model, Words(), loss=loss, loading={"collate_fn": list})


def small_evaluations(world):
    """Fewer samples than processes, and metrics of every form."""

    def metrics(model, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels)
        each = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        return {"mean": loss, "each": each, "pair": (each.sum(), len(labels))}

    torch.manual_seed(0)
    model = plain()
    return [evaluate(model, vectors(n), metrics, chunk_size=size) for n, size in [(3, 1), (3, 250), (50, 4)]]


# Two models


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


def optimizer_with_noise(world):
    return train(world, plain(), optimizer=lambda params: Noisy(params, lr=0.1))


def random_numbers_in_the_loop(world):
    """Before the step (mixed samples) and after it (pruned weights), from all generators."""
    model = plain()
    state = TrainState(model, sgd(model.parameters()))
    drawn = []
    for batch in Loader(vectors(), 32).batches(state, epochs=1):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        train_step(state, batch, cross_entropy())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(torch.rand_like(p) > 0.1)
    assert len(set(drawn)) == len(drawn)
    state.lanes.close()
    return digest(state), drawn


def evaluation_that_draws(world):
    """The evaluation of a model that samples, as a variational autoencoder does; the loop's numbers go on."""
    model = nn.Linear(WIDTH, 5)
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)

    def metrics(model, batch):
        return {"sampled": (model(batch[0]) + torch.randn(len(batch[0]), 5)).mean(1)}

    found = evaluate(model, vectors(), metrics, chunk_size=8)
    assert torch.equal(torch.rand(()), expected)
    return found


class Rotary(nn.Module):
    """Caches a table in its first forward pass, whoever asks for that."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            self.table = torch.cos(torch.arange(WIDTH, dtype=torch.float32))
        return self.inner(x) * self.table


def cache_made_in_evaluation(world):
    model = sequential(Rotary())
    accuracy = evaluate(model, vectors(), lambda model, batch: {"sum": model(batch[0]).sum(1)})
    return accuracy, train(world, model)


def two_states(world):
    """A GAN: each step runs the other model too, in training mode."""
    generator = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    made = TrainState(generator, torch.optim.Adam(generator.parameters(), lr=0.01))
    judged = TrainState(critic, torch.optim.Adam(critic.parameters(), lr=0.01))

    def critic_loss(model, batch):
        real = batch[0]
        fake = generator(torch.randn(len(real), 6)).detach()
        return nn.functional.softplus(-model(real)).mean() + nn.functional.softplus(model(fake)).mean()

    def generator_loss(model, batch):
        return nn.functional.softplus(-critic(model(torch.randn(len(batch[0]), 6)))).mean()

    losses = []
    for batch in Loader(vectors(), 32).batches(made, epochs=2):
        losses.append(float(train_step(judged, batch, critic_loss).loss))
        losses.append(float(train_step(made, batch, generator_loss).loss))
    for state in (made, judged):
        state.lanes.close()
    return digest(made), digest(judged), losses


CASES = {
    case.__name__: case
    for case in (
        batchnorm1d,
        batchnorm1d_momentum_none,
        batchnorm_used_twice,
        batchnorm2d,
        dropout,
        groupnorm_and_layernorm,
        instancenorm_with_running_statistics,
        spectral_norm,
        buffers_of_own_layers,
        transformer_on_padded_text,
        tied_weights,
        lstm_and_embedding,
        unused_parameters,
        frozen_backbone,
        parameter_used_twice,
        activation_checkpointing,
        gradient_clipping,
        moving_average,
        adamw,
        adam_with_weight_decay,
        nesterov,
        torch_schedule_by_step,
        torch_schedule_by_epoch,
        own_schedule,
        plateau_of_the_evaluation,
        bf16,
        channels_last,
        random_items,
        random_items_from_workers,
        random_items_without_workers,
        random_transforms_of_torchvision,
        iterable_dataset,
        batch_that_lanes_do_not_divide,
        nested_batches,
        unequal_tensors,
        small_evaluations,
        optimizer_with_noise,
        random_numbers_in_the_loop,
        evaluation_that_draws,
        cache_made_in_evaluation,
        two_states,
    )
}


def outcomes(world, names):
    """Run the cases one after the other: ``{name: what it returned}``, or the error's text."""
    found = {}
    for name in names:
        torch.manual_seed(7)
        try:
            found[name] = CASES[name](world)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def part_of_a_run(world, steps):
    """Go on from the newest checkpoint to a step and save; everything that has a state is in it."""
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), OwnStatistics(), nn.Dropout(0.2)]
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    model = sequential(*layers, spectral)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=20)
    state = TrainState(model, optimizer, schedule=schedule, ema_decay=0.8, clip_norm=1.0)
    for batch in Loader(vectors(), 32).batches(state, steps=steps):
        train_step(state, batch, cross_entropy())
    state.save()
    state.lanes.close()
    return digest(state), state.train_loss, state.step, state.epoch_step
