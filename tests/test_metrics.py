import copy
import hashlib
import pickle

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenstep import metrics, models
from evenstep.errors import ConfigError


def model_of(outputs):
    """Return a model whose output is ``outputs`` whatever its input."""

    class Fixed(nn.Module):
        def forward(self, inputs):
            return outputs

    return Fixed()


# Loss and accuracy


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_mean_over_the_samples(label_smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 4), torch.tensor([0, 3, 1, 2, 2, 0])
    loss = metrics.cross_entropy(label_smoothing)
    value = loss(model_of(logits), (None, labels))
    log_p = logits.double().log_softmax(1)
    target = torch.eye(4, dtype=torch.double)[labels] * (1 - label_smoothing) + label_smoothing / 4
    assert value.shape == ()
    assert value.item() == pytest.approx(-(target * log_p).sum(1).mean().item(), rel=1e-5)


def test_cross_entropy_hands_the_inputs_to_the_model_and_gradients_back():
    torch.manual_seed(0)
    model, images, labels = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    metrics.cross_entropy()(model, (images, labels)).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    nn.functional.cross_entropy(twin(images), labels).backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)


def test_cross_entropy_can_be_sent_to_another_process():
    loss = pickle.loads(pickle.dumps(metrics.cross_entropy(0.2)))
    batch = (None, torch.tensor([1, 0]))
    model = model_of(torch.randn(2, 3))
    assert torch.equal(loss(model, batch), metrics.cross_entropy(0.2)(model, batch))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_labels_may_be_any_whole_numbers(dtype):
    logits = torch.randn(3, 4)
    value = metrics.cross_entropy()(model_of(logits), [None, torch.tensor([0, 3, 1], dtype=dtype)])
    assert torch.equal(value, nn.functional.cross_entropy(logits, torch.tensor([0, 3, 1])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_outputs_get_a_float32_loss(dtype):
    logits, labels = torch.randn(3, 4).to(dtype), torch.tensor([0, 3, 1])
    value = metrics.cross_entropy()(model_of(logits), (None, labels))
    assert value.dtype is torch.float32
    assert torch.equal(value, nn.functional.cross_entropy(logits.float(), labels))
    assert metrics.classification(model_of(logits), (None, labels))["loss"].dtype is torch.float32


def test_classification_gives_values_per_sample():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 3.0]])
    labels = torch.tensor([0, 1, 2, 1])
    values = metrics.classification(model_of(logits), (None, labels))
    assert set(values) == {"loss", "accuracy"}
    # Of equal logits the first counts.
    assert values["accuracy"].tolist() == [1.0, 1.0, 0.0, 0.0]
    expected = [-logits.double().log_softmax(1)[i, label].item() for i, label in enumerate(labels)]
    assert values["loss"].tolist() == pytest.approx(expected, rel=1e-6)
    assert all(v.dtype is torch.float32 for v in values.values())


@pytest.mark.parametrize("function", [metrics.cross_entropy(), metrics.classification])
@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (
            torch.zeros(2, 5),
            torch.tensor([1, 9]),
            "the label of row 1 of the batch is 9, and the model gives 5 outputs, for the labels 0 to 4",
        ),
        (torch.zeros(3, 5), torch.tensor([0, -1, 9]), "the label of row 1 of the batch is -1, and the model"),
        (
            (torch.zeros(2, 5),),
            torch.tensor([0, 1]),
            "the model gives an object of type tuple; expected float",
        ),
        (torch.zeros(2, 5, dtype=torch.long), torch.tensor([0, 1]), "a tensor of int64 and shape \\(2, 5\\)"),
        (torch.zeros(2, 5, 3), torch.tensor([0, 1]), r"shape \(2, 5, 3\); expected float logits"),
        (torch.zeros(2, 5), torch.zeros(2), r"the labels are a tensor of float32 and shape \(2,\), but"),
        (torch.zeros(2, 5), torch.tensor([0, 1, 2]), r"shape \(3,\).*expected one.*shape \(2,\)"),
        (torch.zeros(2, 5), [0, 1], "the labels are an object of type list"),
    ],
)
def test_outputs_and_labels_that_do_not_fit_are_refused(function, outputs, labels, message):
    with pytest.raises(ConfigError, match=message):
        function(model_of(outputs), (None, labels))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 3), r"the batch is a Tensor; .* takes \(inputs, labels\)"),
        ((1, 2, 3), "the batch is a tuple of 3 items"),
        ({"image": 1, "label": 2}, "the batch is a dict of 2 items"),
    ],
)
def test_a_batch_of_another_form_is_refused(batch, message):
    with pytest.raises(ConfigError, match=message):
        metrics.cross_entropy()(model_of(torch.zeros(2, 2)), batch)


