"""What a model is shown of an image: the image in another size, and its mirror image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from evenstep.data.augment import resized
from evenstep.errors import ConfigError

Result = TypeVar("Result")


class BothWays(nn.Module):
    """A classifier that sees each image as it is and mirrored, and gives the mean of the logits.

    Args:
        model: takes float images (n, C, H, W) and gives logits (n, classes).

    Raises:
        ConfigError: when called with anything but images.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, float (n, classes), of images, float (n, C, H, W)."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            shape = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ConfigError(
                f"--tta flip mirrors images, and these inputs have {shape}; it needs a tensor (n, C, H, W). "
                "Leave out --tta."
            )
        total: Tensor = self.model(images).float() + self.model(images.flip(3)).float()
        return total / 2


def evaluated(model: nn.Module, tta: str) -> nn.Module:
    """Return what is evaluated for ``model``: itself, or with ``tta`` ``flip`` its :class:`BothWays`."""
    return BothWays(model) if tta == "flip" else model


def at_size(
    measure: Callable[[nn.Module, Any], Result], size: Callable[[], int | None]
) -> Callable[[nn.Module, Any], Result]:
    """Return a loss or metrics function whose images are scaled first.

    Args:
        measure: takes the model and a batch (images, labels).
        size: returns the side in pixels, now; None for images as they are.
    """

    def scaled(model: nn.Module, batch: Any) -> Result:
        side = size()
        if side is None:
            return measure(model, batch)
        images, labels = batch
        return measure(model, (resized(images, side), labels))

    return scaled


def size_at(sizes: Sequence[int], epoch: int) -> int | None:
    """Return the size of the images in an epoch, from 0; None without sizes, for images as they are."""
    return sizes[min(epoch, len(sizes) - 1)] if sizes else None
