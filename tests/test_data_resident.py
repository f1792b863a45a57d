import types

import numpy as np
import pytest
import torch

from evenstep.data import chunks, loader, resident
from evenstep.data.augment import Augment
from evenstep.data.cache import ImageArrays
from evenstep.data.chunks import eval_chunks
from evenstep.data.loader import Loader
from evenstep.errors import ConfigError
from evenstep.world import World

CPU = torch.device("cpu")
NORMALIZE = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def arrays(n, height=8, width=6):
    images = np.random.default_rng(0).integers(0, 256, (n, height, width, 3), dtype=np.uint8)
    return ImageArrays(images, np.arange(n) % 7)


@pytest.fixture
def on_a_device(monkeypatch):
    """Have the images put onto the CPU as if it were a GPU: the same functions, and no GPU needed."""
    for module in (loader, chunks):
        monkeypatch.setattr(module, "resident", lambda data, device: resident.put(data, CPU, 10**9))


def read(options, normalize):
    data = arrays(23)
    start = types.SimpleNamespace(step=0, epoch=0, epoch_step=0)
    world = World(lanes=3)
    batches = Loader(data, 9, augment=options, normalize=normalize, world=world).batches(start, epochs=2)
    found = [lane.data for batch in batches for lane in batch.lanes]
    return found + [data for *_, data in eval_chunks(data, chunk_size=5, normalize=normalize, world=world)]


@pytest.mark.parametrize("normalize", [None, NORMALIZE])
@pytest.mark.parametrize(
    "options",
    [
        None,
        Augment(),
        Augment(crop_padding=0, flip="alternate"),
        Augment(crop_padding=3, crop_border="reflect", flip="none"),
        Augment(crop_padding=9),
    ],
)
def test_images_on_a_device_come_with_the_bits_of_those_in_memory(options, normalize, request):
    plain = read(options, normalize)
    request.getfixturevalue("on_a_device")
    found = read(options, normalize)
    assert len(found) == len(plain) == 23
    for (images, labels), (wanted, wanted_labels) in zip(found, plain, strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(labels, wanted_labels)
        assert (images.stride(), images.dtype, labels.dtype) == (wanted.stride(), wanted.dtype, torch.int64)


def test_images_stay_in_memory_where_there_is_no_gpu_or_too_little_of_it(monkeypatch):
    data = arrays(10)
    assert resident.resident(data, "cpu") is None
    assert resident.put(data, CPU, data.images.nbytes * 9) is None
    assert resident.put(data, CPU, data.images.nbytes * 11) is not None
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (0, 0))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert resident.resident(data, "cuda:1") is None
    assert asked == [torch.device("cuda:1")]


def test_images_too_small_to_be_mirrored_are_refused_on_a_device_as_well(on_a_device):
    with pytest.raises(ConfigError, match="crop_padding is 6 for images of 8x6"):
        read(Augment(crop_padding=6, crop_border="reflect"), None)
