"""What a model is shown of an image: the image in another size, mirrored, and shifted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional

from evenstep.data.augment import memory_format_of, resized
from evenstep.errors import ConfigError
from evenstep.metrics import kind_of

Result = TypeVar("Result")


class Views(nn.Module):
    """A classifier that sees each image several times and gives the mean of the logits.

    Every view is seen as it is and mirrored left to right. With ``shift`` there are three: the image, which
    counts half, and the image shifted by one pixel up and left, and down and right, a quarter each; what
    comes in at the edge is mirrored there (Keller Jordan, arXiv 2404.00498).

    Args:
        model: takes float images (n, C, H, W) and gives logits (n, classes).
        shift: whether there are shifted views.

    Raises:
        ConfigError: when called with anything but images.
    """

    def __init__(self, model: nn.Module, *, shift: bool = False) -> None:
        super().__init__()
        self.model = model
        self.shift = shift

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, float (n, classes), of images, float (n, C, H, W)."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            shape = f"shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ConfigError(
                f"--tta shows a model several views of an image, and these inputs have {shape}; it needs a "
                "tensor (n, C, H, W). Leave out --tta."
            )
        total = self._both_ways(images)
        if not self.shift:
            return total
        height, width = images.shape[2:]
        padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
        shifted = [padded[:, :, i : i + height, i : i + width] for i in (0, 2)]
        views = [view.contiguous(memory_format=memory_format_of(images)) for view in shifted]
        return total / 2 + (self._both_ways(views[0]) + self._both_ways(views[1])) / 4

    def _both_ways(self, images: Tensor) -> Tensor:
        total: Tensor = self.model(images).float() + self.model(images.flip(3)).float()
        return total / 2


def evaluated(model: nn.Module, tta: str) -> nn.Module:
    """Return what is evaluated for ``model``: itself, or its :class:`Views`."""
    return model if tta == "none" else Views(model, shift=tta == "flip_shift")


def at_size(
    measure: Callable[[nn.Module, Any], Result], sizes: Sequence[int], epoch: Callable[[], int]
) -> Callable[[nn.Module, Any], Result]:
    """Return a loss or metrics function whose images are scaled to the size of the epoch first.

    Args:
        measure: takes the model and a batch (images, labels), images float (n, C, H, W).
        sizes: the side in pixels, epoch by epoch, the last one to the end; none for images as they are.
        epoch: returns the epoch, from 0, that it is now.

    Raises:
        ConfigError: from the function that is returned: the batch is another one.
    """
    if not sizes:
        return measure

    def scaled(model: nn.Module, batch: Any) -> Result:
        images, labels = _images_and_labels(batch)
        return measure(model, (resized(images, size_at(sizes, epoch())), labels))

    return scaled


def size_at(sizes: Sequence[int], epoch: int) -> int:
    """Return the size of the images in an epoch, from 0."""
    return sizes[min(epoch, len(sizes) - 1)]


def epoch_of_last_step(epoch: int, epoch_step: int) -> int:
    """Return the epoch of the last step: an evaluation has the image size of the epoch before it.

    Args:
        epoch: finished epochs.
        epoch_step: steps since then.
    """
    return epoch if epoch_step else max(0, epoch - 1)


def _images_and_labels(batch: Any) -> tuple[Tensor, Any]:
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    images = batch[0] if is_pair else None
    if isinstance(images, Tensor) and images.ndim == 4 and images.is_floating_point():
        return images, batch[1]
    if is_pair:
        found = f"pairs of which the first is {kind_of(batch[0])}"
    elif isinstance(batch, Mapping):
        found = f"a {type(batch).__name__} with the keys {', '.join(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        found = f"a {type(batch).__name__} of {len(batch)}"
    else:
        found = kind_of(batch)
    raise ConfigError(
        f"--image-sizes scales images, and a batch of this Dataset is {found}; expected (images, labels), "
        "images a float tensor (n, C, H, W). Leave out --image-sizes, or let __getitem__ return such a pair."
    )
