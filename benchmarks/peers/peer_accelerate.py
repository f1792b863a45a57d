"""Hugging Face Accelerate: prepare() for model, optimizer and loaders; gather_for_metrics for the evaluation.

Started by torchrun: `accelerate launch` asks for Open MPI to start several processes on CPUs.
"""

import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, datasets
from torch.nn import functional
from torch.utils.data import DataLoader


def main():
    """Train and evaluate on one process."""
    args = arguments()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train, test = datasets(args)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    size = BATCH_SIZE // accelerator.num_processes
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, size, shuffle=True), DataLoader(test, size)
    )
    clock = Clock(args)
    counted = 0
    for _ in range(args.epochs):
        model.train()
        for images, labels in itertools.islice(loader, args.steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            clock.step()
        if args.eval:
            with clock.evaluation():
                _, counted = evaluate(accelerator, model, test_loader)
    if accelerator.is_main_process:
        clock.report(counted)
    accelerator.end_training()


def evaluate(accelerator, model, loader):
    """Return how many samples are right and how many there were."""
    right = counted = 0
    model.eval()
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right += int((predictions == labels).sum())
        counted += len(labels)
    return right, counted


if __name__ == "__main__":
    main()
