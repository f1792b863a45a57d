import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from evenstep import Loader, TrainState, evaluate, train_step
from evenstep.data.cache import ImageArrays
from evenstep.data.same import content_digest, described
from evenstep.errors import ConfigError
from evenstep.testing import run_ranks


class Stream(IterableDataset):
    """64 numbers; with ``cut`` it takes its own part by rank, as a stream for plain DDP does."""

    def __init__(self, world, cut):
        self.first, self.step = (world.rank, world.world_size) if cut else (0, 1)

    def __iter__(self):
        for number in range(self.first, 64, self.step):
            yield torch.tensor([float(number)])


class Items(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def mean(model, batch):
    return model(batch).square().mean()


def value(model, batch):
    return {"value": batch[:, 0]}


def train(world, dataset, workers=0):
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    with Loader(dataset, 16, workers=workers) as loader:
        return [train_step(state, batch, mean).step for batch in loader.batches(state, epochs=1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_takes_its_part_by_rank_is_refused(workers):
    def job(world, what, cut):
        if what == "train":
            return train(world, Stream(world, cut), workers)
        return evaluate(torch.nn.Linear(1, 1), Stream(world, cut), value, chunk_size=8, workers=workers)

    for what in ("train", "evaluate"):
        with pytest.raises(
            ConfigError, match=r"Stream\) has other samples on rank 1 than.*shard\(index, count\)"
        ):
            run_ranks(job, 2, what, True)
    assert run_ranks(job, 2, "train", False) == [[0, 1, 2, 3]] * 2
    assert run_ranks(job, 2, "evaluate", False) == [{"value": 31.5, "samples": 64}] * 2


def test_a_dataset_of_another_size_on_one_rank_is_refused():
    def job(world, what):
        dataset = Items(64 - 16 * world.rank)
        return train(world, dataset) if what == "train" else evaluate(torch.nn.Identity(), dataset, value)

    for what in ("train", "evaluate"):
        with pytest.raises(ConfigError, match=r"Items\) has 64 samples on rank 0 and 48 samples on rank 1"):
            run_ranks(job, 2, what)


def test_one_rank_may_look_at_batches_alone():
    def job(world):
        class Start:
            step = epoch = epoch_step = 0

        model = torch.nn.Linear(1, 1)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        with Loader(Items(64), 16) as loader:
            batches = loader.batches(state, epochs=1)  # the first is checked on all ranks
            alone = next(iter(loader.batches(Start()))).size if world.is_first else 0
            return alone, len([train_step(state, batch, mean) for batch in batches])

    assert run_ranks(job, 2, timeout_s=60) == [(16, 4), (0, 4)]


ITEMS = [
    torch.tensor([1, 2]),
    torch.tensor([1.0, 2.0]),
    torch.tensor([[1.0, 2.0]]),
    torch.tensor(1.0, dtype=torch.bfloat16),
    np.array([1, 2]),
    np.float32(1),
    (1, 2),
    ((1,), 2),
    {"a": 1},
    {"a": 2},
    "a",
    b"a",
    None,
    1.5,
    Image.new("L", (2, 2), 1),
    Image.new("L", (2, 2), 2),
    object(),
]


def test_digests_tell_items_apart_and_equal_ones_not():
    assert len({content_digest([item]) for item in ITEMS}) == len(ITEMS)
    assert content_digest(ITEMS) == content_digest(ITEMS[:8] + ITEMS[:3])
    assert content_digest([object()]) == content_digest([object()])


PADDED = np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8], "itemsize": 24})


def records(filling, b=2.0):
    """Return an array with bytes between the fields that have no meaning."""
    array = np.frombuffer(bytes([filling]) * 48, PADDED).copy()
    array["a"], array["b"] = 1, b
    return array


def longs(filling, value=1.5):
    array = np.full(2, value, np.longdouble)
    if np.finfo(np.longdouble).nmant == 63:  # of x86: 10 of 16 bytes have a meaning
        array.view(np.uint8).reshape(2, -1)[:, 10:] = filling
    return array


def text(word):
    """Return a text at an address of its own."""
    return "".join(list(word * 5))


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        *((np.array(a, object), np.array(b, object), np.array(c, object)) for a, b, c in [
            ([text("x")], [text("x")], [text("y")]),
            ([[text("x"), None]], [[text("x"), None]], [text("x"), None]),
        ]),
        (records(1), records(2), records(1, b=3.0)),
        (records(1)[0], records(2)[0], records(1, b=3.0)[0]),
        (longs(1), longs(2), longs(1, value=3)),
        ({"text": text("x")}, {"text": text("x")}, {"text": text("y")}),
        (Image.new("L", (2, 4), 1), Image.new("L", (2, 4), 1), Image.new("L", (4, 2), 1)),
    ],
)  # fmt: skip
def test_values_count_and_not_where_or_how_they_are_stored(one, same, other):
    assert content_digest([one]) == content_digest([same])
    assert content_digest([one]) != content_digest([other])


def test_what_offers_bytes_of_its_own_counts_by_its_type():
    class Handle:
        def tobytes(self):
            return id(self).to_bytes(8, "little")

    one, other = Handle(), Handle()
    assert content_digest([one]) == content_digest([other])


def test_what_tells_images_apart():
    images = np.zeros((3, 2, 2, 3), np.uint8)
    assert (
        described(ImageArrays(images, np.zeros(3, int), fingerprint="ab" * 32))
        == "3 samples (sha256 abababababababab)"
    )
    assert described(ImageArrays(images, np.zeros(3, int))) == "3 samples"
