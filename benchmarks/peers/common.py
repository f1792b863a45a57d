"""What all peers share: the arguments, the model, the data set and the clock. Nothing here is distributed."""

import argparse
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

BATCH_SIZE = 128
"""Samples in an optimizer step over all processes."""
LR, MOMENTUM = 0.05, 0.9
WARM_STEPS = 10
"""Steps that do not count for images/s."""


def absolute(text):
    """Return a path that holds in another working directory, too: Ray's workers have one of their own."""
    return Path(text).resolve()


def arguments(argv=None):
    """Return the arguments that every peer takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=absolute, required=True, help="directory that data.py has made")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="end an epoch after so many steps")
    parser.add_argument("--eval", type=int, default=0, help="images to evaluate after each epoch; 0: none")
    # Not --nproc: torchrun takes that for a short form of its own flag, even behind the script.
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="handwritten_spawn alone")
    parser.add_argument("--lr", type=float, default=LR, help="handwritten_spawn alone")
    parser.add_argument("--augment", action="store_true", help="random crop and flip, normalisation")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="where the peer has it")
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact", help="evenstep alone")
    parser.add_argument("--own-dataset", action="store_true", help="evenstep alone: read the Dataset below")
    parser.add_argument("--pool-first", action="store_true", help="tuned alone: PoolFirstNet")
    parser.add_argument("--started", type=float, default=time.time(), help="time.time() of the return key")
    return parser.parse_args(argv)


class Net(nn.Module):
    """The model of all peers: two convolutions and one linear layer, 157,578 parameters."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Linear(128 * 8 * 8, 10)

    def forward(self, x):
        """Return the logits (n, 10) of images (n, 3, 32, 32)."""
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.linear(x.flatten(1))


class PoolFirstNet(Net):
    """The same with ReLU after the pooling: the same values, to the bit, and a quarter go through ReLU.

    The ``net`` of ``evenstep train`` computes in this order.
    """

    def forward(self, x):
        """Return the logits (n, 10) of images (n, 3, 32, 32)."""
        x = torch.relu(self.pool(self.conv1(x)))
        x = torch.relu(self.pool(self.conv2(x)))
        return self.linear(x.flatten(1))


def arrays(data, split):
    """Return images, uint8 (N, 32, 32, 3), and labels, int64 (N,), of a split; mapped, not read."""
    return (np.load(data / f"{split}-{part}.npy", mmap_mode="r") for part in ("images", "labels"))


def mean_std(data):
    """Return mean and standard deviation per channel of the training images, in 0..1."""
    values = json.loads((data / "meta.json").read_text())
    return values["mean"], values["std"]


class Images(Dataset):
    """A map-style data set as torchvision's CIFAR10: a PIL image, then the transforms, one by one."""

    def __init__(self, data, split, *, augment=False, limit=None):
        from torchvision import transforms

        images, labels = arrays(data, split)
        # Plain arrays over the mapped files: a slice of a memmap makes an object of its class for each image.
        self.images, self.labels = np.asarray(images[:limit]), np.asarray(labels[:limit])
        steps = [transforms.ToTensor()]
        if augment:
            steps.append(transforms.Normalize(*mean_std(data)))
        if augment and split == "train":
            steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *steps]
        self.transform = transforms.Compose(steps)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def datasets(args):
    """Return the training set and the part of the test set that is evaluated."""
    return (
        Images(args.data, "train", augment=args.augment),
        Images(args.data, "test", augment=args.augment, limit=args.eval),
    )


class Clock:
    """The times of one process (rank 0): tell it of each step and each evaluation, then ask for the line."""

    def __init__(self, args):
        self.started = args.started
        self.eval_images, self.batch_size = args.eval, args.batch_size
        self.steps = self.evaluations = 0
        self.accuracies = []
        self.first_step_at = self.ended_at = None
        self.steady_s = self.eval_s = 0.0
        self._since = 0.0

    def step(self):
        """Call after each optimizer step."""
        self.ended_at = now = time.time()
        self.steps += 1
        if self.steps == 1:
            self.first_step_at = now
        if self.steps > WARM_STEPS:
            self.steady_s += now - self._since
        self._since = now

    @contextlib.contextmanager
    def evaluation(self):
        """Put around each evaluation; its time is none of a step's."""
        begun = time.time()
        yield
        self.ended_at = self._since = time.time()
        self.eval_s += self.ended_at - begun
        self.evaluations += 1

    def evaluated(self, accuracy):
        """Call after an evaluation, where the script knows its accuracy."""
        self.accuracies.append([round(time.time() - self.started, 2), accuracy])

    def results(self, test_samples):
        """Return what was measured.

        Args:
            test_samples: how many samples the peer's own evaluation has counted, over all processes.
        """
        steady = self.steps - WARM_STEPS
        return {
            "launch_to_first_step_s": self.first_step_at - self.started,
            "steady_images_per_s": steady * self.batch_size / self.steady_s if steady > 0 else None,
            "eval_images_per_s": self.eval_images * self.evaluations / self.eval_s if self.eval_s else None,
            "test_samples": int(test_samples),
            "evaluations": self.accuracies,
            "steps": self.steps,
            "ended_at": self.ended_at,
        }

    def report(self, test_samples):
        """Print the results as one line of JSON, which the driver reads."""
        print(json.dumps(self.results(test_samples)), flush=True)
