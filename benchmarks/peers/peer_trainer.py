"""Lightning Trainer: a LightningModule, fit() with the evaluation as its validation loop."""

import lightning as L
import torch
from common import BATCH_SIZE, LR, MOMENTUM, Clock, Net, arguments, datasets
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class Classifier(L.LightningModule):
    """The model with its loss, its metric and its optimizer."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.counted = 0

    def training_step(self, batch, _):
        """Return the loss."""
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self):
        """Count from 0."""
        self.counted = 0

    def validation_step(self, batch, _):
        """Count what is right."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.counted += len(labels)
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.net.parameters(), lr=LR, momentum=MOMENTUM)


class Timing(L.Callback):
    """Tells the clock of steps and evaluations."""

    def __init__(self, clock):
        self.clock = clock
        self.running = None

    def on_train_batch_end(self, *_):
        """After the optimizer step."""
        self.clock.step()

    def on_validation_start(self, *_):
        """Before an evaluation."""
        self.running = self.clock.evaluation()
        self.running.__enter__()

    def on_validation_end(self, *_):
        """After an evaluation."""
        self.running.__exit__(None, None, None)


def main():
    """Train and evaluate; the Trainer runs this script once more for each further process."""
    args = arguments()
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    train, test = datasets(args)
    size = BATCH_SIZE // args.processes
    clock = Clock(args)
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.processes,
        strategy="ddp",
        max_epochs=args.epochs,
        limit_train_batches=args.steps,
        limit_val_batches=None if args.eval else 0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        logger=False,
        callbacks=[Timing(clock)],
    )
    trainer.fit(model, DataLoader(train, size, shuffle=True), DataLoader(test, size))
    # Each process has counted its own part, and the parts are padded to one length.
    if trainer.is_global_zero:
        clock.report(model.counted * args.processes)


if __name__ == "__main__":
    main()
