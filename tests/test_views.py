import re

import pytest
import torch
from torch import nn

from evenstep.data.augment import resized
from evenstep.errors import ConfigError
from evenstep.views import Views, at_size, epoch_of_last_step, evaluated


class LeftPixel(nn.Module):
    def forward(self, images):
        return images[:, :, 0, 0]


def test_flip_gives_the_mean_of_the_logits_of_both_views():
    images = torch.arange(24.0).view(2, 3, 2, 2)
    model = LeftPixel()
    expected = (images[:, :, 0, 0] + images[:, :, 0, 1]) / 2
    assert torch.equal(evaluated(model, "flip")(images), expected)
    assert evaluated(model, "none") is model


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shift_counts_the_image_half_and_two_shifted_ones_a_quarter_each(layout):
    images = torch.arange(2 * 3 * 16.0).view(2, 3, 4, 4).square().to(memory_format=layout)
    seen = []

    class Corner(nn.Module):
        def forward(self, images):
            seen.append(images.is_contiguous(memory_format=layout))
            return images[:, :, 0, 0]

    # Shifted down and right by one pixel, the corner shows what is mirrored at the edge: pixel (1, 1).
    # Mirrored, the corner is the last of the row: (0, 3) in the image, (1, 2) in the first, (1, 2) in the
    # other shifted one.
    center = (images[:, :, 0, 0] + images[:, :, 0, 3]) / 2
    down = (images[:, :, 1, 1] + images[:, :, 1, 2]) / 2
    up = (images[:, :, 1, 1] + images[:, :, 1, 2]) / 2
    torch.testing.assert_close(evaluated(Corner(), "flip_shift")(images), center / 2 + down / 4 + up / 4)
    assert seen == [True] * 6


@pytest.mark.parametrize(("inputs", "text"), [(torch.zeros(2, 3), "shape (2, 3)"), (["a"], "list")])
def test_views_need_images(inputs, text):
    with pytest.raises(
        ConfigError,
        match=f"--tta shows a model several views of an image, and these inputs have {re.escape(text)}",
    ):
        Views(LeftPixel())(inputs)


def test_every_pixel_of_a_smaller_image_is_the_mean_of_what_it_covers():
    images = torch.arange(2 * 3 * 16.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    half = resized(images, 2)
    assert half.is_contiguous(memory_format=torch.channels_last)
    expected = images.reshape(2, 3, 2, 2, 2, 2).mean(dim=(3, 5))
    torch.testing.assert_close(half, expected)
    assert resized(images, 4) is images


def test_the_size_is_that_of_the_epoch_and_the_last_one_goes_on_to_the_end():
    epochs = iter(range(4))
    measure = at_size(lambda model, batch: (model(batch[0]).shape[2], batch[1]), (2, 4), lambda: next(epochs))
    images = torch.zeros(1, 3, 4, 4)
    assert [measure(nn.Identity(), (images, "labels")) for _ in range(4)] == [
        *((size, "labels") for size in (2, 4, 4, 4))
    ]


def test_without_sizes_a_batch_may_be_anything():
    assert at_size(lambda model, batch: batch, (), lambda: 0)(nn.Identity(), "any") == "any"


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"image": 1, "label": 2}, "a dict with the keys image, label"),
        ((1, 2, 3), "a tuple of 3"),
        (torch.zeros(2, 3, 4, 4), "a tensor of float32 and shape (2, 3, 4, 4)"),
        ((torch.zeros(2, 5), 1), "pairs of which the first is a tensor of float32 and shape (2, 5)"),
        (
            [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), 1],
            "pairs of which the first is a tensor of uint8 and shape (2, 3, 4, 4)",
        ),
        (("text", 1), "pairs of which the first is an object of type str"),
    ],
)
def test_a_batch_without_images_to_scale_is_refused(batch, found):
    message = (
        f"--image-sizes scales images, and a batch of this Dataset is {found}; expected (images, labels)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*Leave out --image-sizes"):
        at_size(lambda model, batch: 0, (2,), lambda: 0)(nn.Identity(), batch)


def test_an_evaluation_belongs_to_the_epoch_of_the_step_before_it():
    assert [epoch_of_last_step(*at) for at in ((0, 0), (0, 1), (1, 0), (1, 5), (2, 0))] == [0, 0, 0, 1, 1]
