import ctypes
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from evenstep import seeding
from evenstep.data import fetch, loader
from evenstep.data.augment import Augment, augment, to_tensor
from evenstep.data.cache import ImageArrays
from evenstep.data.chunks import eval_chunks
from evenstep.data.dataset import num_samples
from evenstep.data.loader import Loader
from evenstep.errors import ConfigError, DataError
from evenstep.world import World, entered
from worlds import ranks


def at(step=0, epoch=0, epoch_step=0):
    return types.SimpleNamespace(step=step, epoch=epoch, epoch_step=epoch_step)


def arrays(n, size=8):
    images = np.random.default_rng(0).integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    return ImageArrays(images, np.arange(n) % 7)


class RandomItems(Dataset):
    """Items with random numbers from all three generators."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *numbers], dtype=torch.float64)


class RandomStream(IterableDataset):
    """The same as a stream, in another order each epoch; also random numbers between the items."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.n):
            if random.random() < 0.5:
                np.random.rand()
            numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            yield torch.tensor([index + 100 * self.epoch, *numbers], dtype=torch.float64)


def values(data):
    return [piece.tolist() for piece in data] if isinstance(data, list | tuple) else data.tolist()


def read(dataset, batch_size, world, position=None, *, epochs=None, steps=None, **options):
    """Return everything a Loader gives, as plain values."""
    with Loader(dataset, batch_size, world=world, **options) as loader:
        return [
            (
                (batch.step, batch.epoch, batch.epoch_step, batch.size, batch.last_in_epoch),
                [(lane.lane, lane.size, lane.ids, values(lane.data)) for lane in batch.lanes],
            )
            for batch in loader.batches(position or at(), epochs=epochs, steps=steps)
        ]


def joined(per_rank):
    """Put the lanes of all ranks together, step by step."""
    heads = [[head for head, _ in batches] for batches in per_rank]
    assert all(head == heads[0] for head in heads)
    return [
        (head, [lane for batches in per_rank for lane in batches[i][1]]) for i, head in enumerate(heads[0])
    ]


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6)).filter(lambda s: s[2] <= s[1])


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 2**40), st.booleans(), st.integers(0, 3), st.data())
def test_an_epoch_has_each_sample_once_for_every_world_size(sizes, seed, shuffle, epoch, data):
    n, batch_size, lanes = sizes
    dataset, position = arrays(n, 2), at(epoch=epoch)
    options = {"seed": seed, "shuffle": shuffle, "epochs": epoch + 1}
    whole = read(dataset, batch_size, World(lanes=lanes), position, **options)
    ids = [index for _, parts in whole for _, _, ids, _ in parts for index in ids]
    assert sorted(ids) == list(range(n))
    assert shuffle or ids == list(range(n))
    assert [head[4] for head, _ in whole] == [False] * (len(whole) - 1) + [True]
    assert [head[3] for head, _ in whole] == [min(batch_size, n - start) for start in range(0, n, batch_size)]
    world_size = data.draw(st.integers(1, lanes))
    parts = [read(dataset, batch_size, world, position, **options) for world in ranks(world_size, lanes)]
    assert joined(parts) == whole


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(0, 100), st.data())
def test_resuming_gives_the_same_rest(sizes, seed, data):
    n, batch_size, lanes = sizes
    dataset, world = arrays(n, 2), World(lanes=lanes)
    options = {"seed": seed, "augment": Augment(1), "epochs": 3}
    whole = read(dataset, batch_size, world, **options)
    done = data.draw(st.integers(0, len(whole) - 1))
    step, epoch, epoch_step, *_ = whole[done][0]
    assert read(dataset, batch_size, world, at(step, epoch, epoch_step), **options) == whole[done:]


@pytest.mark.parametrize("make", [arrays, RandomItems, RandomStream])
@pytest.mark.parametrize("workers", [0, 1])
def test_where_it_starts_and_stops(make, workers):
    dataset, world = make(10), World()
    options = {"workers": workers, "seed": 1}
    whole = read(dataset, 4, world, epochs=2, **options)
    assert [head for head, _ in whole] == [
        (0, 0, 0, 4, False),
        (1, 0, 1, 4, False),
        (2, 0, 2, 2, True),
        (3, 1, 0, 4, False),
        (4, 1, 1, 4, False),
        (5, 1, 2, 2, True),
    ]
    assert read(dataset, 4, world, steps=4, **options) == whole[:4]
    assert read(dataset, 4, world, at(1, 0, 1), epochs=2, steps=5, **options) == whole[1:5]
    assert read(dataset, 4, world, at(6, 2, 0), epochs=2, **options) == []
    assert read(dataset, 4, world, at(4, 1, 1), steps=4, **options) == []
    if make is not RandomStream:  # an epoch of which all steps are done
        assert read(dataset, 4, world, at(3, 0, 3), epochs=2, **options) == whole[3:]


