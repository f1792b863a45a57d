"""Hand-tuned plain PyTorch: what somebody gets who knows where the time goes and takes an afternoon.

The images stay uint8 in memory and are gathered a batch at a time; channels_last; DDP with bucket views and a
static graph; fused SGD; a malloc that keeps its pages; processes forked after all imports; a file as meeting
point; exact evaluation in large batches under inference_mode.
"""

import contextlib
import ctypes
import multiprocessing
import os
import tempfile

import numpy as np
import torch
import torch._dynamo  # the constructor of DDP imports it: once before the fork, not once in every process
import torch.distributed as dist
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, PoolFirstNet, arguments, arrays, mean_std
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
EVAL_BATCH = 500


def keep_pages():
    """Tell glibc's malloc to keep freed memory: no page faults for the tensors of every step."""
    libc = ctypes.CDLL(None)
    for option, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 1 << 30), (M_TOP_PAD, 64 << 20)):
        libc.mallopt(option, value)


def crop_and_flip(images, generator):
    """Return images, uint8 (n, 32, 32, 3), cropped after padding by 4 and flipped at random."""
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    out = np.empty_like(images)
    tops, lefts = generator.integers(0, 9, (2, len(images))).tolist()
    flips = generator.integers(0, 2, len(images)).tolist()
    for i, (top, left, flip) in enumerate(zip(tops, lefts, flips, strict=True)):
        window = padded[i, top : top + 32, left : left + 32]
        out[i] = window[:, ::-1] if flip else window
    return out


def tensor(images, normalize):
    """Return uint8 (n, 32, 32, 3) as float32 (n, 3, 32, 32), channels_last, in 0..1 or normalised."""
    x = torch.from_numpy(images).float().div_(255)
    if normalize is not None:
        x.sub_(normalize[0]).div_(normalize[1])
    return x.permute(0, 3, 1, 2)


def worker(rank, path, args):
    """Train and evaluate on one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=args.processes)
    autocast = torch.autocast("cpu", torch.bfloat16) if args.precision == "bf16" else contextlib.nullcontext()
    normalize = [torch.tensor(v) for v in mean_std(args.data)] if args.augment else None
    net = (PoolFirstNet if args.pool_first else Net)().to(memory_format=torch.channels_last)
    model = DDP(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    images, labels = arrays(args.data, "train")
    images, labels = np.asarray(images), np.asarray(labels)
    clock = Clock(args)
    counts = torch.zeros(2, dtype=torch.int64)
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        starts = range(0, len(images), BATCH_SIZE)[: args.steps]
        generator = np.random.default_rng((epoch, rank))
        model.train()
        for start in starts:
            rows = order[start : start + BATCH_SIZE][rank :: args.processes]
            x = crop_and_flip(images[rows], generator) if args.augment else images[rows]
            with autocast:
                loss = functional.cross_entropy(model(tensor(x, normalize)), torch.from_numpy(labels[rows]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            clock.step()
        if args.eval:
            with clock.evaluation():
                counts = evaluate(model.module, rank, args, autocast, normalize)
    if rank == 0:
        clock.report(counts[1])
    dist.destroy_process_group()


def evaluate(model, rank, args, autocast, normalize):
    """Return how many samples are right and how many there were, over all processes."""
    images, labels = arrays(args.data, "test")
    mine = slice(rank, args.eval, args.processes)
    images, labels = images[mine], torch.from_numpy(np.array(labels[mine]))
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode(), autocast:
        for start in range(0, len(images), EVAL_BATCH):
            x = tensor(np.array(images[start : start + EVAL_BATCH]), normalize)
            right = model(x).argmax(1) == labels[start : start + EVAL_BATCH]
            counts += torch.stack((right.sum(), torch.tensor(len(right))))
    dist.all_reduce(counts)
    return counts


def main():
    """Fork the processes and wait for them."""
    args = arguments()
    keep_pages()
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("fork")
        path = os.path.join(directory, "store")
        workers = [context.Process(target=worker, args=(rank, path, args)) for rank in range(args.processes)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
    raise SystemExit(max(abs(process.exitcode) for process in workers))


if __name__ == "__main__":
    main()
