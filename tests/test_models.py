import sys

import pytest
import torch
from torch import nn

from evenstep import models
from evenstep.errors import ConfigError
from evenstep.models import check_sizes


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write a module of the user's and return its name."""

    def write(text):
        (tmp_path / "user_models.py").write_text("import torch\nfrom torch import nn\n" + text)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "user_models", raising=False)
        return "user_models"

    yield write
    sys.modules.pop("user_models", None)


def test_net_is_the_network_of_the_article():
    net = models.Net()
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert shapes == {
        "conv1.weight": (64, 3, 3, 3),
        "conv1.bias": (64,),
        "conv2.weight": (128, 64, 3, 3),
        "conv2.bias": (128,),
        "linear.weight": (10, 128 * 8 * 8),
        "linear.bias": (10,),
    }
    assert models.num_parameters(net) == (157_578, 157_578)


def test_net_computes_what_the_article_says():
    torch.manual_seed(0)
    net = models.Net()
    images = torch.randn(3, 3, 32, 32)
    hidden = images
    for conv in (net.conv1, net.conv2):
        hidden = nn.functional.conv2d(hidden, conv.weight, conv.bias, padding=1)
        hidden = nn.functional.max_pool2d(hidden.clamp(min=0), 2)
    expected = hidden.reshape(3, -1) @ net.linear.weight.T + net.linear.bias
    torch.testing.assert_close(net(images), expected)


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize(("num_classes", "in_channels", "image_size"), [(10, 3, 32), (7, 1, 28), (2, 4, 9)])
def test_built_in_models_take_other_sizes(name, num_classes, in_channels, image_size):
    model = models.build(name, num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    logits = model(torch.randn(2, in_channels, image_size, image_size))
    assert logits.shape == (2, num_classes)
    logits.sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)


@pytest.mark.parametrize(("width", "expected"), [(32, 1_646_112), (64, 6_573_120)])
def test_resnet9_has_the_documented_number_of_parameters(width, expected):
    assert models.num_parameters(models.resnet9(width=width)) == (expected, expected)
    assert f"{expected:,}" in models.ResNet9.__doc__


def test_resnet9_has_nine_layers_with_weights():
    kinds = [type(m) for m in models.resnet9().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert kinds == [nn.Conv2d] * 8 + [nn.Linear]


def test_resnet9_computes_what_its_description_says():
    torch.manual_seed(0)
    model = models.resnet9(width=4).eval()

    def block(x, layers):
        conv, norm, _ = layers
        x = nn.functional.conv2d(x, conv.weight, padding=1)
        x = (x - norm.running_mean.view(-1, 1, 1)) / (norm.running_var.view(-1, 1, 1) + norm.eps).sqrt()
        return (x * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).clamp(min=0)

    def residual(x, module):
        return x + block(block(x, module.block1), module.block2)

    pool = nn.functional.max_pool2d
    images = torch.randn(2, 3, 32, 32)
    hidden = block(images, model.prep)
    hidden = residual(pool(block(hidden, model.layer1[0]), 2), model.layer1[2])
    hidden = pool(block(hidden, model.layer2[0]), 2)
    hidden = residual(pool(block(hidden, model.layer3[0]), 2), model.layer3[2])
    expected = pool(hidden, 4).flatten(1) @ model.linear.weight.T * 0.125
    torch.testing.assert_close(model(images), expected)


def test_resnet9_learns_to_tell_a_few_images_apart():
    torch.manual_seed(0)
    model = models.resnet9(width=8, num_classes=4)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert (model(images).argmax(1) == labels).all()


@pytest.mark.parametrize("name", models.MODELS)
def test_built_in_models_have_deterministic_backward_passes(name):
    # An operation without a deterministic form raises here.
    model = models.build(name, num_classes=10)
    torch.use_deterministic_algorithms(True)
    try:
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "size", "least"), [("net", 3, 4), ("resnet9", 7, 8), ("whitenet", 8, 9)])
def test_too_small_images_are_refused(name, size, least):
    with pytest.raises(
        ConfigError, match=f"{name} needs images of at least {least}x{least} pixels.*{size}x{size}"
    ):
        models.build(name, num_classes=10, image_size=size)
    models.build(name, num_classes=10, image_size=least)


def test_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown model 'resnet'. Did you mean 'resnet9'.*--model module"):
        models.build("resnet", num_classes=10)


RECORD = """
def record(**given):
    model = nn.Linear(1, 1)
    model.given = given
    return model
"""


