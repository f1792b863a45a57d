"""What a larger batch asks of the learning rate: several batches and rules, five seeds each.

    python benchmarks/batch_size.py

A small net on the built-in digits, ten epochs, sgd with momentum 0.9 and a cosine schedule, one process. It
prints the test accuracy of each, the median of the seeds and their range (docs/choosing.md shows the table),
and writes ``results/batch_size_DATE.json``.
"""

import argparse
import statistics
import sys
import warnings

import record
import torch

import evenstep
from evenstep.data import digits

LR = 0.01
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


def accuracy(batch_size: int, lr: float, warmup: int, seed: int, *, epochs: int) -> float:
    """Train once and return the test accuracy; 0.1, that of guessing, if the loss is no number any more."""
    torch.manual_seed(seed)
    train, test = digits.load()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3072, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    loader = evenstep.Loader(train, batch_size, seed=seed, normalize=(train.mean, train.std))
    steps = loader.steps_per_epoch
    schedule = evenstep.make_schedule("cosine", epochs=epochs, steps_per_epoch=steps, warmup_epochs=warmup)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    state = evenstep.TrainState(model, optimizer, schedule=schedule)
    loss = evenstep.cross_entropy()
    try:
        for batch in loader.batches(state, epochs=epochs):
            evenstep.train_step(state, batch, loss)
    except evenstep.EvenstepError:  # the loss is no number any more
        return 0.1
    found = evenstep.evaluate(model, test, evenstep.classification, normalize=(train.mean, train.std))
    return found["accuracy"]


def main() -> int:
    """Print the table, and keep every accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each row")
    parser.add_argument("--epochs", type=int, default=10, help="of each training")
    parser.add_argument("--no-keep", action="store_true", help="write no file into results/")
    args = parser.parse_args()
    longest = max(warmup for *_, warmup in ROWS)
    if args.epochs <= longest or args.seeds < 1:
        parser.error(f"at least one seed, and more epochs than the {longest} of the longest warm-up")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    head = f"| batch | learning rate | | test accuracy, median of {args.seeds} (least to most) |"
    print(f"{head}\n|---|---|---|---|", flush=True)
    rows = []
    for batch_size, rule, factor, warmup in ROWS:
        lr = LR * factor
        found = [accuracy(batch_size, lr, warmup, seed, epochs=args.epochs) for seed in range(args.seeds)]
        median, spread = statistics.median(found), f"{100 * min(found):.1f} to {100 * max(found):.1f}"
        print(f"| {batch_size} | {lr:.3g} | {rule} | {100 * median:.1f} % ({spread}) |", flush=True)
        about = {"batch_size": batch_size, "lr": lr, "rule": rule, "warmup_epochs": warmup}
        rows.append({**about, "n": len(found), "median": median, "accuracies": found})
    if not args.no_keep:
        record.keep("batch_size", epochs=args.epochs, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
