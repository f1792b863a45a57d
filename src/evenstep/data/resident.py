"""Images that stay on the GPU: gathered, cropped, flipped and turned into floats there, with the same bits.

A batch then costs the host some thousand whole numbers to send, and no pixel crosses the bus twice. Every
operation is an index or a look-up, so that nothing is computed on the GPU that a CPU would round differently.

Not tried on a GPU: the tests run the same functions on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evenstep.data.augment import Augment, check_border, places, to_tensor
from evenstep.data.cache import ImageArrays
from evenstep.devices import own_share

FREE_SHARE = 0.1
"""Images are kept on a GPU if they take no more than this share of its free memory."""


@dataclass(frozen=True, eq=False)
class Resident:
    """The images of a data set on a device.

    Attributes:
        images: uint8 (N, H, W, C).
        labels: int64 (N,).
    """

    images: Tensor
    labels: Tensor


def resident(arrays: ImageArrays, device: str) -> Resident | None:
    """Return the images on their GPU; None on a CPU, which has them in memory, and where they do not fit."""
    if not device.startswith("cuda"):
        return None
    place = torch.device(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(place)
    share = own_share(device)
    if share is not None:
        free_bytes = min(free_bytes, int(share * total_bytes) - torch.cuda.memory_allocated(place))
    return put(arrays, place, free_bytes)


def put(arrays: ImageArrays, device: torch.device, free_bytes: int) -> Resident | None:
    """Return the images on a device that has so much memory left; None if that is too little."""
    if arrays.images.nbytes > FREE_SHARE * free_bytes:
        return None
    images = torch.from_numpy(np.array(arrays.images)).to(device)
    labels = torch.from_numpy(np.array(arrays.labels, dtype=np.int64)).to(device)
    return Resident(images, labels)


def gather(
    found: Resident, ids: np.ndarray, *, seed: int, epoch: int, options: Augment | None
) -> tuple[Tensor, Tensor]:
    """Return some images, uint8 (n, H, W, C), cropped and flipped as ``augment`` does, and their labels (n,).

    Args:
        found: the images.
        ids: int64 (n,): which of them.
        seed: the seed of the run.
        epoch: the epoch.
        options: what to do; None for nothing.
    """
    images, device = found.images, found.images.device
    rows = _send(ids, device)
    labels = found.labels[rows]
    if options is None:
        return images[rows], labels
    _, height, width, _ = images.shape
    check_border(height, width, options.crop_padding, options.crop_border)
    at = places(ids, seed=seed, epoch=epoch, options=options)
    ys = at.tops[:, None] + np.arange(height) - options.crop_padding
    xs = at.lefts[:, None] + np.arange(width) - options.crop_padding
    xs = np.where(at.flips[:, None], xs[:, ::-1], xs)
    seen = None
    if options.crop_border == "zeros":
        is_inside = [(values >= 0) & (values < size) for values, size in ((ys, height), (xs, width))]
        seen = _send(is_inside[0][:, :, None] & is_inside[1][:, None, :], device)
    rows_of, columns_of = (_send(_mirrored(v, size), device) for v, size in ((ys, height), (xs, width)))
    cut = images[rows[:, None, None], rows_of[:, :, None], columns_of[:, None, :]]
    return (cut if seen is None else cut * seen[..., None]), labels


def to_floats(images: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> Tensor:
    """Return what ``to_tensor`` makes of images, uint8 (n, H, W, C), by a table of its values."""
    channels = images.shape[3]
    every = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None, None], channels, axis=3)
    table = to_tensor(every, mean, std)[:, :, 0, 0].contiguous()  # (256, channels)
    place = images.long() * channels + torch.arange(channels, device=images.device)
    return _send(table.numpy(), images.device).view(-1)[place].permute(0, 3, 1, 2)


def _mirrored(values: np.ndarray, size: int) -> np.ndarray:
    """Return pixel numbers inside 0 to size - 1: those beyond an edge are mirrored there, or cut off."""
    values = np.abs(values)
    mirrored = size - 1 - np.abs(size - 1 - values)
    return np.ascontiguousarray(np.clip(mirrored, 0, size - 1))


def _send(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device; to a GPU it is on its way, and the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