def test_without_an_end_it_goes_on():
    with Loader(arrays(3, 2), 2, world=World()) as loader:
        batches = loader.batches(at())
        epochs = [next(batches).epoch for _ in range(9)]
    assert epochs == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    with pytest.raises(StopIteration):
        next(batches)  # closed with the Loader


@pytest.mark.parametrize("make", [RandomItems, RandomStream])
def test_neither_workers_nor_processes_change_a_bit(make):
    dataset, options = make(11), {"seed": 5, "epochs": 2}
    whole = read(dataset, 5, World(lanes=4), **options)
    numbers = {tuple(row[1:]) for _, lanes in whole for *_, data in lanes for row in data}
    assert len(numbers) == 22  # other random numbers for each sample in each epoch
    most = 2 if make is RandomItems else 1
    for world_size, workers in [(1, most), (2, 0), (2, 1), (4, most)]:
        parts = [read(dataset, 5, world, workers=workers, **options) for world in ranks(world_size, 4)]
        assert joined(parts) == whole


@pytest.mark.parametrize("make", [RandomItems, RandomStream])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_or_items_resume_inside_an_epoch(make, workers):
    dataset, options = make(11), {"seed": 5, "epochs": 2, "workers": workers}
    whole = read(dataset, 4, World(lanes=2), **options)
    assert read(dataset, 4, World(lanes=2), at(2, 0, 2), **options) == whole[2:]
    assert read(dataset, 4, World(lanes=2), at(4, 1, 1), **options) == whole[4:]


@pytest.mark.parametrize("make", [RandomItems, RandomStream])
def test_reading_without_a_state_leaves_the_random_states_alone(make):
    seeding.seed_loop(0, 2, "cpu")
    expected = (random.random(), np.random.rand(), torch.rand(()))
    seeding.seed_loop(0, 2, "cpu")
    for workers in (0, 1):
        read(make(5), 2, World(), epochs=1, workers=workers)
        list(eval_chunks(make(5), chunk_size=2, world=World(), workers=workers))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_images_are_augmented_and_normalised_as_the_functions_say():
    dataset, normalize = arrays(9), ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    for world in ranks(2, 4):
        with Loader(dataset, 6, world=world, seed=3, augment=Augment(2), normalize=normalize) as loader:
            for batch in loader.batches(at(epoch=1), epochs=2):
                for lane in batch.lanes:
                    ids = np.array(lane.ids, dtype=np.int64)
                    pixels = augment(dataset.images[ids], ids, seed=3, epoch=1, options=Augment(2))
                    assert torch.equal(lane.data[0][: lane.size], to_tensor(pixels, *normalize))
                    assert lane.data[0].is_contiguous(memory_format=torch.channels_last)
                    assert lane.data[1].tolist()[: lane.size] == [index % 7 for index in lane.ids]


@pytest.mark.parametrize("size", [4, 5])
def test_lanes_have_equal_layout_for_every_world_size(size):
    # 5x5x3 floats are no multiple of 64 bytes, so a view of a lane would start anywhere.
    dataset = arrays(12, size)
    for world_size in (1, 2, 4):
        for world in ranks(world_size, 4):
            with Loader(dataset, 9, world=world) as loader:
                for lane in next(loader.batches(at())).lanes:
                    assert lane.data[0].data_ptr() % 64 == 0
                    assert lane.data[0].stride() == (size * size * 3, 1, size * 3, 3)


@pytest.mark.parametrize("make", [arrays, RandomItems, RandomStream])
def test_an_empty_lane_gets_a_stand_in(make):
    *_, (head, lanes) = read(make(9), 8, World(lanes=4), epochs=1, shuffle=False)
    assert head == (1, 0, 1, 1, True)
    assert [(lane, size, ids) for lane, size, ids, _ in lanes] == [
        (0, 0, ()),
        (1, 0, ()),
        (2, 0, ()),
        (3, 1, (8,)),
    ]
    assert all(data == lanes[3][3] for *_, data in lanes)
    *_, (_, lanes) = read(make(11), 8, World(lanes=4), epochs=1, shuffle=False)
    assert [size for _, size, _, _ in lanes] == [0, 1, 1, 1]
    stand_in = lanes[0][3]
    assert len(stand_in[1] if make is arrays else stand_in) == 2


def test_collate_fn_is_called_once_per_lane():
    batches = read(RandomItems(4), 4, World(lanes=2), epochs=1, shuffle=False, collate_fn=_first_numbers)
    assert [data for *_, data in batches[0][1]] == [[0, 1], [2, 3]]


def _first_numbers(items):
    return torch.tensor([int(item[0]) for item in items])


