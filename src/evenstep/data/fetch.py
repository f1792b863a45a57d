"""How samples are read: whole arrays at once, or item by item, here or in DataLoader worker processes.

A *request* names the samples of some lanes (or chunks of an evaluation); what comes back is one collated
value per lane. Before each item the random states are seeded from (seed, epoch, index), so a random
transform gives the same result in every process, with any number of workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from evenstep import seeding
from evenstep.data.augment import Augment, augment, to_tensor
from evenstep.data.batch import MemoryFormat, laid_out
from evenstep.data.cache import ImageArrays
from evenstep.data.resident import Resident, gather, to_floats
from evenstep.data.same import content_digest
from evenstep.errors import ConfigError, DataError

_LINGER_S = 10.0
Collate = Callable[[list[Any]], Any]
Normalize = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Part:
    """The samples of one lane or chunk.

    Attributes:
        number: the lane or chunk.
        size: how many of ``indices`` count; 0 if they are the stand-in of an empty lane.
        indices: what to read.
    """

    number: int
    size: int
    indices: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The indices that count."""
        return self.indices[: self.size]


@dataclass(frozen=True)
class Request:
    """What this process reads at once: the parts of one step, or one chunk."""

    epoch: int
    parts: tuple[Part, ...]


class Answer(NamedTuple):
    """One global batch of a stream. A tuple, because DataLoader pins the memory of what is in tuples.

    Attributes:
        epoch: the epoch, from 0.
        epoch_step: the step inside the epoch, from 0.
        size: samples in the global batch.
        last: whether the epoch ends here.
        parts: the parts of this process.
        data: one collated value per part.
        found: of the first batch that is read, what tells the stream apart (:func:`content_digest`), else "".
    """

    epoch: int
    epoch_step: int
    size: int
    last: bool
    parts: Sequence[Part]
    data: list[Any]
    found: str


@dataclass(frozen=True)
class Reading:
    """How items are read.

    Attributes:
        seed: the seed of the sample transforms.
        workers: DataLoader worker processes of this process.
        device: the device of this process; batches for cuda are put into pinned memory.
        collate: makes one value of a list of items.
        memory_format: that of batches of images; None: as they come.
    """

    seed: int
    workers: int = 0
    device: str = "cpu"
    collate: Collate = default_collate
    memory_format: MemoryFormat | None = None


@dataclass(frozen=True)
class Laid:
    """A collate function whose tensors are in a memory format."""

    collate: Collate
    memory_format: MemoryFormat

    def __call__(self, items: list[Any]) -> Any:
        """Return the collated items."""
        return laid_out(self.collate(items), self.memory_format)


def read_arrays(
    arrays: ImageArrays,
    request: Request,
    reading: Reading,
    *,
    options: Augment | None,
    normalize: Normalize | None,
    on_gpu: Resident | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (float32 images (n, C, H, W), int64 labels (n,)) for each part, read with one gather.

    With ``on_gpu`` they are gathered there, and come with the same bits.
    """
    indices = np.array([index for part in request.parts for index in part.indices], dtype=np.int64)
    mean, std = normalize or (None, None)
    if on_gpu is not None:
        pixels, targets = gather(on_gpu, indices, seed=reading.seed, epoch=request.epoch, options=options)
        floats = to_floats(pixels, mean, std)
    else:
        images, labels = arrays.gather(indices)
        if options is not None:
            images = augment(images, indices, seed=reading.seed, epoch=request.epoch, options=options)
        floats, targets = to_tensor(images, mean, std), torch.from_numpy(labels)
    ends = list(itertools.accumulate(len(part.indices) for part in request.parts))
    pieces = [(floats[a:b], targets[a:b]) for a, b in itertools.pairwise([0, *ends])]
    if len(pieces) > 1 and floats[0].numel() * 4 % 64:
        # A kernel may sum in another order when its input does not start at a multiple of 64 bytes. Where
        # a lane starts in this tensor depends on the world size, and the bits must not.
        pieces = [(piece.clone(), target) for piece, target in pieces]
    return [(laid_out(piece, reading.memory_format), target) for piece, target in pieces]


def read_items(dataset: Any, requests: Iterable[Request], reading: Reading) -> Iterator[list[Any]]:
    """Yield one list of collated parts per request, for a map-style dataset."""
    return loaded(_Items(dataset, reading.seed, reading.collate), requests, reading)


def read_stream(stream: Stream, reading: Reading) -> Iterator[Answer]:
    """Yield the global batches of an iterable dataset, with at most one worker process."""
    return loaded(stream, None, reading)


def loaded(dataset: Any, requests: Iterable[Request] | None, reading: Reading) -> Iterator[Any]:
    """Yield what ``dataset`` gives for each request, or gives by itself, read here or in workers."""
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=requests,
        num_workers=reading.workers,
        collate_fn=_same,
        pin_memory=reading.device.startswith("cuda"),
        worker_init_fn=_WorkerInit(os.getpid()) if reading.workers else None,
        multiprocessing_context=_context() if reading.workers else None,
        # One of its own, because DataLoader draws its base seed, which would move the global generator.
        generator=torch.Generator().manual_seed(0),
    )
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any fork beside threads; a worker uses none of this process's.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        iterator = iter(loader)
    # Workers have random states of their own; without workers the items are read in this process.
    guard = contextlib.nullcontext if reading.workers else seeding.preserved_rng
    try:
        while True:
            with guard():
                try:
                    answer = next(iterator)
                except StopIteration:
                    return
            yield answer
    finally:
        # DataLoader ends its workers when the iterator goes; an error's traceback could keep it alive.
        end_workers = getattr(iterator, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()


def _context() -> str:
    """Return how DataLoader workers are started: by fork, where there is one.

    A launched process is a child of the fork server and would start its own children there, too. They would
    not be its children then, would outlive it, and could not read a dataset that pickle does not know.
    """
    return "fork" if sys.platform == "linux" else multiprocessing.get_start_method()


def _same(value: Any) -> Any:
    return value


def _linger(number: int, _: object) -> None:
    """End this worker some seconds after SIGTERM."""
    timer = threading.Timer(_LINGER_S, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


class _WorkerInit:
    """Prepares a DataLoader worker: it dies with its parent, and leaves signals to the parent."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __call__(self, worker: int) -> None:
        if sys.platform == "linux":
            set_parent_death_signal = 1  # PR_SET_PDEATHSIG
            ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.parent:  # it died before the line above
                os._exit(1)
        # A forked worker inherits the handlers of a training process, which save its state.
        # A signal to the whole group asks that process to stop after its step, for which it needs its batch.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _linger)
        torch.set_num_threads(1)


def _read(dataset: Any, seed: int, epoch: int, index: int) -> Any:
    seeding.seed_sample(seed, epoch, index)
    try:
        return dataset[index]
    except StopIteration as error:
        # Whoever reads would take it for the end of the data, and training would end as if it were done.
        raise RuntimeError(
            f"evenstep: StopIteration while reading sample {index} of the dataset in epoch {epoch}: a next() "
            "in its __getitem__ had nothing left, which must not end the training as if the data were at "
            "their end. Give next() a second argument, or begin its iterator again."
        ) from error
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"evenstep: while reading sample {index} of the dataset in epoch {epoch}")
        raise


