"""Decoded images in memory-mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evenstep.errors import DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Images of one size and their labels, as whole arrays.

    It is also an ordinary map-style dataset: ``arrays[i]`` is a float32 tensor (C, H, W) in 0..1 and an int.

    Attributes:
        images: uint8 (N, H, W, C); usually a read-only memory map, shared by all processes of a machine.
        labels: int64 (N,).
        classes: the names of the classes, in the order of the labels; may be empty.
        mean: per channel of the training split, in 0..1.
        std: per channel of the training split, in 0..1.
        fingerprint: names the content; part of what a checkpoint records.

    Raises:
        DataError: shapes or dtypes are not as said above.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.uint8:
            raise DataError(
                f"images have shape {self.images.shape} and dtype {self.images.dtype}; expected four "
                "dimensions (N, H, W, C) and uint8. Give images as whole numbers 0 to 255."
            )
        if self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels have shape {self.labels.shape}, but there are {len(self.images)} images; each image "
                f"needs one label: expected shape ({len(self.images)},)."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from evenstep.data.augment import to_tensor

        return to_tensor(np.array(self.images[index])[None])[0], int(self.labels[index])

    def gather(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of some samples: uint8 images (n, H, W, C) and int64 labels (n,)."""
        rows = np.asarray(indices, dtype=np.int64)
        # np.asarray: a plain array, so that indexing skips the bookkeeping of np.memmap.
        return np.asarray(self.images)[rows], np.asarray(self.labels)[rows].astype(np.int64, copy=False)
