"""What a larger batch asks of the learning rate: several batches and rules, five seeds each.

    python benchmarks/batch_size.py

A small net on the built-in digits, ten epochs, sgd with momentum 0.9 and a cosine schedule, one process. It
prints the test accuracy of each, the median of the seeds and their range (docs/choosing.md shows the table).
"""

import statistics
import sys
import warnings

import torch

import evenstep
from evenstep.data import digits

EPOCHS = 10
SEEDS = range(5)
SMALL, LR = 16, 0.01
# (batch, rule, what the learning rate is multiplied with, epochs of warm-up)
ROWS = (
    (16, "the start", 1, 0),
    (128, "unchanged", 1, 0),
    (128, "square root", 8**0.5, 0),
    (128, "linear", 8, 0),
    (128, "linear, 2 epochs of warm-up", 8, 2),
    (1024, "square root", 64**0.5, 0),
    (1024, "linear", 64, 0),
    (1024, "linear, 2 epochs of warm-up", 64, 2),
)


def accuracy(batch_size: int, lr: float, warmup: int, seed: int) -> float:
    """Train once and return the test accuracy."""
    torch.manual_seed(seed)
    train, test = digits.load()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3072, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    loader = evenstep.Loader(train, batch_size, seed=seed, normalize=(train.mean, train.std))
    steps = loader.steps_per_epoch
    schedule = evenstep.make_schedule("cosine", epochs=EPOCHS, steps_per_epoch=steps, warmup_epochs=warmup)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    state = evenstep.TrainState(model, optimizer, schedule=schedule)
    loss = evenstep.cross_entropy()
    try:
        for batch in loader.batches(state, epochs=EPOCHS):
            evenstep.train_step(state, batch, loss)
    except evenstep.EvenstepError:  # the loss is no number any more
        return 0.1
    found = evenstep.evaluate(model, test, evenstep.classification, normalize=(train.mean, train.std))
    return found["accuracy"]


def main() -> int:
    """Print the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| batch | learning rate | | test accuracy, median of 5 (least to most) |\n|---|---|---|---|")
    for batch_size, rule, factor, warmup in ROWS:
        lr = LR * factor
        found = [accuracy(batch_size, lr, warmup, seed) for seed in SEEDS]
        spread = f"{100 * min(found):.1f} to {100 * max(found):.1f}"
        print(
            f"| {batch_size} | {lr:.3g} | {rule} | {100 * statistics.median(found):.1f} % ({spread}) |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
