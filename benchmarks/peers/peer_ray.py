"""Ray Train: TorchTrainer starts the workers; prepare_model and prepare_data_loader; ray.train.report."""

import itertools
import json
import os
import tempfile

import torch
import torch.distributed as dist
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, datasets
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.nn import functional
from torch.utils.data import DataLoader


def training(config):
    """Train and evaluate on one worker."""
    args = config["args"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = train.get_context()
    train_set, test_set = datasets(args)
    model = prepare_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    size = BATCH_SIZE // context.get_world_size()
    loader = prepare_data_loader(DataLoader(train_set, size, shuffle=True))
    test_loader = prepare_data_loader(DataLoader(test_set, size))
    clock = Clock(args)
    counted = 0
    for epoch in range(args.epochs):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for images, labels in itertools.islice(loader, args.steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.step()
        if args.eval:
            with clock.evaluation():
                _, counted = evaluate(model, test_loader)
        train.report({"loss": loss.item()})
    if context.get_world_rank() == 0:
        with open(config["results"], "w") as file:
            json.dump(clock.results(counted), file)


def evaluate(model, loader):
    """Return how many samples are right and how many were counted."""
    counts = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            counts[0] += (model(images).argmax(1) == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    return counts.tolist()


def main():
    """Start the workers and wait for them."""
    args = arguments()
    share = min(1.0, len(os.sched_getaffinity(0)) / args.processes)  # Ray waits for cores that are not there
    with tempfile.TemporaryDirectory() as directory:
        results = os.path.join(directory, "results.json")
        trainer = TorchTrainer(
            training,
            train_loop_config={"args": args, "results": results},
            scaling_config=ScalingConfig(num_workers=args.processes, resources_per_worker={"CPU": share}),
            torch_config=TorchConfig(backend="gloo"),
            run_config=train.RunConfig(storage_path=directory),
        )
        trainer.fit()
        with open(results) as file:
            print(file.read(), flush=True)


if __name__ == "__main__":
    main()
