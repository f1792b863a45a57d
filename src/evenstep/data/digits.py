"""The handwritten digits inside the package, so that everything runs without a network.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository (1998), https://doi.org/10.24432/C50P49, licence CC BY 4.0. The file holds its 1,797 test images of
8x8 pixels with the values 0 to 16, as scikit-learn distributes them. Changed here: enlarged to 32x32 pixels
and three equal channels, values 0 to 255.
"""

from __future__ import annotations

import importlib.resources

import numpy as np

from evenstep.data.cache import ImageArrays

_TEST_EVERY = 5
# Of the file inside the package, which never changes: to compute them takes as long as all the rest, and
# every process does the rest again after each restart.
_MEAN, _STD = 0.3051058063547021, 0.32381554068099777
_FINGERPRINTS = {
    "train": "e541d9a5054ecf988972864004fd8dfedf4432b59a000e0e44731b00169cc7b8",
    "test": "aa0f1ec9504d35bcba58c75d0fb9b7fe6ec3b6c12e6599e1f0701156dab458d9",
}


def load() -> tuple[ImageArrays, ImageArrays]:
    """Return (train, test): 1,442 and 355 images, uint8 32x32x3. Every fifth of a class is a test image."""
    resource = importlib.resources.files("evenstep.data").joinpath("digits.npz")
    with importlib.resources.as_file(resource) as path, np.load(path) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    # Of each class, because the file repeats 0 to 9 in long stretches, which every fifth image would follow.
    is_test = np.zeros(len(images), dtype=bool)
    for digit in range(10):
        is_test[np.flatnonzero(labels == digit)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    classes = tuple(str(digit) for digit in range(10))
    train, test = (
        ImageArrays(
            images=enlarge(images[rows]),
            labels=labels[rows],
            classes=classes,
            mean=(_MEAN,) * 3,
            std=(_STD,) * 3,
            fingerprint=_FINGERPRINTS[split],
        )
        for split, rows in (("train", ~is_test), ("test", is_test))
    )
    return train, test


def enlarge(images: np.ndarray) -> np.ndarray:
    """Return images (n, 8, 8) with values 0 to 16 as uint8 (n, 32, 32, 3) with values 0 to 255.

    Bilinear, in whole numbers, so that the result has the same bits everywhere.
    """
    # Pixel i of 32 lies at (i + 0.5) / 4 - 0.5 = (2 * i - 3) / 8 of 8: weights in eighths.
    eighths = np.clip(2 * np.arange(32) - 3, 0, 56)
    below, part = eighths // 8, eighths % 8
    # float32, because numpy multiplies matrices of whole numbers slowly; these are exact in it up to 2**24.
    weights = np.zeros((32, 8), dtype=np.float32)
    weights[np.arange(32), below] += 8 - part
    weights[np.arange(32), np.minimum(below + 1, 7)] += part
    sums = (weights @ images.astype(np.float32) @ weights.T).astype(np.int32)  # 64ths of the value
    grey = ((sums * 255 + 512) // (64 * 16)).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=3)
