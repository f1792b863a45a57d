"""torchft: one replica group of one process each, as in its train_ddp.py, and a lighthouse that they ask.

torchft has no evaluation over replica groups, so each evaluates the whole test set.
"""

import itertools
import os
import subprocess
import sys
from datetime import timedelta

import torch
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, datasets
from torch.nn import functional
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer


def train(args, group, num_groups):
    """Train and evaluate in one replica group."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = datasets(args)
    sampler = DistributedSampler(
        train_set,
        replica_rank=group,
        num_replica_groups=num_groups,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    loader = DataLoader(train_set, BATCH_SIZE // num_groups, sampler=sampler)
    test_loader = DataLoader(test_set, BATCH_SIZE // num_groups)
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)

    def load_state(state):
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=num_groups,
        load_state_dict=load_state,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"peer_{group}",
        timeout=timedelta(seconds=60),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    clock = Clock(args)
    counted = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in itertools.islice(loader, args.steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.step()
        if args.eval:
            with clock.evaluation():
                _, counted = evaluate(net, test_loader)
    if group == 0:
        clock.report(counted)
    manager.shutdown(wait=False)


def evaluate(model, loader):
    """Return how many samples are right and how many there were."""
    right = counted = 0
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            counted += len(labels)
    return right, counted


def main():
    """Start the lighthouse and one torchrun for each replica group, and wait for them."""
    args = arguments()
    if "REPLICA_GROUP_ID" in os.environ:
        train(args, int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"]))
        return
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=args.processes, join_timeout_ms=10000, quorum_tick_ms=100
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    groups = []
    for group in range(args.processes):
        variables = {
            "TORCHFT_LIGHTHOUSE": lighthouse.address(),
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(args.processes),
        }
        groups.append(subprocess.Popen([*torchrun, *sys.argv], env={**os.environ, **variables}))
    codes = [process.wait() for process in groups]
    lighthouse.shutdown()
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main()
