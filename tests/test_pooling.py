import pytest
import torch
from torch import nn

from evenstep.pooling import MaxPool2x2

LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(8, 8), (7, 6), (9, 5), (2, 2)])
def test_pooling_without_a_gradient_has_the_values_and_the_layout_of_torch(dtype, layout, size):
    # Few different values, so that many windows have their largest more than once.
    x = torch.randint(-3, 4, (3, 5, *size)).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    x[1, 2, 1, 1] = float("nan")
    with torch.inference_mode():
        own, wanted = MaxPool2x2()(x), nn.MaxPool2d(2)(x)
    assert own.shape == wanted.shape
    assert own.stride() == wanted.stride()
    assert own.dtype == wanted.dtype
    assert torch.equal(own.isnan(), wanted.isnan())
    assert own.isnan().sum() == 1
    assert torch.equal(own.nan_to_num(9), wanted.nan_to_num(9))


def test_pooling_with_a_gradient_is_the_layer_of_torch():
    x = torch.randint(-3, 4, (3, 5, 8, 8)).float().requires_grad_()
    MaxPool2x2()(x).square().sum().backward()
    own, x.grad = x.grad, None
    nn.MaxPool2d(2)(x).square().sum().backward()
    assert torch.equal(own, x.grad)
    assert MaxPool2x2()(x).grad_fn.name() == nn.MaxPool2d(2)(x).grad_fn.name()
