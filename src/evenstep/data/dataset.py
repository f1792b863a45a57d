"""What a dataset is: its size, how it is read, and which options go with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, default_collate

from evenstep.data.augment import Augment
from evenstep.data.batch import MemoryFormat
from evenstep.data.cache import ImageArrays
from evenstep.data.fetch import Collate, Laid, Normalize, Reading
from evenstep.errors import ConfigError, DataError
from evenstep.world import World


def num_samples(dataset: Any) -> int | None:
    """Return how many samples a dataset has, or None for an iterable dataset, which tells nobody."""
    if isinstance(dataset, IterableDataset):
        return None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return len(dataset)
    raise ConfigError(
        f"{type(dataset).__name__} is not a dataset: it has not both __len__ and __getitem__ (map-style), "
        "nor is it a torch.utils.data.IterableDataset. Make it one of these; in place of a DataLoader, pass "
        "the dataset inside it."
    )


def reading_of(
    dataset: Any,
    world: World,
    seed: int,
    workers: int,
    collate_fn: Collate | None,
    memory_format: MemoryFormat | None,
) -> Reading:
    """Return how a dataset is read.

    Raises:
        ConfigError: the workers do not go with it, or there is no such memory format.
    """
    if workers < 0:
        raise ConfigError(f"workers is {workers}; it must be 0 or more, for example --workers 2.")
    if workers > 1 and isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"workers is {workers}, but {type(dataset).__name__} is an iterable dataset: its stream has one "
            "order, and two workers would each read all of it. Use --workers 1, or give the dataset __len__ "
            "and __getitem__."
        )
    if memory_format not in ("channels_last", "contiguous", None):
        raise ConfigError(
            f"memory_format is {memory_format!r}; choose channels_last or contiguous, or leave it out to "
            "take batches as they come (--memory-format auto)."
        )
    collate = collate_fn or default_collate
    if memory_format is not None:
        collate = Laid(collate, memory_format)
    return Reading(seed, workers, world.device, collate, memory_format)


def checked_size(dataset: Any) -> int | None:
    """Return ``num_samples(dataset)``.

    Raises:
        DataError: it has none.
    """
    size = num_samples(dataset)
    if size == 0:
        raise DataError(
            f"the dataset ({type(dataset).__name__}) has no samples, so there is nothing to read. "
            "Check --data."
        )
    return size


def check_image_options(dataset: Any, *, augment: Augment | None, normalize: Normalize | None) -> None:
    """Check what works on images only.

    Raises:
        ConfigError: the dataset is not of images, or the numbers do not fit it.
    """
    given = "augment" if augment is not None else "normalize" if normalize is not None else None
    if given is not None and not isinstance(dataset, ImageArrays):
        raise ConfigError(
            f"{given} works on the images of evenstep's own sources, not on {type(dataset).__name__}, whose "
            "items may be anything. Leave out --augment and put the transform into the dataset."
        )
    if normalize is not None:
        channels = dataset.images.shape[3]
        if any(len(numbers) != channels for numbers in normalize):
            raise ConfigError(
                f"normalize has {len(normalize[0])} means and {len(normalize[1])} standard deviations for "
                f"images of {channels} channels; give one of each per channel."
            )
        if not np.all(np.asarray(normalize[1]) > 0):
            raise ConfigError(f"normalize has the standard deviations {normalize[1]}; each must be above 0.")
