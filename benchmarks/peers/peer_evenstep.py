"""evenstep with a loop of one's own; the command `evenstep train` needs no file, see peers.py."""

from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, arrays, datasets, mean_std
from torch.optim import SGD

import evenstep


def main(world, args):
    """Train and evaluate on one process."""
    if args.own_dataset:
        (train, test), loading = datasets(args), {"memory_format": "channels_last"}
    else:
        train = evenstep.ImageArrays(*arrays(args.data, "train"))
        test = evenstep.ImageArrays(*(part[: args.eval] for part in arrays(args.data, "test")))
        loading = {"normalize": mean_std(args.data)} if args.augment else {}
    augment = evenstep.Augment() if args.augment and not args.own_dataset else None
    model = Net()
    state = evenstep.TrainState(
        model, SGD(model.parameters(), lr=LR, momentum=MOMENTUM), precision=args.precision
    )
    loader = evenstep.Loader(train, BATCH_SIZE, augment=augment, **loading)
    clock = Clock(args)
    counted = 0
    for batch in loader.batches(state, epochs=args.epochs, steps=args.steps):
        evenstep.train_step(state, batch, evenstep.cross_entropy())
        clock.step()
        if args.eval and (batch.last_in_epoch or state.step == args.steps):
            with clock.evaluation():
                metrics = evenstep.evaluate(
                    model, test, evenstep.classification, context=state.autocast, **loading
                )
            counted = metrics["samples"]
    if world.is_first:
        clock.report(counted)


if __name__ == "__main__":
    args = arguments()
    evenstep.launch(main, args, nproc=args.processes, mode=args.mode, threads=1, device="cpu")
