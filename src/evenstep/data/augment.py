"""Augmentation of whole batches, and the way from uint8 images to float32 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from evenstep.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Augment:
    """What is done to a training image.

    Attributes:
        crop_padding: pixels added on each side before an image of the old size is cut out at a random
            place, as torchvision's ``RandomCrop(size, padding=4)``; 0 for no crop.
        flip: ``random``: in every epoch half of the images, at random, are mirrored left to right.
            ``alternate``: half of them in the first epoch, the other half in the second, and so on, so that
            two epochs show every image both ways (Keller Jordan, arXiv 2404.00498). ``none``: never.
        crop_border: what the added pixels are: ``zeros``, or the image mirrored at its edge, ``reflect``.
    """

    crop_padding: int = 4
    flip: Literal["random", "alternate", "none"] = "random"
    crop_border: Literal["zeros", "reflect"] = "zeros"

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise ConfigError(
                f"crop_padding is {self.crop_padding}; it must be 0 (no crop) or more pixels, such as "
                "--crop-padding 4."
            )
        for name, value, known in (
            ("flip", self.flip, ("random", "alternate", "none")),
            ("crop_border", self.crop_border, ("zeros", "reflect")),
        ):
            if value not in known:
                raise ConfigError(
                    f"{name} is {value!r}.{did_you_mean(str(value), known)} It must be one of "
                    f"{', '.join(known)}; anything else would be taken for none of them."
                )


@dataclass(frozen=True, eq=False)
class Places:
    """What is done to each of n images.

    Attributes:
        tops, lefts: int64 (n,): where the window begins in the padded image, in pixels.
        flips: bool (n,): whether it is mirrored left to right.
    """

    tops: np.ndarray
    lefts: np.ndarray
    flips: np.ndarray


def augment(images: np.ndarray, ids: np.ndarray, *, seed: int, epoch: int, options: Augment) -> np.ndarray:
    """Return randomly cropped and flipped images.

    An image's crop and flip are a hash of (seed, epoch, id), so they do not depend on the other images of
    the batch, nor on the process. Alternating flips are a hash of (seed, id) and the parity of the epoch.

    Args:
        images: uint8 (n, H, W, C).
        ids: whole numbers (n,): the images' indices in the data set.
        seed: the seed of the run.
        epoch: the epoch.
        options: what to do.

    Returns:
        uint8 (n, H, W, C), a new array.
    """
    import torch

    n, height, width, channels = images.shape
    found = places(ids, seed=seed, epoch=epoch, options=options)
    padded = _padded(images, options.crop_padding, options.crop_border)
    # Every row of every possible window as one value, so that a window is copied row by row and not pixel by
    # pixel; and torch's flip, which mirrors rows of pixels three times as fast as NumPy does.
    rows = np.ndarray(
        (n, padded.shape[1] - height + 1, padded.shape[2] - width + 1, height),
        dtype=f"V{width * channels}",
        buffer=padded,
        strides=(padded.strides[0], padded.strides[1], padded.strides[2], padded.strides[1]),
    )
    windows = rows[np.arange(n), found.tops, found.lefts]
    result: np.ndarray = windows.view(np.uint8).reshape(n, height, width, channels)
    result[found.flips] = torch.from_numpy(result[found.flips]).flip(2).numpy()
    return result


def places(ids: np.ndarray, *, seed: int, epoch: int, options: Augment) -> Places:
    """Return what :func:`augment` does to the images with these indices; the arguments are its own."""
    from evenstep.seeding import STREAM_AUGMENT, mix_array

    hashes = mix_array(seed, STREAM_AUGMENT, epoch, np.asarray(ids))
    num = 2 * options.crop_padding + 1
    # Three independent fields of one hash: 21 bits each, so the bias of the remainder is below 1e-5.
    tops = ((hashes & np.uint64(0x1FFFFF)) % np.uint64(num)).astype(np.int64)
    lefts = (((hashes >> np.uint64(21)) & np.uint64(0x1FFFFF)) % np.uint64(num)).astype(np.int64)
    if options.flip == "alternate":
        first = mix_array(seed, STREAM_AUGMENT, np.asarray(ids)) >> np.uint64(62)
        flips = (first + np.uint64(epoch)) % np.uint64(2) == 1
    else:
        flips = (hashes >> np.uint64(62)).astype(bool) & (options.flip == "random")
    return Places(tops, lefts, flips)


def check_border(height: int, width: int, padding: int, border: str) -> None:
    """Check that images are large enough to be mirrored at their edges.

    Raises:
        ConfigError: they are not.
    """
    if border == "reflect" and padding >= min(height, width):
        raise ConfigError(
            f"crop_padding is {padding} for images of {height}x{width} pixels, which have no more than "
            f"{min(height, width) - 1} to mirror at an edge. Use a smaller --crop-padding, or "
            "--crop-border zeros."
        )


def _padded(images: np.ndarray, padding: int, border: str) -> np.ndarray:
    """Return images, uint8 (n, H, W, C), with ``padding`` pixels more on each side."""
    n, height, width, channels = images.shape
    check_border(height, width, padding, border)
    if border == "reflect":
        return np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)), mode="reflect")
    padded = np.zeros((n, height + 2 * padding, width + 2 * padding, channels), dtype=np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = images
    return padded


def resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return float images (n, C, H, W) as (n, C, size, size): every pixel the mean of what it covers.

    The memory format stays that of ``images``.
    """
    import torch

    if images.shape[2:] == (size, size):
        return images
    smaller = torch.nn.functional.adaptive_avg_pool2d(images, size)
    return smaller.contiguous(memory_format=memory_format_of(images))


def memory_format_of(images: torch.Tensor) -> torch.memory_format:
    """Return how images (n, C, H, W) lie in memory: channels_last if they could be that, else contiguous."""
    import torch

    is_last = images.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def to_tensor(
    images: np.ndarray, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> torch.Tensor:
    """Return images as float32 (n, C, H, W) in 0..1, in channels_last memory format.

    The values have the bits of torchvision's ``ToTensor`` and, with ``mean`` and ``std``, of its
    ``Normalize(mean, std)`` after that.

    Args:
        images: uint8 (n, H, W, C).
        mean: per channel, in 0..1.
        std: per channel, in 0..1.
    """
    import torch

    n, height, width, channels = images.shape
    result = torch.from_numpy(np.ascontiguousarray(images)).to(torch.float32).div_(255)
    # One row per image: adding three numbers to the last dimension of three would be five times slower.
    rows, pixels = result.view(n, height * width * channels), height * width
    if mean is not None:
        rows.sub_(torch.tensor(list(mean), dtype=torch.float32).repeat(pixels))
    if std is not None:
        rows.div_(torch.tensor(list(std), dtype=torch.float32).repeat(pixels))
    return result.permute(0, 3, 1, 2)
