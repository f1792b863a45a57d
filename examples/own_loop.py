"""Your own model and loop, on as many processes as you like: python own_loop.py [NPROC]."""

import sys

import torch
from torch import nn

import evenstep
from evenstep.data.sources import open_source


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.linear = nn.Linear(16 * 8 * 8, 10)

    def forward(self, images):
        return self.linear(nn.functional.max_pool2d(torch.relu(self.conv(images)), 4).flatten(1))


def loss(model, batch):  # the mean over the samples it is given
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def metrics(model, batch):  # for each name one value per sample
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float()}


def main(world):  # runs on every process
    data = open_source("digits", data_dir="data", cache_dir=None)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = evenstep.TrainState(model, optimizer)
    train = evenstep.Loader(data.train, batch_size=64)
    for batch in train.batches(state, epochs=3):
        evenstep.train_step(state, batch, loss)
    result = evenstep.evaluate(model, data.test, metrics)
    return result["accuracy"], evenstep.weights_sha256(model.state_dict())


if __name__ == "__main__":
    accuracy, digest = evenstep.launch(main, nproc=int(sys.argv[1]) if sys.argv[1:] else 2, lanes=4)
    print(f"accuracy {accuracy:.3f}, weights {digest[:12]}")
