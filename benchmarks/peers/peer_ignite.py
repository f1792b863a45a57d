"""PyTorch Ignite: idist.Parallel starts the processes; auto_model, auto_optim, auto_dataloader; engines."""

import ignite.distributed as idist
import torch
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, datasets
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ProgressBar
from ignite.metrics import Accuracy
from ignite.utils import manual_seed
from torch import nn


def training(_, args):
    """Train and evaluate on one process."""
    torch.set_num_threads(1)
    manual_seed(0)
    train, test = datasets(args)
    loader = idist.auto_dataloader(train, batch_size=BATCH_SIZE, shuffle=True)
    test_loader = idist.auto_dataloader(test, batch_size=BATCH_SIZE)
    model = idist.auto_model(Net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM))
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    clock = Clock(args)
    counted = 0

    @trainer.on(Events.ITERATION_COMPLETED)
    def note_step():
        clock.step()

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(trainer.state.epoch)

    @evaluator.on(Events.ITERATION_COMPLETED)
    def count():
        nonlocal counted
        counted += len(evaluator.state.batch[1])

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        nonlocal counted
        if args.eval:
            counted = 0
            with clock.evaluation():
                evaluator.run(test_loader)

    if idist.get_rank() == 0:
        ProgressBar().attach(trainer, output_transform=lambda loss: {"loss": loss})
    trainer.run(loader, max_epochs=args.epochs, epoch_length=args.steps)
    total = idist.all_reduce(counted)
    if idist.get_rank() == 0:
        clock.report(total)


if __name__ == "__main__":
    args = arguments()
    with idist.Parallel(backend="gloo", nproc_per_node=args.processes) as parallel:
        parallel.run(training, args)
