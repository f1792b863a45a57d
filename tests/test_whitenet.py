import pytest
import torch
from torch import nn

from evenstep.whitenet import WhiteNet


def pictures(n=200):
    """Noise in which neighbouring pixels and channels are much alike."""
    noise = torch.randn(n, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    smooth = nn.functional.avg_pool2d(noise, 9, stride=1) * 9
    return smooth + smooth.roll(1, dims=1)


def test_whitened_patches_are_not_correlated():
    images, model = pictures(), WhiteNet()
    model.init_from_images(images)
    with torch.no_grad():
        values = nn.functional.conv2d(images, model.whiten.weight)
    half = values.shape[1] // 2
    assert torch.equal(values[:, :half], -values[:, half:])
    flat = values[:, :half].transpose(0, 1).flatten(1)
    covariance = flat @ flat.T / flat.shape[1]
    # What has far more variance than _EPS ends with variance 1.
    largest = covariance[-4:, -4:]
    torch.testing.assert_close(largest, torch.eye(4), atol=0.02, rtol=0)
    off = covariance - torch.diag(covariance.diagonal())
    assert off.abs().max() < 1e-3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_whitening_has_the_same_bits_whenever_it_is_computed(layout):
    def weight(images):
        model = WhiteNet()
        model.init_from_images(images)
        return model.whiten.weight.detach().clone()

    images = pictures().to(memory_format=layout)
    assert torch.equal(weight(images), weight(images.clone()))
    assert not torch.equal(weight(images), weight(images[:100]))


def test_it_computes_what_its_description_says():
    torch.manual_seed(0)
    model = WhiteNet(widths=(4, 6, 5)).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    images = torch.randn(2, 3, 32, 32)

    def norm(x, layer):
        shape = (-1, 1, 1)
        x = (x - layer.running_mean.view(shape)) / (layer.running_var.view(shape) + layer.eps).sqrt()
        return nn.functional.gelu(x * layer.weight.view(shape) + layer.bias.view(shape))

    hidden = nn.functional.conv2d(images, model.whiten.weight, model.whiten.bias)
    hidden = nn.functional.gelu(hidden)
    assert hidden.shape == (2, 24, 31, 31)
    for block in model.blocks:
        hidden = nn.functional.conv2d(hidden, block.conv1.weight, padding=1)
        hidden = norm(nn.functional.max_pool2d(hidden, 2), block.norm1)
        hidden = norm(nn.functional.conv2d(hidden, block.conv2.weight, padding=1), block.norm2)
    assert hidden.shape == (2, 5, 3, 3)
    expected = hidden.flatten(2).amax(2) @ model.linear.weight.T / 72
    torch.testing.assert_close(model(images), expected)


def test_only_the_whitening_and_the_scales_of_the_norms_are_frozen():
    frozen = {name for name, p in WhiteNet().named_parameters() if not p.requires_grad}
    norms = {f"blocks.{i}.norm{j}.weight" for i in range(3) for j in (1, 2)}
    assert frozen == {"whiten.weight", *norms}


def test_convolutions_begin_by_passing_their_input_on():
    conv = WhiteNet().blocks[1].conv1
    images = torch.randn(1, 64, 5, 5)
    torch.testing.assert_close(conv(images)[:, :64], images)
