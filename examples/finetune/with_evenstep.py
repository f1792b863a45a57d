"""Fine-tuning: a backbone that has learned the digits 0 to 4 is frozen, and a new head learns 5 to 9."""

import argparse
import importlib.resources

import numpy as np
import torch
from torch import nn

import evenstep
from evenstep import weights_sha256


def read_digits(first):
    """Return the images (n, 1, 8, 8) of five digits, and 0 to 4 for which one it is."""
    with importlib.resources.files("evenstep.data").joinpath("digits.npz").open("rb") as file:
        content = np.load(file)
        images = torch.from_numpy(content["images"].astype("float32"))[:, None] / 16
        labels = torch.from_numpy(content["labels"].astype("int64")) - first
    rows = (labels >= 0) & (labels < 5)
    return images[rows], labels[rows]


def pretrained():
    """Return a backbone that a plain training has made; yours comes from a file, with torch.load."""
    images, labels = read_digits(first=0)
    backbone = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    model = nn.Sequential(backbone, nn.Linear(128, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for rows in torch.arange(900).view(30, 30).T:
        optimizer.zero_grad()
        loss(model, (images[rows], labels[rows])).backward()
        optimizer.step()
    return backbone


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def is_right(model, batch):
    images, labels = batch
    return (model(images).argmax(1) == labels).float()


def main(world, args):
    torch.manual_seed(0)
    digits = torch.utils.data.TensorDataset(*read_digits(first=5))
    train_set = torch.utils.data.Subset(digits, range(600))
    test_set = torch.utils.data.Subset(digits, range(600, 896))
    backbone = pretrained().requires_grad_(False).eval()  # eval: its BatchNorm keeps its statistics
    model = nn.Sequential(backbone, nn.Linear(128, 5))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    state = evenstep.TrainState(model, optimizer)
    train = evenstep.Loader(train_set, batch_size=64)
    for batch in train.batches(state, steps=args.steps):
        evenstep.train_step(state, batch, loss)
    result = evenstep.evaluate(model, test_set, lambda *both: {"accuracy": is_right(*both)})
    return result["accuracy"], weights_sha256(model.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--nproc", type=int, default=2)
    args = parser.parse_args()
    accuracy, digest = evenstep.launch(main, args, nproc=args.nproc, lanes=4)
    print(f"accuracy {accuracy:.3f}, weights {digest[:16]}")
