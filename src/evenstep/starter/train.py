"""The same training as a loop of your own: python train.py."""

import torch

import evenstep

from data import make_data
from model import SpiralNet
from objective import loss, metrics


def main(world: evenstep.World) -> dict[str, float]:
    """Train on every process, and return what was measured."""
    data = make_data()
    model = SpiralNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = evenstep.TrainState(model, optimizer)
    for batch in evenstep.Loader(data["train"], batch_size=60).batches(state, epochs=10):
        evenstep.train_step(state, batch, loss)
    return evenstep.evaluate(model, data["test"], metrics)


if __name__ == "__main__":
    print(evenstep.launch(main, lanes=4))
