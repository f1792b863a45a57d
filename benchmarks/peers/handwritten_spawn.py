"""The script that evenstep replaces: mp.spawn, DDP, DistributedSampler, set_epoch, tqdm on rank 0."""

import itertools
import random
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import MOMENTUM, Clock, Net, arguments, datasets
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm


def set_seed(seed):
    """Seed everything, as the script does."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def do_train(model, loader, criterion, optimizer, clock, rank, steps):
    """Train for one epoch."""
    model.train()
    total = len(loader) if steps is None else min(steps, len(loader))
    bar = tqdm(itertools.islice(loader, steps), desc="Iter (loss=X.XXX)", total=total, disable=rank != 0)
    for images, labels in bar:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        clock.step()
        bar.set_description(f"Iter (loss={loss.item():5.3f})")


def do_eval(model, loader):
    """Return how many samples are right and how many were counted, over all processes."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            counts[0] += (model(images).argmax(1) == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    return counts.tolist()


def run(rank, world_size, args):
    """Train and evaluate on one process; the process group is there."""
    torch.set_num_threads(1)
    set_seed(0)
    train, test = datasets(args)
    model = DDP(Net(), find_unused_parameters=True)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch_size // world_size, shuffle=False, sampler=sampler)
    test_loader = DataLoader(
        test, batch_size=args.batch_size // world_size, sampler=DistributedSampler(test, shuffle=False)
    )
    clock = Clock(args)
    counted = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        do_train(model, loader, criterion, optimizer, clock, rank, args.steps)
        dist.barrier()
        if args.eval:
            with clock.evaluation():
                correct, counted = do_eval(model, test_loader)
            clock.evaluated(correct / counted)
    if rank == 0:
        clock.report(counted)
    dist.destroy_process_group()


def worker(rank, world_size, port, args):
    """Run in each process that mp.spawn starts."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    run(rank, world_size, args)


def main():
    """Start the processes and wait for them."""
    args = arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(worker, args=(args.processes, port, args), nprocs=args.processes, join=False)
    while not context.join():
        pass


if __name__ == "__main__":
    main()