def test_defaults_come_from_the_current_world():
    with entered(World(lanes=3, seed=9)):
        loader = Loader(arrays(10, 2), 4)
        assert (loader.seed, loader.world.lanes, loader.steps_per_epoch) == (9, 3, 3)
        assert Loader(arrays(10, 2), 5, seed=0).seed == 0
    assert Loader(RandomStream(5), 4, world=World()).steps_per_epoch is None


def test_num_samples():
    assert num_samples(arrays(3, 2)) == 3
    assert num_samples([1, 2]) == 2
    assert num_samples(RandomStream(3)) is None


def _chunks(dataset, world, chunk_size=4, **options):
    return [
        (c, n, values(data))
        for c, n, data in eval_chunks(dataset, chunk_size=chunk_size, world=world, **options)
    ]


@pytest.mark.parametrize("make", [arrays, RandomItems, RandomStream])
def test_evaluation_sees_each_sample_once(make):
    dataset = make(18)
    whole = _chunks(dataset, World(seed=2))
    assert [(chunk, size) for chunk, size, _ in whole] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 2)]
    if make is not arrays:
        assert [row[0] for _, _, data in whole for row in data] == list(range(18))
    for world_size, workers in [(1, 1), (2, 0), (3, 1), (7, 0)]:
        parts = [_chunks(dataset, world, workers=workers) for world in ranks(world_size, 7, seed=2)]
        assert sorted(chunk for part in parts for chunk in part) == whole
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_evaluation_is_seeded_as_epoch_0_and_normalises():
    epoch_0 = read(RandomItems(6), 3, World(), epochs=1, shuffle=False, seed=4)
    assert [data for _, _, data in _chunks(RandomItems(6), World(seed=4), 3)] == [
        lanes[0][3] for _, lanes in epoch_0
    ]
    dataset, normalize = arrays(5), ((0.5,) * 3, (0.25,) * 3)
    ((_, _, (images, labels)),) = eval_chunks(dataset, chunk_size=9, world=World(), normalize=normalize)
    assert torch.equal(images, to_tensor(dataset.images, *normalize))
    assert labels.dtype == torch.int64


class Broken(RandomItems):
    def __getitem__(self, index):
        if index == 3:
            raise ZeroDivisionError("the user's own error")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_dataset_names_the_sample(workers):
    with pytest.raises(ZeroDivisionError, match="the user's own error") as caught:
        read(Broken(5), 2, World(), epochs=1, shuffle=False, workers=workers)
    text = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert "while reading sample 3 of the dataset in epoch 0" in text
    assert workers == 0 or "in __getitem__" in text


class Exhausted(RandomItems):
    def __getitem__(self, index):
        return next(iter([])) if index == 3 else super().__getitem__(index)


