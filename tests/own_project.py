"""A user's own data, model, loss and metrics, no classifier: own_project:NAME on the command line."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def curve(n, seed):
    x = 4 * torch.rand(n, 1, generator=torch.Generator().manual_seed(seed)) - 2
    return TensorDataset(x, x.sin() + 0.1 * x)


def data():
    return curve(403, 0), curve(601, 1)


def model():
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def sum_and_count(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def metrics(model, batch):
    x, y = batch
    error = (model(x) - y).abs().squeeze(1)
    return {"error": error, "close": error < 0.1, "relative": (error.sum(), y.abs().sum())}


def top3(model, batch):
    images, labels = batch
    best = model(images).topk(3, dim=1).indices
    return {"top3": (best == labels[:, None]).any(dim=1)}


def nothing_finite(model, batch):
    return {"ratio": (torch.zeros(()), torch.zeros(()))}


def a_sample_each(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="none")


def a_number(model, batch):
    return loss(model, batch).item()


def detached(model, batch):
    return loss(model, batch).detach()


def three(model, batch):
    return loss(model, batch), 1, 2


def clashing(model, batch):
    return {"loss": (model(batch[0]) - batch[1]).squeeze(1)}


def samples(model, batch):
    return {"samples": batch[0].squeeze(1)}


def unnamed(model, batch):
    return batch[0].squeeze(1)


def a_list(model, batch):
    return {"x": batch[0].squeeze(1).tolist()}


def columns(model, batch):
    return {"x": batch[0]}


def triple(model, batch):
    return {"x": (1.0, 2.0, 3.0)}


class Metrics:
    pass


number = 3
