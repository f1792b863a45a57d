import collections
import enum

import numpy as np
import pytest
import torch
from torch import nn

from evenstep.errors import ConfigError
from evenstep.storable import plain_values, plain_weights


class Color(enum.IntEnum):
    RED = 3


Point = collections.namedtuple("Point", "x y")


def test_plain_values_are_kept_as_they_are():
    value = {"a": [1, -2.5, True, None, "text", b"\xff"], 3: (1, (2,)), "t": torch.float16, 1.5: {}}
    assert plain_values(value, "training") == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (Point(1, 2), (1, 2)),
        (torch.Size([1, 2]), (1, 2)),
        (Color.RED, 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
    ],
)
def test_relatives_of_plain_types_become_plain(value, expected):
    found = plain_values([value], "training")[0]
    assert found == expected
    assert type(found) is type(expected)


def test_tensors_are_stored_without_the_memory_that_they_view():
    big = torch.arange(1000.0)
    found = plain_values({"a": big[3:5], "b": nn.Parameter(torch.ones(2)), "c": torch.tensor(4)}, "training")
    assert found["a"].tolist() == [3, 4]
    assert found["a"].untyped_storage().nbytes() == 8
    assert type(found["b"]) is torch.Tensor
    assert not found["b"].requires_grad
    assert found["c"].item() == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"optimizer": {"state": [0, {"f": test_plain_values_are_kept_as_they_are}]}},
            r"cannot save training\['optimizer'\]\['state'\]\[1\]\['f'\]: it is of type builtins.function",
        ),
        ({"rng": np.zeros(3)}, r"training\['rng'\].*numpy.ndarray.*Use torch.from_numpy"),
        ([{1, 2}], r"training\[0\]: it is of type builtins.set"),
        ({"x": 1j}, r"training\['x'\]: it is of type builtins.complex"),
        ({"x": nn.Linear(1, 1)}, r"training\['x'\]: it is of type torch.nn.modules.linear.Linear"),
        ({"x": torch.zeros(2, device="meta")}, r"training\['x'\]: it is a meta tensor"),
        ({"x": torch.eye(2).to_sparse()}, r"training\['x'\]: it is a torch.sparse_coo tensor"),
        ({"a": {(1, 2): 3}}, r"cannot save training\['a'\]: it has the key \(1, 2\)"),
    ],
)
def test_other_objects_are_refused_with_their_place(value, message):
    with pytest.raises(ConfigError, match=message):
        plain_values(value, "training")


def test_json_only_refuses_what_json_cannot_hold():
    assert plain_values({"a": (1, np.float32(2))}, "meta", json_only=True) == {"a": [1, 2.0]}
    with pytest.raises(ConfigError, match=r"meta\['a'\]\[0\]: .*holds only JSON values"):
        plain_values({"a": [torch.zeros(1)]}, "meta", json_only=True)
    with pytest.raises(ConfigError, match=r"meta: it has the key 3, .*expected a string\."):
        plain_values({3: 1}, "meta", json_only=True)


def test_weights_that_share_a_tensor_are_kept_once():
    weight = nn.Parameter(torch.randn(3, 3))
    tensors, aliases = plain_weights({"in": weight, "out": weight.detach(), "other": weight.detach().clone()})
    assert list(tensors) == ["in", "other"]
    assert aliases == {"out": "in"}


def test_different_views_of_one_memory_are_kept_apart():
    base = torch.arange(6.0)
    views = {"whole": base, "part": base[:3], "matrix": base.view(2, 3), "turned": base.view(2, 3).t()}
    tensors, aliases = plain_weights(views)
    assert aliases == {}
    assert all(torch.equal(tensors[key], views[key]) and tensors[key].is_contiguous() for key in views)
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 4
    assert tensors["part"].untyped_storage().nbytes() == 12


def test_empty_tensors_are_not_taken_for_shared_ones():
    tensors, aliases = plain_weights({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 3)})
    assert aliases == {}
    assert [tuple(t.shape) for t in tensors.values()] == [(0,), (0,), (0, 3)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"epoch": 3}, r"model\['w'\]: it is of type builtins.dict, and the weights of a checkpoint are"),
        (torch.eye(2).to_sparse(), r"model\['w'\]: it is a torch.sparse_coo tensor"),
        (torch.zeros(1, device="meta"), r"model\['w'\]: it is a meta tensor"),
    ],
)
def test_weights_that_are_no_dense_tensors_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        plain_weights({"w": value})
