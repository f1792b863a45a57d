"""A small network that learns fast: the first layer is computed from the images, not learned."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.pooling import MaxPool2x2

_KERNEL = 2
_EPS = 5e-4
"""Added to the variances, so that directions without any are not blown up."""
_LOGIT_SCALE = 1 / 72
"""Chosen so that biases and the last layer can share one learning rate."""


class Block(nn.Module):
    """conv, 2x2 max-pool, norm, GELU, conv, norm, GELU: twice as small, ``out_channels`` wide.

    The norms learn a bias but no scale, since the next convolution could undo it, and their running
    statistics follow quickly, since there are few steps. Convolutions begin by passing their input on
    (dirac), in as many channels as it has.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels)
        self.pool = MaxPool2x2()
        self.norm1 = _norm(out_channels)
        self.conv2 = _conv(out_channels, out_channels)
        self.norm2 = _norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, out_channels, height // 2, width // 2) of (n, in_channels, height, width)."""
        hidden = functional.gelu(self.norm1(self.pool(self.conv1(x))))
        return functional.gelu(self.norm2(self.conv2(hidden)))


class WhiteNet(nn.Module):
    """Whitening convolution, three blocks of two convolutions, global max-pooling, one linear layer.

    After the network of Keller Jordan's airbench94 (arXiv 2404.00498, "94% on CIFAR-10 in 3.29 Seconds on a
    Single GPU", and https://github.com/KellerJordan/cifar10-airbench), with its widths. The weights are in
    channels_last memory format.

    The weights of the first layer are not trained. They are the eigenvectors of small patches of the training
    images, each divided by its standard deviation, once as they are and once negated: with them neighbouring
    pixels, which are much alike, become values that are not correlated. :meth:`init_from_images` computes
    them, and ``evenstep train`` calls it before the first step.

    Args:
        num_classes: number of outputs.
        in_channels: channels of the images.
        image_size: not used: any size from 9 pixels on will do, and it may change from epoch to epoch.
        widths: channels of the three blocks.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        *,
        widths: tuple[int, int, int] = (64, 256, 256),
    ) -> None:
        super().__init__()
        width = 2 * in_channels * _KERNEL**2
        self.whiten = nn.Conv2d(in_channels, width, _KERNEL)
        self.whiten.weight.requires_grad = False
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        ends = (width, *widths)
        self.blocks = nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(ends)))
        self.linear = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.linear.weight, std=1 / (widths[-1] * _LOGIT_SCALE))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, float (n, num_classes), of images, float (n, in_channels, size, size)."""
        hidden = self.blocks(functional.gelu(self.whiten(images)))
        logits: Tensor = self.linear(hidden.amax(dim=(2, 3))) * _LOGIT_SCALE
        return logits

    def init_from_images(self, images: Tensor) -> None:
        """Compute the weights of the first layer. The same images give the same bits.

        Args:
            images: float (n, in_channels, height, width), prepared as for training; a few hundred will do.
        """
        n = images.shape[1] * _KERNEL**2
        columns = functional.unfold(images.float(), _KERNEL).transpose(0, 1).reshape(n, -1)
        variances, directions = torch.linalg.eigh(columns @ columns.T / columns.shape[1])
        # An eigenvector is one only up to its sign, which both halves together do not depend on.
        filters = (directions / torch.sqrt(variances + _EPS)).T.reshape(self.whiten.weight[:n].shape)
        with torch.no_grad():
            self.whiten.weight.copy_(torch.cat([filters, -filters]))


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:in_channels])
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad = False
    return norm
