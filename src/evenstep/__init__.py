"""Data-parallel PyTorch training with the same bits on any number of processes.

    import torch, evenstep

    def main(world):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        state = evenstep.TrainState(model, optimizer)
        train = evenstep.Loader(train_set, batch_size=128)
        for batch in train.batches(state, epochs=10):
            evenstep.train_step(state, batch, loss)
        return evenstep.evaluate(model, test_set, metrics)

    print(evenstep.launch(main, nproc=4))

Names are imported when they are first used, so ``import evenstep`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from evenstep.errors import EvenstepError
from evenstep.world import World

if TYPE_CHECKING:
    from evenstep.agreement import on_first
    from evenstep.data.augment import Augment
    from evenstep.data.batch import Batch
    from evenstep.data.cache import ImageArrays
    from evenstep.data.loader import Loader
    from evenstep.evaluation import evaluate
    from evenstep.launcher import Handle, launch
    from evenstep.loop import Cadence, fit
    from evenstep.metrics import classification, cross_entropy, weights_sha256
    from evenstep.optim import make_schedule
    from evenstep.state import TrainState
    from evenstep.step import StepResult, train_step

__all__ = [
    "Augment",
    "Batch",
    "Cadence",
    "EvenstepError",
    "Handle",
    "ImageArrays",
    "Loader",
    "StepResult",
    "TrainState",
    "World",
    "classification",
    "cross_entropy",
    "evaluate",
    "fit",
    "launch",
    "make_schedule",
    "on_first",
    "train_step",
    "weights_sha256",
]

_HOME = {
    "Augment": "data.augment",
    "Batch": "data.batch",
    "Cadence": "loop",
    "Handle": "launcher",
    "ImageArrays": "data.cache",
    "Loader": "data.loader",
    "StepResult": "step",
    "TrainState": "state",
    "classification": "metrics",
    "cross_entropy": "metrics",
    "evaluate": "evaluation",
    "fit": "loop",
    "launch": "launcher",
    "make_schedule": "optim",
    "on_first": "agreement",
    "train_step": "step",
    "weights_sha256": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"evenstep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
