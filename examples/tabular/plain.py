"""A network on a table: 64 measured columns a row, and which of ten digits it is.

The table ships with evenstep: the UCI digits (evenstep.data.digits names the source), 1,797 rows.
"""

import argparse
import importlib.resources
from itertools import islice

import numpy as np
import torch
from torch import nn

from evenstep import weights_sha256


def read_table():
    """Return columns (1797, 64) of mean 0 and deviation 1, labels, and the rows to train and test with."""
    with importlib.resources.files("evenstep.data").joinpath("digits.npz").open("rb") as file:
        table = np.load(file)
        columns = torch.from_numpy(table["images"].astype("float32")).flatten(1)
        labels = torch.from_numpy(table["labels"].astype("int64"))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    columns = (columns - columns[train].mean(0)) / (columns[train].std(0) + 1e-3)
    return columns, labels, train, test


def endless(loader):
    while True:
        yield from loader


def loss(model, batch):
    columns, labels = batch
    return nn.functional.cross_entropy(model(columns), labels)


def main(args):
    torch.manual_seed(0)
    columns, labels, train_rows, test_rows = read_table()
    train_set = torch.utils.data.TensorDataset(columns[train_rows], labels[train_rows])
    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = torch.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
    for batch in islice(endless(train), args.steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(columns[test_rows]).argmax(1) == labels[test_rows]).float().mean().item()
    return accuracy, weights_sha256(model.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    accuracy, digest = main(args)
    print(f"accuracy {accuracy:.3f}, weights {digest[:16]}")