def _exhausted(items):
    return next(iter([]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_of_the_users_code_is_no_end_of_the_data(workers):
    options = {"epochs": 1, "shuffle": False, "workers": workers}
    with pytest.raises(RuntimeError, match="StopIteration while reading sample 3 of the dataset in epoch 0"):
        read(Exhausted(5), 2, World(), **options)
    with pytest.raises(RuntimeError, match="StopIteration in collate_fn"):
        read(RandomItems(5), 2, World(), collate_fn=_exhausted, **options)


def test_data_that_end_before_the_plan_are_an_error(monkeypatch):
    def two(dataset, requests, reading):
        yield from list(fetch.read_items(dataset, requests, reading))[:2]

    monkeypatch.setattr(loader, "read_items", two)
    with pytest.raises(RuntimeError, match="the data ended before step 2 "):
        read(RandomItems(5), 2, World(), epochs=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Loader(arrays(9, 2), 3, world=World(lanes=4)),
            ConfigError,
            "batch_size 3 is smaller than lanes 4",
        ),
        (lambda: Loader(arrays(0, 2), 3), DataError, r"(ImageArrays) has no samples.*Check --data"),
        (
            lambda: Loader(iter([]), 3),
            ConfigError,
            "list_iterator is not a dataset.*pass the dataset inside it",
        ),
        (lambda: Loader(RandomItems(3), 3, workers=-1), ConfigError, "workers is -1; .*--workers 2"),
        (
            lambda: Loader(RandomStream(3), 3, workers=2),
            ConfigError,
            "RandomStream is an iterable.*Use --workers 1",
        ),
        (
            lambda: Loader(RandomItems(3), 3, augment=Augment()),
            ConfigError,
            "augment works on.*not on RandomItems",
        ),
        (
            lambda: Loader(RandomItems(3), 3, normalize=((0.5,), (0.5,))),
            ConfigError,
            "normalize works on.*Leave out --augment",
        ),
        (
            lambda: Loader(arrays(3), 3, normalize=((0.5,), (0.5,))),
            ConfigError,
            "normalize has 1 means and 1 standard deviations for images of 3 channels",
        ),
        (
            lambda: Loader(arrays(3), 3, normalize=((0.5,) * 3, (0.5, 0.5, 0.0))),
            ConfigError,
            "standard deviations .*each must be above 0",
        ),
        (
            lambda: Loader(arrays(9, 2), 3).batches(at(5, 0, 5)),
            ConfigError,
            "at step 5 of epoch 0, but an epoch of 9 samples in batches of 3 has 3 steps.*--batch-size",
        ),
        (
            lambda: next(Loader(RandomStream(9), 3).batches(at(5, 0, 5))),
            ConfigError,
            "stream ended after 3 batches of 3 in epoch 0, but the run stands at batch 5",
        ),
        (
            lambda: next(Loader(RandomStream(0), 3).batches(at())),
            DataError,
            "(RandomStream) has no samples in epoch 0",
        ),
        (
            lambda: next(eval_chunks(RandomStream(0), chunk_size=3, world=World())),
            DataError,
            "(RandomStream) has no samples",
        ),
        (lambda: eval_chunks(arrays(0, 2), chunk_size=3, world=World()), DataError, "has no samples"),
        (lambda: eval_chunks(arrays(4, 2), chunk_size=0, world=World()), ConfigError, "chunk_size is 0"),
        (
            lambda: Loader(arrays(4, 2), 2, memory_format="NHWC"),
            ConfigError,
            "memory_format is 'NHWC'; choose channels_last or contiguous.*--memory-format",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        call()


class OwnImages(Dataset):
    """Images as torchvision's ToTensor makes them: one tensor (C, H, W) after the other, in that order."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return {"image": image.contiguous(), "label": label}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_own_images_come_in_the_memory_format_that_is_asked_for(workers):
    dataset = OwnImages(arrays(7))
    found = {}
    for wanted in (None, "channels_last", "contiguous"):
        with Loader(dataset, 4, workers=workers, memory_format=wanted, world=World()) as loader:
            batches = list(loader.batches(at(), epochs=1))
        chunks = list(
            eval_chunks(dataset, chunk_size=3, workers=workers, memory_format=wanted, world=World())
        )
        found[wanted] = [batch.lanes[0].data for batch in batches] + [data for *_, data in chunks]
    for plain, last, contiguous in zip(*found.values(), strict=True):
        assert plain["image"].is_contiguous()
        assert contiguous["image"].is_contiguous()
        assert last["image"].is_contiguous(memory_format=torch.channels_last)
        assert not last["image"].is_contiguous()
        for key in ("image", "label"):
            assert torch.equal(plain[key], last[key])
            assert torch.equal(plain[key], contiguous[key])


def test_decoded_images_come_in_channels_last_unless_contiguous_is_asked_for():
    for wanted, is_contiguous in ((None, False), ("channels_last", False), ("contiguous", True)):
        (batch,) = Loader(arrays(4), 4, memory_format=wanted, world=World()).batches(at(), epochs=1)
        images, labels = batch.lanes[0].data
        assert images.is_contiguous() == is_contiguous
        assert labels.is_contiguous()


def test_workers_end_with_the_iteration():
    import torch.multiprocessing as multiprocessing

    with Loader(RandomItems(50), 5, workers=2, world=World()) as loader:
        batches = loader.batches(at(), epochs=3)
        next(batches)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


class Inside(RandomItems):
    """Items tell how the worker process is set up."""

    def __getitem__(self, index):
        death_signal = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal), 0, 0, 0)  # PR_GET_PDEATHSIG
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        default = signal.getsignal(signal.SIGTERM) is fetch._linger
        return torch.tensor([death_signal.value, ignored, default, torch.get_num_threads()])


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_worker_leaves_signals_to_its_process_and_dies_with_it():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        ((_, lanes),) = read(Inside(1), 1, World(), epochs=1, workers=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert lanes[0][3] == [[signal.SIGKILL, 1, 1, 1]]


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_workers_die_with_their_process(tmp_path):
    code = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_data_loader import Loader, RandomItems, World, at
import torch.multiprocessing
batches = Loader(RandomItems(500), 5, workers=2, world=World()).batches(at())
next(batches)
print(*[child.pid for child in torch.multiprocessing.active_children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    tests = str(Path(__file__).parent)
    # A file and not a pipe, which workers that live on would keep open.
    with (tmp_path / "pids").open("w") as file:
        result = subprocess.run([sys.executable, "-c", code.format(tests=tests)], stdout=file, timeout=60)
    workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert (result.returncode, len(workers)) == (-9, 2)
    for _ in range(100):
        alive = [pid for pid in workers if _is_running(pid)]
        if not alive:
            break
        time.sleep(0.05)
    assert alive == []


def _is_running(pid):
    try:
        # A zombie has ended; only nobody has asked for its exit code yet.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