@pytest.mark.parametrize(
    ("code", "given"),
    [
        ("def make(): return record()", {}),
        ("def make(num_classes): return record(num_classes=num_classes)", {"num_classes": 5}),
        (
            "def make(*, image_size, other=1): return record(image_size=image_size, other=other)",
            {"image_size": 16, "other": 1},
        ),
        (
            "def make(**options): return record(**options)",
            {"num_classes": 5, "in_channels": 1, "image_size": 16},
        ),
        (
            "class make(nn.Module):\n"
            "    def __init__(self, num_classes, in_channels=3):\n"
            "        super().__init__()\n"
            "        self.given = {'num_classes': num_classes, 'in_channels': in_channels}",
            {"num_classes": 5, "in_channels": 1},
        ),
    ],
)
def test_a_callable_gets_the_arguments_that_it_takes(user_module, code, given):
    name = user_module(RECORD + code)
    model = models.build(f"{name}:make", num_classes=5, in_channels=1, image_size=16)
    assert model.given == given


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make(): return 3", "returned an object of type int; expected a torch.nn.Module"),
        (
            "def make(depth, num_classes, *, heads): ...",
            r"requires the argument\(s\) depth, heads, but evenstep can only give num_classes, in_channels",
        ),
        ("def make(num_classes, /): ...", r"requires the argument\(s\) num_classes"),
        ("make = nn.Linear(1, 1)", "is a model that exists already.*differ from process to process"),
        ("make = 3", "is of type int, which cannot be called"),
        ("def other(): ...", "has no 'make'"),
    ],
)
def test_a_wrong_callable_is_refused(user_module, code, message):
    name = user_module(code)
    with pytest.raises(ConfigError, match=message):
        models.build(f"{name}:make", num_classes=5)


def test_an_error_inside_the_callable_keeps_its_type(user_module):
    name = user_module("def make(): return {}['lost']")
    with pytest.raises(KeyError, match="lost"):
        models.build(f"{name}:make", num_classes=5)


def test_num_parameters_counts_shared_ones_once_and_frozen_ones_apart():
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model["c"] = nn.Linear(2, 2)
    model["c"].bias.requires_grad_(False)
    assert models.num_parameters(model) == (16, 18)


def test_net_has_the_bits_of_relu_before_pooling():
    torch.manual_seed(0)
    net = models.Net()
    images = torch.rand(16, 3, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()

    def literal(x):
        x = torch.nn.functional.max_pool2d(torch.relu(net.conv1(x)), 2)
        x = torch.nn.functional.max_pool2d(torch.relu(net.conv2(x)), 2)
        return net.linear(x.flatten(1))

    found = []
    for forward in (net, literal):
        for leaf in (images, *net.parameters()):
            leaf.grad = None
        outputs = forward(images)
        torch.nn.functional.cross_entropy(outputs, torch.arange(16) % 10).backward()
        found.append([outputs, images.grad, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("net", (16, 32), "--image-sizes has 2 sizes, and the last layer of the model net takes one only"),
        ("whitenet", (8, 32), "whitenet needs images of at least 9x9 pixels, but these have 8x8"),
    ],
)
def test_sizes_that_a_model_cannot_take(name, sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_sizes(name, sizes)
    check_sizes(name, (32, 32))
    check_sizes("module:callable", sizes)


@pytest.mark.parametrize(
    ("source", "given", "taken", "assumed"),
    [
        ("def make(num_classes=4): ...", {}, {}, {}),
        ("def make(num_classes=4): ...", {"num_classes": 7}, {"num_classes": 7}, {}),
        ("def make(num_classes, in_channels=1): ...", {}, {"num_classes": 10}, {"num_classes": 10}),
        ("def make(in_channels, *, image_size): ...", {"image_size": 8}, None, {"in_channels": 3}),
        ("def make(**more): ...", {"image_size": 8}, {"image_size": 8}, {}),
        (None, {"num_classes": 7}, None, {"in_channels": 3, "image_size": 32}),
    ],
)
def test_what_nobody_knows_is_the_models_default_or_assumed(source, given, taken, assumed):
    if source is None:
        assert models.assumed("net", given) == assumed
        return
    made = {}
    exec(source, made)
    wanted = {"in_channels": 3, **given} if taken is None else taken
    everything = {name: given.get(name) for name in ("num_classes", "in_channels", "image_size")}
    assert models._accepted(made["make"], everything, "a:b") == wanted
    assert {name: wanted[name] for name in wanted.keys() - given.keys()} == assumed
