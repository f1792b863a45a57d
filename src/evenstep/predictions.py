"""What a classifier said of every test sample, kept from the evaluation at no cost of another pass."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenstep.metrics import classification
from evenstep.world import World

MAX_CLASSES = 60
"""Up to so many classes the confusion matrix is shown whole; above, only its largest entries."""
NUM_WRONG = 24
NUM_PAIRS = 12
MAX_PIXELS = 96
"""Longest side of an embedded image; a larger one is made smaller."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of all samples, in the order of the data set.

    Attributes:
        labels: int64 (N,).
        predicted: int64 (N,): the class with the largest logit.
        confidence: float32 (N,): the softmax of that logit.
        loss: float32 (N,): the cross entropy.
    """

    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    loss: np.ndarray


class Recorder:
    """Measures as ``metrics.classification`` does and remembers the predictions of this rank.

    Call :meth:`clear` before each evaluation.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[Tensor, ...]] = []

    def clear(self) -> None:
        """Forget the evaluation before."""
        self._chunks = []

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss and the accuracy of every sample, from one forward pass."""
        outputs: list[Tensor] = []

        def remembering(inputs: Any) -> Tensor:
            outputs.append(model(inputs))
            return outputs[0]

        values = classification(cast(nn.Module, remembering), batch)
        predicted = outputs[0].argmax(dim=1)
        confidence = outputs[0].float().softmax(dim=1).gather(1, predicted[:, None])[:, 0]
        self._chunks.append((batch[1].long(), predicted, confidence, values["loss"]))
        return values

    def gather(self, world: World, *, is_stream: bool = False) -> Predictions | None:
        """Return the predictions of all ranks; None if nothing was evaluated. Collective.

        Args:
            world: this process.
            is_stream: whether the data are an iterable dataset, whose chunks the ranks evaluate in turn.
                Of others every rank evaluates consecutive chunks (``data.chunks.eval_chunks``).
        """
        own = [torch.cat(column).cpu().numpy() for column in zip(*self._chunks, strict=True)]
        sizes = [len(chunk[0]) for chunk in self._chunks]
        ranks: list[Any] = [(sizes, own)]
        if world.world_size > 1:
            ranks = [None] * world.world_size
            dist.all_gather_object(ranks, (sizes, own))
        found = [
            (
                (number, rank) if is_stream else (rank, number),
                [column[end - size : end] for column in columns],
            )
            for rank, (sizes, columns) in enumerate(ranks)
            for number, (size, end) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True))
        ]
        if not found:
            return None
        chunks = [chunk for _, chunk in sorted(found, key=lambda pair: pair[0])]
        return Predictions(*(np.concatenate(column) for column in zip(*chunks, strict=True)))


def summary(
    found: Predictions, *, step: int, classes: Sequence[str] = (), images: np.ndarray | None = None
) -> dict[str, Any]:
    """Return what the report shows of an evaluation, as values that JSON can hold.

    Args:
        found: the predictions.
        step: the step after which they were made.
        classes: names of the classes; numbers are shown for those without one.
        images: uint8 (N, H, W, C) in the order of the data set, to show the most wrong ones; C is 1 or 3.

    Returns:
        ``step``, ``samples``, ``correct``, ``classes``; ``confusion``: counts[label][predicted], or None with
        many classes; ``pairs``: the most frequent mistakes; ``wrong``: the wrong samples of the highest loss,
        each with its image as a PNG data URI where there are images.
    """
    num_classes = max(len(classes), int(max(found.labels.max(), found.predicted.max())) + 1)
    names = [*classes, *(str(number) for number in range(len(classes), num_classes))]
    is_wrong = np.flatnonzero(found.labels != found.predicted)
    # Not one number for each pair of classes: of 50,000 classes they would be 20 GB.
    mistakes, times = np.unique(
        np.stack([found.labels[is_wrong], found.predicted[is_wrong]]), axis=1, return_counts=True
    )
    # A stable sort: of equal losses the sample that comes first in the data set is shown first.
    worst = is_wrong[np.argsort(-found.loss[is_wrong], kind="stable")[:NUM_WRONG]]
    order = np.argsort(-times, kind="stable")[:NUM_PAIRS]
    return {
        "step": step,
        "samples": len(found.labels),
        "correct": len(found.labels) - len(is_wrong),
        "classes": names,
        "confusion": _confusion(found, num_classes) if num_classes <= MAX_CLASSES else None,
        "pairs": [[*mistakes[:, i].tolist(), int(times[i])] for i in order],
        "wrong": [
            {
                "index": int(i),
                "label": int(found.labels[i]),
                "predicted": int(found.predicted[i]),
                "confidence": float(found.confidence[i]),
                "loss": float(found.loss[i]),
                "image": None if images is None else png_uri(images[i]),
            }
            for i in worst
        ],
    }


def _confusion(found: Predictions, num_classes: int) -> list[list[int]]:
    counts = np.bincount(found.labels * num_classes + found.predicted, minlength=num_classes**2)
    rows: list[list[int]] = counts.reshape(num_classes, -1).tolist()
    return rows


def png_uri(image: np.ndarray) -> str | None:
    """Return an image, uint8 (H, W, C), as a PNG in a data URI; None unless C is 1 or 3."""
    if image.shape[2] not in (1, 3):
        return None
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image))
    picture.thumbnail((MAX_PIXELS, MAX_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