def test_every_batch_on_the_cpu_is_checked():
    loss, model = metrics.cross_entropy(), model_of(torch.zeros(2, 5))
    loss(model, (None, torch.tensor([0, 4])))
    with pytest.raises(ConfigError, match="the label of row 1 of the batch is 5"):
        loss(model, (None, torch.tensor([0, 5])))


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0])
def test_a_label_smoothing_out_of_range_is_refused(label_smoothing):
    with pytest.raises(ConfigError, match=r"label_smoothing is .*--label-smoothing 0.1"):
        metrics.cross_entropy(label_smoothing)


# The hash of the weights


def independent_sha256(arrays):
    """Hash NumPy arrays as the documentation says, without torch."""
    sha = hashlib.sha256()
    for key in sorted(arrays):
        array = arrays[key]
        sha.update(key.encode("utf-8"))
        sha.update(array.dtype.name.encode() + str(array.shape).encode())
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes(order="C"))
    return sha.hexdigest()


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.tuples(
            st.sampled_from(["float32", "float64", "float16", "int64", "int32", "uint8", "bool"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=4,
    )
)
def test_the_hash_equals_an_independent_one(entries):
    rng = np.random.default_rng(0)
    arrays = {key: np.asarray(rng.integers(0, 2, shape)).astype(t) for key, (t, shape) in entries.items()}
    tensors = {key: torch.from_numpy(array.copy()).reshape(array.shape) for key, array in arrays.items()}
    assert metrics.weights_sha256(tensors) == independent_sha256(arrays)


def test_the_hash_of_a_model_can_be_recomputed_from_its_file(tmp_path):
    # The lines in the documentation of weights_sha256.
    model = models.Net()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    sha = hashlib.sha256()
    for key, a in sorted(safetensors.numpy.load_file(tmp_path / "model.safetensors").items()):
        sha.update(f"{key}{a.dtype}{a.shape}".encode() + a.tobytes())
    assert metrics.weights_sha256(model.state_dict()) == sha.hexdigest()


def test_the_hash_of_known_bytes():
    tensors = {"b": torch.tensor(1.0, dtype=torch.bfloat16), "a": torch.tensor([[1, 2]], dtype=torch.int16)}
    text = b"aint16(1, 2)" + b"\x01\x00\x02\x00" + b"bbfloat16()" + b"\x80\x3f"
    assert metrics.weights_sha256(tensors) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_sees_values_and_not_memory(dtype):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 5).to(dtype)
    same = [
        images.to(memory_format=torch.channels_last),
        images.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([images, images])[1],
        nn.Parameter(images),
        images.flip(0).flip(0),
    ]
    expected = metrics.weights_sha256({"w": images})
    assert [metrics.weights_sha256({"w": other}) for other in same] == [expected] * 5


def test_the_hash_takes_single_values_with_a_stride():
    one = torch.tensor([5.0, 6.0, 7.0])[2::3]
    assert metrics.weights_sha256({"w": one}) == metrics.weights_sha256({"w": torch.tensor([7.0])})


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(2, 3, dtype=torch.int32)},
        {"w": -torch.zeros(2, 3)},
        {},
    ],
    ids=["key", "shape", "dtype", "one bit", "empty"],
)
def test_the_hash_changes_with_anything_that_counts(other):
    assert metrics.weights_sha256(other) != metrics.weights_sha256({"w": torch.zeros(2, 3)})


def test_the_hash_does_not_depend_on_the_order_of_the_keys():
    a, b = torch.zeros(2), torch.ones(3)
    assert metrics.weights_sha256({"a": a, "b": b}) == metrics.weights_sha256({"b": b, "a": a})


# Speed


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run_meter(durations, samples=10, **options):
    clock = Clock()
    meter = metrics.RateMeter(clock=clock, **options)
    for duration in durations:
        clock.now += duration
        meter.update(samples)
    return meter, clock


def test_the_rate_leaves_the_first_steps_out():
    meter, _ = run_meter([5, 3, 2, 0.5, 0.5, 1.0], warmup_steps=3)
    assert meter.per_s == pytest.approx(30 / 2.0)


def test_the_rate_counts_all_steps_while_there_are_only_warm_up_steps():
    meter, _ = run_meter([3, 1], warmup_steps=3)
    assert meter.per_s == pytest.approx(20 / 4)


def test_there_is_no_rate_before_the_first_step():
    meter, _ = run_meter([])
    assert (meter.per_s, meter.current_per_s) == (None, None)


def test_a_clock_that_stands_still_gives_no_rate():
    meter, _ = run_meter([0, 0])
    assert (meter.per_s, meter.current_per_s) == (None, None)


def test_the_current_rate_is_that_of_the_last_update():
    meter, _ = run_meter([50, 1, 4])
    assert meter.current_per_s == pytest.approx(10 / 4)
    meter.update(0)
    assert meter.current_per_s is None


def test_a_pause_does_not_count():
    meter, clock = run_meter([1, 1], warmup_steps=0)
    clock.now += 1000
    meter.restart_clock()
    clock.now += 1
    meter.update(10)
    assert meter.per_s == pytest.approx(10)