class _Items(Dataset[list[Any]]):
    """A dataset whose index is a Request and whose item is the list of its collated parts."""

    def __init__(self, dataset: Any, seed: int, collate: Collate) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __getitem__(self, request: Request) -> list[Any]:
        return [
            self._collated([_read(self.dataset, self.seed, request.epoch, index) for index in part.indices])
            for part in request.parts
        ]

    def _collated(self, items: list[Any]) -> Any:
        try:
            return self.collate(items)
        except StopIteration as error:  # as in _read
            raise RuntimeError(
                "evenstep: StopIteration in collate_fn: a next() in it had nothing left."
            ) from error


class Stream(IterableDataset[Answer]):
    """The global batches of an iterable dataset, one epoch after the other.

    Every process reads the whole stream in its order and keeps its own part of each batch, because only so
    the batches are the same for every world size. Random states are seeded before each item.

    Args:
        dataset: the user's IterableDataset; ``set_epoch(epoch)`` is called before each epoch if it has one.
        batch_size: items in a global batch.
        split: gives the parts of this process from (number of the batch in the epoch, its size).
        reading: how items are read.
        epoch: the first epoch.
        skip: global batches to drop at the start of the first epoch (resuming); their items are read.
        epochs: the epoch to stop before; None for never.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        split: Callable[[int, int], tuple[Part, ...]],
        reading: Reading,
        *,
        epoch: int = 0,
        skip: int = 0,
        epochs: int | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.split, self.reading = dataset, batch_size, split, reading
        self.epoch, self.skip, self.epochs = epoch, skip, epochs

    def __iter__(self) -> Iterator[Answer]:
        epoch, skip = self.epoch, self.skip
        while self.epochs is None or epoch < self.epochs:
            yield from self._one_epoch(epoch, skip)
            epoch, skip = epoch + 1, 0

    def _one_epoch(self, epoch: int, skip: int) -> Iterator[Answer]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        items = self._seeded(epoch)
        pending = list(take(items, 1))
        number = 0
        while pending:
            # One item of look-ahead tells whether this batch is the last one of the epoch.
            batch = pending + list(take(items, self.batch_size - 1))
            pending = list(take(items, 1))
            if number >= skip:
                found = content_digest(batch) if epoch == self.epoch and number == skip else ""
                yield self._answer(epoch, number, batch, last=not pending, found=found)
            number += 1
        if number == 0:
            raise DataError(
                f"the stream of the dataset ({type(self.dataset).__name__}) has no samples in epoch {epoch}, "
                "so there is nothing to read. Check --data."
            )
        if number <= skip:
            raise ConfigError(
                f"the stream ended after {number} batches of {self.batch_size} in epoch {epoch}, but the run "
                f"stands at batch {skip} of that epoch. It was begun with other data or another batch size; "
                "give the same --data and --batch-size again."
            )

    def _seeded(self, epoch: int) -> Iterator[Any]:
        seed = self.reading.seed
        seeding.seed_sample(seed, epoch, 0)
        iterator = iter(self.dataset)
        number = 0
        while True:
            seeding.seed_sample(seed, epoch, number)
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item
            number += 1

    def _answer(self, epoch: int, number: int, batch: list[Any], *, last: bool, found: str) -> Answer:
        first = number * self.batch_size
        parts = self.split(number, len(batch))
        data = [self.reading.collate([batch[i - first] for i in part.indices]) for part in parts]
        return Answer(epoch, number, len(batch), last, parts, data, found)


def take(items: Iterator[Any], n: int) -> Iterator[Any]:
    """Yield the next ``n`` items, or fewer if there are no more; takes no item more than that."""
    for _, item in zip(range(n), items, strict=False):
        yield item
