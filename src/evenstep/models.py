"""The built-in models, and how a model is found by name or as ``module:callable``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.config import MODELS
from evenstep.errors import ConfigError, did_you_mean
from evenstep.objects import import_object
from evenstep.pooling import MaxPool2x2
from evenstep.whitenet import WhiteNet

_LEAST: Mapping[str, int] = {"net": 4, "resnet9": 8, "whitenet": 9}
"""Side in pixels of the smallest images that leave something after the pooling layers."""

_ASSUMED: Mapping[str, int] = {"num_classes": 10, "in_channels": 3, "image_size": 32}
"""What a model is made for where the data do not say."""


class Net(nn.Module):
    """Two convolutions and one linear layer: 157,578 parameters for 3x32x32 images and 10 classes.

    conv 3->64 and conv 64->128, both 3x3 with padding 1, each followed by ReLU and 2x2 max-pooling; then one
    linear layer from the 128*8*8 values to the classes.

    Args:
        num_classes: number of outputs.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels, at least 4.

    Raises:
        ConfigError: the images are too small to be halved twice.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        _check_image_size("net", image_size)
        side = image_size // 4
        self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, kernel_size=3, padding=1)
        self.pool = MaxPool2x2()
        self.linear = nn.Linear(128 * side * side, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, float (n, num_classes), of images, float (n, in_channels, size, size)."""
        # ReLU after pooling, not before it: the largest of the values above zero is the same either way, to
        # the bit, forward and backward, and a quarter of the values has to pass through memory.
        hidden = torch.relu(self.pool(self.conv1(images)))
        hidden = torch.relu(self.pool(self.conv2(hidden)))
        logits: Tensor = self.linear(hidden.flatten(1))
        return logits


class Residual(nn.Module):
    """``x + block(block(x))``, where a block keeps the number of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block1 = _conv_block(channels, channels)
        self.block2 = _conv_block(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``, float (n, channels, height, width)."""
        out: Tensor = x + self.block2(self.block1(x))
        return out


class ResNet9(nn.Module):
    """The nine-layer residual network of David Page's DAWNBench entry, with its width as a parameter.

    prep (width) - layer 1 (2*width, pool, residual) - layer 2 (4*width, pool) - layer 3 (8*width, pool,
    residual) - global max-pooling - linear without bias, logits times 0.125. Every convolution is 3x3
    without bias, followed by batch normalisation and ReLU.

    The original has width 64 and 6,573,120 parameters, and reaches 94% on CIFAR-10 in 24 epochs. The
    default here is width 32: 1,646,112 parameters and about a quarter of the arithmetic, so that it can be
    trained on a CPU.

    Source: https://github.com/davidcpage/cifar10-fast (2018), "How to train your ResNet".

    Args:
        num_classes: number of outputs.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels, at least 8. The weights do not depend on it.
        width: channels of the first layer.

    Raises:
        ConfigError: the images are too small to be halved three times.
    """

    logit_scale = 0.125

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32, *, width: int = 32
    ) -> None:
        super().__init__()
        _check_image_size("resnet9", image_size)
        self.prep = _conv_block(in_channels, width)
        self.layer1 = nn.Sequential(_conv_block(width, 2 * width), MaxPool2x2(), Residual(2 * width))
        self.layer2 = nn.Sequential(_conv_block(2 * width, 4 * width), MaxPool2x2())
        self.layer3 = nn.Sequential(_conv_block(4 * width, 8 * width), MaxPool2x2(), Residual(8 * width))
        self.linear = nn.Linear(8 * width, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, float (n, num_classes), of images, float (n, in_channels, size, size)."""
        hidden = self.layer3(self.layer2(self.layer1(self.prep(images))))
        # amax, because the backward pass of adaptive max-pooling has no deterministic form on CUDA.
        logits: Tensor = self.linear(hidden.amax(dim=(2, 3))) * self.logit_scale
        return logits


def resnet9(num_classes: int = 10, in_channels: int = 3, image_size: int = 32, *, width: int = 32) -> ResNet9:
    """Return a :class:`ResNet9`; the arguments are its own."""
    return ResNet9(num_classes, in_channels, image_size, width=width)


def _conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


def check_sizes(spec: str, sizes: Sequence[int]) -> None:
    """Check that a built-in model takes images of all these sizes (``--image-sizes``), in pixels.

    Raises:
        ConfigError: it does not.
    """
    if spec == "net" and len(set(sizes)) > 1:
        raise ConfigError(
            f"--image-sizes has {len(set(sizes))} sizes, and the last layer of the model net takes one only. "
            "Give one size, or another model: --model resnet9 or --model whitenet."
        )
    for size in sizes:
        _check_image_size(spec, size)


def _check_image_size(model: str, image_size: int) -> None:
    least = _LEAST.get(model, 0)
    if image_size < least:
        raise ConfigError(
            f"the model {model} needs images of at least {least}x{least} pixels, but these have "
            f"{image_size}x{image_size}: its pooling layers would leave nothing. Use larger images, or your "
            "own model with --model module:callable."
        )


def build(
    spec: str,
    *,
    num_classes: int | None = None,
    in_channels: int | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """Return a new model.

    Args:
        spec: ``net``, ``resnet9``, ``whitenet``, or ``module:callable``. The callable (a function or a
            class) gets those of the arguments ``num_classes``, ``in_channels``, ``image_size``, by keyword,
            that it takes.
        num_classes: number of classes in the data; None if it is not known, see :func:`assumed`.
        in_channels: channels of the images; or None.
        image_size: height and width of the images in pixels; or None.

    Raises:
        ConfigError: the name is unknown, the callable cannot be found or cannot be called like this, or what
            it returns is not a ``torch.nn.Module``.
    """
    given = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    known = {name: _ASSUMED[name] if value is None else value for name, value in given.items()}
    if spec == "net":
        return Net(**known)
    if spec == "resnet9":
        return resnet9(**known)
    if spec == "whitenet":
        _check_image_size(spec, known["image_size"])
        return WhiteNet(known["num_classes"], known["in_channels"], known["image_size"])
    if ":" not in spec:
        raise ConfigError(
            f"unknown model {spec!r}.{did_you_mean(spec, MODELS)} Choose one of {', '.join(MODELS)}, or your "
            "own with --model module:callable."
        )
    make = import_object(spec, what="model", flag="--model")
    if isinstance(make, nn.Module):
        raise ConfigError(
            f"--model {spec} is a model that exists already, made when its module was imported: before the "
            "seed was set, so its weights would differ from process to process. Give a function or a class "
            "that makes the model."
        )
    if not callable(make):
        raise ConfigError(
            f"--model {spec} is of type {type(make).__name__}, which cannot be called. Give a function or a "
            "class that makes the model."
        )
    model = make(**_accepted(make, given, spec))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"--model {spec} returned an object of type {type(model).__name__}; expected a torch.nn.Module. "
            "Return the model from the function."
        )
    return model


def assumed(spec: str, given: Mapping[str, int | None]) -> dict[str, int]:
    """Return what a model is made for that nobody knows: ``num_classes`` 10 and the like.

    A callable of the user's is asked for its own default first.

    Args:
        spec: as for :func:`build`.
        given: what is known, as for :func:`build`; None, or no key, for what is not.
    """
    given = {name: given.get(name) for name in _ASSUMED}
    taken = _ASSUMED
    if spec not in MODELS:
        taken = _accepted(import_object(spec, what="model", flag="--model"), given, spec)
    return {name: value for name, value in taken.items() if given[name] is None}


def _accepted(make: Any, given: Mapping[str, int | None], spec: str) -> dict[str, int]:
    """Return those of the ``given`` arguments that ``make`` takes, and what it needs of those not known."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some callables of C extensions have no signature
        return {}
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {}
    for name, value in given.items():
        if value is not None and (takes_all or name in by_name):
            taken[name] = value
        elif value is None and name in by_name and by_name[name].default is inspect.Parameter.empty:
            taken[name] = _ASSUMED[name]
    without_default = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in taken
    ]
    if without_default:
        raise ConfigError(
            f"--model {spec} requires the argument(s) {', '.join(without_default)}, but evenstep can only "
            f"give {', '.join(given)}. Give them default values, or name a function that sets them."
        )
    return taken


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Return ``(trainable, total)``: how many numbers the parameters hold; shared ones count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
