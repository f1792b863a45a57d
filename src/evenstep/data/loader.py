"""The Loader: which samples each lane gets in each step, from where the run stands to its end.

The order of an epoch comes from (seed, epoch) alone (:func:`evenstep.seeding.order`). Step s of the epoch
takes ``order[s*B:(s+1)*B]`` (the last batch may be shorter and is kept), and lane l takes
``share(l, lanes, n)`` of that. A process makes only the lanes it owns.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from evenstep import seeding
from evenstep.config import check_batch_size
from evenstep.data.augment import Augment
from evenstep.data.batch import Batch, LaneBatch, MemoryFormat
from evenstep.data.cache import ImageArrays
from evenstep.data.dataset import check_image_options, checked_size, reading_of
from evenstep.data.fetch import (
    Collate,
    Normalize,
    Part,
    Request,
    Stream,
    read_arrays,
    read_items,
    read_stream,
)
from evenstep.data.resident import resident
from evenstep.data.same import check_same_data, described
from evenstep.data.shards import ShardedStream, has_shards, sharded_epoch
from evenstep.errors import ConfigError
from evenstep.heartbeat import Activity, now
from evenstep.world import World, current, share

_Check = Callable[[str], None]


class Position(Protocol):
    """Where a run stands; a TrainState is one, whose ``start`` counts batches."""

    @property
    def step(self) -> int:
        """Steps committed so far."""

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""

    @property
    def epoch_step(self) -> int:
        """Steps committed in the current epoch."""


class Loader:
    """Gives this process its part of every global batch.

    Three kinds of dataset:

    * :class:`~evenstep.data.cache.ImageArrays`: gathered and augmented as whole tensors in this process;
      ``data`` is (float32 images (n, C, H, W), int64 labels (n,)). ``workers`` has nothing to do.
    * any other map-style dataset: read item by item, in ``workers`` processes if that is above 0.
    * ``torch.utils.data.IterableDataset``: every process reads the whole stream in its order and keeps its
      own samples, so reading does not get faster with more processes. ``shuffle`` does nothing; its
      ``set_epoch(epoch)`` is called before each epoch if it has one. Resuming inside an epoch reads and
      drops the items before. At most one worker.
    * an IterableDataset that also has ``shard(index, count)``, which returns an iterable over part ``index``
      of ``count``: every lane reads its own shard, and nothing else is read. Shards may differ in length and
      may be empty. Lane l takes ``len(share(l, lanes, batch_size))`` samples of its shard a step; when its
      shard has ended it is empty, and the epoch ends with the last shard. The parts of all lanes have to
      hold every sample once. ``shard`` may be called several times in an epoch. Taking the next batch is
      collective then. Evaluation reads the whole stream.

    Before each item is read, the random states of Python, numpy and torch are seeded from (seed, epoch,
    sample), and put back after it: a random transform has the same bits with any number of processes and
    workers. Where a TrainState trains, they are also seeded from (seed, step) as a batch is handed out, so
    that the loop's body draws the same on every rank.

    Args:
        dataset: the data.
        batch_size: samples in a global batch, over all lanes and processes.
        seed: of the order, of augmentation and of random transforms; by default the world's.
        shuffle: whether each epoch has an order of its own; otherwise the order is that of the dataset.
        workers: DataLoader worker processes of this process.
        augment: random crops and flips; for ImageArrays only.
        normalize: (mean, std), each with one number per channel, in 0..1; for ImageArrays only.
        collate_fn: makes the data of a lane from the list of its items; by default torch's.
        memory_format: ``channels_last`` or ``contiguous``, for tensors (n, C, H, W); by default as they come:
            ImageArrays in channels_last, others as the dataset makes them. Convolutions and pooling on a CPU
            are much faster in channels_last; bits depend on it.
        world: by default the current one.

    Raises:
        ConfigError: an argument cannot be, or does not fit this kind of dataset.
        DataError: the dataset is empty.

    Example:
        >>> import numpy as np, types
        >>> arrays = ImageArrays(np.zeros((5, 8, 8, 3), np.uint8), np.arange(5))
        >>> start = types.SimpleNamespace(step=0, epoch=0, epoch_step=0)
        >>> with Loader(arrays, batch_size=2, shuffle=False) as loader:
        ...     [batch.lanes[0].ids for batch in loader.batches(start, epochs=1)]
        [(0, 1), (2, 3), (4,)]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int | None = None,
        shuffle: bool = True,
        workers: int = 0,
        augment: Augment | None = None,
        normalize: Normalize | None = None,
        collate_fn: Collate | None = None,
        memory_format: MemoryFormat | None = None,
        world: World | None = None,
    ) -> None:
        self.world = world or current()
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.seed = self.world.seed if seed is None else seed
        self.augment, self.normalize = augment, normalize
        self.reading = reading_of(dataset, self.world, self.seed, workers, collate_fn, memory_format)
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_same = False
        check_batch_size(batch_size, self.world.lanes)
        self.num_samples = checked_size(dataset)
        check_image_options(dataset, augment=augment, normalize=normalize)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in an epoch, the last and perhaps shorter batch included; None for an iterable dataset."""
        return None if self.num_samples is None else -(-self.num_samples // self.batch_size)

    def batches(
        self, position: Position, *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Batch]:
        """Return the batches from ``position`` on.

        The position is read once, here; a batch that was given out counts as done.

        Args:
            position: where to start: has ``step``, ``epoch`` and ``epoch_step``, as a TrainState has.
            epochs: how many epochs the whole run has; None for no end.
            steps: the step to stop at; None for no such stop. Where a batch has several steps, batches count.

        Raises:
            ConfigError: the position is outside the epoch: another data set or batch size; or the ranks do
                not read the same data, which is looked at with the first batch for a TrainState. Taking that
                one is collective.
        """
        self.world.observer.reading(self)
        # Who only looks at some batches, with a position of his own, may do that on one rank.
        check = self._check_same if hasattr(position, "start") else _unchecked
        # A TrainState says itself where to begin: after a restart with the batch in hand. And it is told of
        # each batch, and when the loop has done all with it.
        told = position if hasattr(position, "handed_out") else None
        position = getattr(position, "start", position)
        step, epoch, epoch_step = position.step, position.epoch, position.epoch_step
        if self.num_samples is None:
            generator = self._stream_batches(step, epoch, epoch_step, epochs, steps, check)
        else:
            self._check_position(epoch, epoch_step)
            generator = self._sized_batches(step, epoch, epoch_step, epochs, steps, check)
        shown = _shown(generator, self.world, told)
        self._open.add(shown)
        return shown

    def close(self) -> None:
        """End the worker processes of all iterations that are still open."""
        for generator in list(self._open):
            generator.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_same(self, found: str) -> None:
        """Check once that all ranks read the same data. Collective, the first time."""
        if not self._is_same:
            check_same_data(self.dataset, found, self.world)
            self._is_same = True

    def _check_position(self, epoch: int, epoch_step: int) -> None:
        if self.steps_per_epoch is not None and epoch_step > self.steps_per_epoch:
            raise ConfigError(
                f"the run stands at step {epoch_step} of epoch {epoch}, but an epoch of {self.num_samples} "
                f"samples in batches of {self.batch_size} has {self.steps_per_epoch} steps. The run was "
                "begun with other data or another batch size; give the same --data and --batch-size again."
            )

    def _plan(
        self, epoch: int, epoch_step: int, epochs: int | None
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield (epoch, epoch_step, global batch) without end, or up to ``epochs``."""
        assert self.num_samples is not None
        size = self.batch_size
        while epochs is None or epoch < epochs:
            indices = seeding.order(self.seed, epoch, self.num_samples) if self.shuffle else None
            for number in range(epoch_step, -(-self.num_samples // size)):
                rows = range(number * size, min((number + 1) * size, self.num_samples))
                yield (
                    epoch,
                    number,
                    tuple(rows if indices is None else indices[rows.start : rows.stop].tolist()),
                )
            epoch, epoch_step = epoch + 1, 0

    def _sized_batches(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, steps: int | None, check: _Check
    ) -> Iterator[Batch]:
        check(described(self.dataset))
        # Two walks over the same plan: the requests run ahead of the batches by what the workers prefetch.
        num_steps = None if steps is None else max(0, steps - step)
        requests = (
            Request(epoch, lane_parts(batch, self.world))
            for epoch, _, batch in _first(self._plan(epoch, epoch_step, epochs), num_steps)
        )
        plan = _first(self._plan(epoch, epoch_step, epochs), num_steps)
        answers = self._answers(requests)
        try:
            for epoch, number, batch in plan:
                data = next(answers, None)
                if data is None:  # it must not look like the end of the run
                    raise RuntimeError(
                        f"evenstep: the data ended before step {step} (epoch {epoch}, step {number})"
                    )
                lanes = _lane_batches(lane_parts(batch, self.world), data)
                last = number + 1 == self.steps_per_epoch
                yield Batch(step, epoch, number, len(batch), last, lanes)
                step += 1
        finally:
            answers.close()

    def _answers(self, requests: Iterator[Request]) -> Any:
        if not isinstance(self.dataset, ImageArrays):
            return read_items(self.dataset, requests, self.reading)
        on_gpu = resident(self.dataset, self.world.device)
        return (
            read_arrays(
                self.dataset,
                request,
                self.reading,
                options=self.augment,
                normalize=self.normalize,
                on_gpu=on_gpu,
            )
            for request in requests
        )

    def _stream_batches(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, steps: int | None, check: _Check
    ) -> Iterator[Batch]:
        if steps is not None and step >= steps:
            return
        if has_shards(self.dataset):
            yield from self._sharded_batches(step, epoch, epoch_step, epochs, steps)
            return
        split = functools.partial(_stream_lanes, world=self.world, batch_size=self.batch_size)
        stream = Stream(
            self.dataset, self.batch_size, split, self.reading, epoch=epoch, skip=epoch_step, epochs=epochs
        )
        answers: Any = read_stream(stream, self.reading)
        try:
            for answer in answers:
                if answer.found:
                    check(answer.found)
                lanes = _lane_batches(answer.parts, answer.data)
                yield Batch(step, answer.epoch, answer.epoch_step, answer.size, answer.last, lanes)
                step += 1
                if step == steps:
                    return
        finally:
            answers.close()

    def _sharded_batches(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, steps: int | None
    ) -> Iterator[Batch]:
        while epochs is None or epoch < epochs:
            stream = ShardedStream(
                self.dataset, self.batch_size, self.world, self.reading, epoch=epoch, skip=epoch_step
            )
            with contextlib.closing(sharded_epoch(stream, self.world, step)) as batches:
                for batch in batches:
                    yield batch
                    step += 1
                    if step == steps:
                        return
            epoch, epoch_step = epoch + 1, 0


def _unchecked(found: str) -> None:
    """Stand in for the check that all ranks read the same data, where one rank reads alone."""


def _shown(batches: Any, world: World, told: Any) -> Iterator[Batch]:
    """Yield the batches, and show in the heartbeat when the loop waits for one."""
    with contextlib.closing(batches):
        now(world, Activity.DATA)
        for batch in batches:
            now(world, Activity.USER)
            if told is not None:
                seeding.seed_loop(world.seed, batch.step, world.device)
                told.handed_out(batch)
            yield batch
            if told is not None:
                told.asked()
            now(world, Activity.DATA)
    now(world, Activity.USER)


def lane_parts(batch: tuple[int, ...], world: World) -> tuple[Part, ...]:
    """Return what each own lane of ``world`` reads of a global batch of sample indices.

    An empty lane gets the first samples of the batch, at most two, as a stand-in.
    """
    parts = []
    for lane in world.own_lanes:
        rows = share(lane, world.lanes, len(batch))
        indices = batch[rows.start : rows.stop] or batch[:2]
        parts.append(Part(lane, len(rows), indices))
    return tuple(parts)


# A function of the module, not a closure, because a worker process may have to unpickle it.
def _stream_lanes(number: int, size: int, *, world: World, batch_size: int) -> tuple[Part, ...]:
    return lane_parts(tuple(range(number * batch_size, number * batch_size + size)), world)


def _lane_batches(parts: Sequence[Part], data: list[Any]) -> tuple[LaneBatch, ...]:
    return tuple(
        LaneBatch(part.number, part.size, value, part.ids) for part, value in zip(parts, data, strict=True)
    )


def _first(items: Iterator[Any], n: int | None) -> Iterator[Any]:
    return items if n is None else (item for _, item in zip(range(n), items, strict=False))
