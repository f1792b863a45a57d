"""What a classifier said of every test sample, kept from the evaluation at no cost of another pass."""

from __future__ import annotations

import base64
import io
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

    def gather(self, world: World) -> Predictions | None:
        """Return the predictions of all ranks; None if nothing was evaluated. Collective.

        Every rank evaluates consecutive chunks, so the ranks' parts in their order are the data set.
        """
        own = [torch.cat(column).cpu().numpy() for column in zip(*self._chunks, strict=True)]
        ranks: list[Any] = [own]
        if world.world_size > 1:
            ranks = [None] * world.world_size
            dist.all_gather_object(ranks, own)
        filled = [rank for rank in ranks if rank]
        if not filled:
            return None
        return Predictions(*(np.concatenate(column) for column in zip(*filled, strict=True)))


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
    counts = np.bincount(found.labels * num_classes + found.predicted, minlength=num_classes**2)
    is_wrong = np.flatnonzero(found.labels != found.predicted)
    # A stable sort: of equal losses the sample that comes first in the data set is shown first.
    worst = is_wrong[np.argsort(-found.loss[is_wrong], kind="stable")[:NUM_WRONG]]
    mistakes = counts.copy()
    mistakes[:: num_classes + 1] = 0
    order = np.argsort(-mistakes, kind="stable")[:NUM_PAIRS]
    return {
        "step": step,
        "samples": len(found.labels),
        "correct": len(found.labels) - len(is_wrong),
        "classes": names,
        "confusion": counts.reshape(num_classes, -1).tolist() if num_classes <= MAX_CLASSES else None,
        "pairs": [[*divmod(int(i), num_classes), int(mistakes[i])] for i in order if mistakes[i]],
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
