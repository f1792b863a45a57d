import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import functional

from evenstep.data.augment import Augment, augment, resized, to_tensor
from evenstep.errors import ConfigError


def _images(n, height=6, width=5, channels=3, seed=0):
    # Never 0, so that the zeros of the padding can be told from pixels.
    return np.random.default_rng(seed).integers(1, 256, (n, height, width, channels), dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 10**6), max_size=6),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    padding=st.integers(0, 4),
    flip=st.sampled_from(["random", "alternate", "none"]),
    border=st.sampled_from(["zeros", "reflect"]),
)
def test_an_image_does_not_depend_on_the_batch(ids, seed, epoch, padding, flip, border):
    images, options = _images(len(ids)), Augment(crop_padding=padding, flip=flip, crop_border=border)
    arguments = {"seed": seed, "epoch": epoch, "options": options}
    together = augment(images, np.array(ids, dtype=np.int64), **arguments)
    assert together.shape == images.shape
    assert together.dtype == np.uint8
    for i, index in enumerate(ids):
        alone = augment(images[i : i + 1], np.array([index]), **arguments)
        np.testing.assert_array_equal(together[i], alone[0])


# Mirrored at the edge, some crops are equal to others that are flipped.
@pytest.mark.parametrize(
    ("border", "mode", "distinct", "most"), [("zeros", "constant", 50, 80), ("reflect", "reflect", 40, 140)]
)
def test_every_result_is_a_crop_of_the_padded_image_and_all_of_them_happen(border, mode, distinct, most):
    image, padding, n = _images(1)[0], 2, 2000
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode=mode)
    crops = {}
    for top in range(5):
        for left in range(5):
            window = padded[top : top + 6, left : left + 5]
            crops[window.tobytes()] = (top, left, False)
            crops[window[:, ::-1].tobytes()] = (top, left, True)
    results = augment(
        np.broadcast_to(image, (n, *image.shape)),
        np.arange(n),
        seed=0,
        epoch=0,
        options=Augment(padding, crop_border=border),
    )
    found = [crops[result.tobytes()] for result in results]
    counts = [found.count(crop) for crop in crops.values()]
    assert len(counts) == distinct
    assert min(counts) > 10  # 40 each are expected
    assert max(counts) < most


def test_no_crop_and_no_flip_change_nothing():
    images = _images(4)
    result = augment(images, np.arange(4), seed=0, epoch=0, options=Augment(0, "none"))
    np.testing.assert_array_equal(result, images)
    assert not np.shares_memory(result, images)


def test_alternating_flips_show_every_image_both_ways_in_two_epochs():
    images, ids, options = _images(64), np.arange(64), Augment(0, "alternate")
    epochs = [augment(images, ids, seed=0, epoch=epoch, options=options) for epoch in range(3)]
    is_mirrored = [(result != images).any(axis=(1, 2, 3)) for result in epochs]
    np.testing.assert_array_equal(epochs[0][is_mirrored[0]], images[is_mirrored[0]][:, :, ::-1])
    np.testing.assert_array_equal(is_mirrored[1], ~is_mirrored[0])
    np.testing.assert_array_equal(is_mirrored[2], is_mirrored[0])
    assert 16 < is_mirrored[0].sum() < 48
    other = augment(images, ids, seed=1, epoch=0, options=options)
    assert not np.array_equal(other, epochs[0])


def test_an_image_that_is_too_small_to_be_mirrored_at_its_edge():
    with pytest.raises(
        ConfigError, match="crop_padding is 5 for images of 6x5 pixels, which have no more than 4"
    ):
        augment(_images(1), np.arange(1), seed=0, epoch=0, options=Augment(5, crop_border="reflect"))


def test_epochs_and_seeds_differ():
    images, ids = _images(8), np.arange(8)
    first = augment(images, ids, seed=0, epoch=0, options=Augment())
    assert not np.array_equal(first, augment(images, ids, seed=0, epoch=1, options=Augment()))
    assert not np.array_equal(first, augment(images, ids, seed=1, epoch=0, options=Augment()))


def test_to_tensor_has_torchvisions_bits():
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    images = np.concatenate([images, _images(2, 16, 16)])
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    plain, normalised = to_tensor(images), to_tensor(images, mean, std)
    assert plain.dtype == torch.float32
    assert plain.is_contiguous(memory_format=torch.channels_last)
    for i, image in enumerate(images):
        expected = functional.to_tensor(image)
        assert torch.equal(plain[i], expected)
        assert torch.equal(normalised[i], functional.normalize(expected, mean, std))


def test_negative_padding():
    with pytest.raises(ConfigError, match="crop_padding is -1; it must be 0"):
        Augment(-1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"flip": True}, "flip is True. It must be one of random, alternate, none"),
        ({"flip": "alternating"}, "flip is 'alternating'. Did you mean 'alternate'?"),
        ({"crop_border": "reflection"}, "crop_border is 'reflection'. Did you mean 'reflect'?"),
    ],
)
def test_unknown_words(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Augment(**wrong)


def test_a_smaller_image_keeps_the_memory_format():
    images = torch.rand(2, 3, 8, 8)
    assert resized(images, 4).is_contiguous()
    last = images.contiguous(memory_format=torch.channels_last)
    assert resized(last, 4).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(resized(images, 4), resized(last, 4))
