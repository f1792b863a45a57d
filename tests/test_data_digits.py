import importlib.resources

import numpy as np

from evenstep.data import digits
from evenstep.data.cache import content_fingerprint, statistics


def test_the_data_set():
    train, test = digits.load()
    assert train.images.shape == (1442, 32, 32, 3)
    assert test.images.shape == (355, 32, 32, 3)
    assert train.classes == tuple("0123456789")
    assert (np.bincount(train.labels) + np.bincount(test.labels)).sum() == 1797
    assert np.bincount(test.labels).min() >= 34
    for split in (train, test):
        assert split.fingerprint == content_fingerprint(split.images, split.labels)
        assert (split.mean, split.std) == statistics([train.images])
    # The same bits everywhere and for ever: results of runs are compared.
    assert train.fingerprint == "e541d9a5054ecf988972864004fd8dfedf4432b59a000e0e44731b00169cc7b8"
    assert test.fingerprint == "aa0f1ec9504d35bcba58c75d0fb9b7fe6ec3b6c12e6599e1f0701156dab458d9"


def test_the_file_is_small():
    assert importlib.resources.files("evenstep.data").joinpath("digits.npz").stat().st_size < 100_000


def test_enlarging_is_bilinear():
    image = np.arange(64, dtype=np.int64).reshape(1, 8, 8) % 17
    result = digits.enlarge(image)
    assert result.dtype == np.uint8
    places = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)
    rows = np.stack([np.interp(places, np.arange(8), row) for row in image[0]])
    expected = np.stack([np.interp(places, np.arange(8), column) for column in rows.T]).T * 255 / 16
    assert abs(result[0, :, :, 0] - expected).max() <= 0.5
    np.testing.assert_array_equal(result[..., 0], result[..., 2])
    assert digits.enlarge(np.full((1, 8, 8), 16)).min() == 255
