"""Lightning Fabric: launch(), setup() for model, optimizer and loaders; the loop stays."""

import itertools

import torch
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, datasets
from lightning.fabric import Fabric
from torch.nn import functional
from torch.utils.data import DataLoader


def main():
    """Train and evaluate; Fabric runs this script once more for each further process."""
    args = arguments()
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=args.processes, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    train, test = datasets(args)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model, optimizer = fabric.setup(model, optimizer)
    size = BATCH_SIZE // fabric.world_size
    loader, test_loader = fabric.setup_dataloaders(
        DataLoader(train, size, shuffle=True), DataLoader(test, size)
    )
    clock = Clock(args)
    counted = 0
    for epoch in range(args.epochs):
        model.train()
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for images, labels in itertools.islice(loader, args.steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            clock.step()
        if args.eval:
            with clock.evaluation():
                _, counted = evaluate(fabric, model, test_loader)
    if fabric.is_global_zero:
        clock.report(counted)


def evaluate(fabric, model, loader):
    """Return how many samples are right and how many were counted."""
    counts = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            counts[0] += (model(images).argmax(1) == labels).sum()
            counts[1] += len(labels)
    return fabric.all_reduce(counts, reduce_op="sum").tolist()


if __name__ == "__main__":
    main()
