import numpy as np
import pytest

from evenstep import jobs
from evenstep.data.cache import ImageArrays
from evenstep.data.sources import Source
from evenstep.flat import from_flat

DECODED = ImageArrays(np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, np.int64))


@pytest.mark.parametrize(
    ("train", "options", "memory_format"),
    [
        (DECODED, {}, None),  # in channels_last as it is
        (DECODED, {"memory_format": "contiguous"}, "contiguous"),
        ([1, 2], {}, "channels_last"),
        ([1, 2], {"model": "own_models:NormNet"}, None),  # whose forward may need contiguous images
        ([1, 2], {"model": "own_models:NormNet", "memory_format": "channels_last"}, "channels_last"),
        ([1, 2], {"memory_format": "contiguous"}, "contiguous"),
    ],
)
def test_the_memory_format_follows_from_data_and_model(train, options, memory_format):
    source = Source("some", train, None, None)
    assert jobs._loading(from_flat(options), source)["memory_format"] == memory_format
