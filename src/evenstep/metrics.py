"""Loss and metrics of a classifier, the hash of its weights, and the speed of a run."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.errors import ConfigError

Loss = Callable[[nn.Module, Any], Tensor]
"""A loss function: ``(model, batch) -> scalar``, the mean over the samples of the batch."""


class LabelError(ConfigError):
    """A label is not one of the model's outputs.

    Attributes:
        row: the sample's place in the batch, from 0.
        label: its label.
        num_classes: how many outputs the model gives.
    """

    def __init__(self, row: int, label: int, num_classes: int) -> None:
        self.row, self.label, self.num_classes = row, label, num_classes
        super().__init__(self.of(f"row {row} of the batch"))

    def of(self, sample: str) -> str:
        """Return the message, for a sample that is named."""
        return (
            f"the label of {sample} is {self.label}, and the model gives {self.num_classes} outputs, for the "
            f"labels 0 to {self.num_classes - 1}. Correct the labels of --data, or build --model with as "
            "many outputs as the data have classes: its callable may take num_classes, and a Dataset says "
            "how many it has by `classes`, their names."
        )


@contextlib.contextmanager
def naming(sample: Callable[[int], str]) -> Iterator[None]:
    """Run what measures a batch inside this block, so that the error of a wrong label names the sample.

    Args:
        sample: returns what a row of the batch is called.

    Raises:
        ConfigError: in place of a :class:`LabelError`.
    """
    try:
        yield
    except LabelError as error:
        raise ConfigError(error.of(sample(error.row))) from None


class CrossEntropy:
    """The loss function that :func:`cross_entropy` returns; remembers that it has checked the labels."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self._checked = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross entropy over the samples of ``batch``, a float scalar."""
        outputs, labels = _outputs_and_labels(model, batch)
        # Looking at the values of CUDA tensors waits for the GPU, so that is done once only.
        if labels.device.type == "cpu" or not self._checked:
            _check_values(outputs, labels)
            self._checked = True
        return functional.cross_entropy(outputs, labels, label_smoothing=self.label_smoothing)


def cross_entropy(label_smoothing: float = 0.0) -> Loss:
    """Return the loss function of a classifier: the mean cross entropy over the samples.

    It takes the model and a batch ``(inputs, labels)``; ``model(inputs)`` must give float logits
    (n, classes), and labels must be whole numbers (n,) from 0 to classes - 1. On CUDA the values of the
    labels are checked in the first call only.

    Args:
        label_smoothing: share of the target that is spread evenly over all classes, 0 to 1.

    Raises:
        ConfigError: label_smoothing is out of range; and, from the loss function, the model's output and the
            labels do not fit together; a LabelError for a label without an output.
    """
    if not 0 <= label_smoothing < 1:
        raise ConfigError(
            f"label_smoothing is {label_smoothing}; it must be at least 0 and below 1, for example "
            "--label-smoothing 0.1."
        )
    return CrossEntropy(label_smoothing)


def classification(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the loss and the accuracy of every sample of a batch.

    Args:
        model: gives float logits (n, classes).
        batch: ``(inputs, labels)`` as for :func:`cross_entropy`.

    Returns:
        ``loss``: the cross entropy, float32 (n,). ``accuracy``: 1 where the largest logit is that of the
        label, else 0; float32 (n,). Of equal logits the first counts.

    Raises:
        ConfigError: the model's output and the labels do not fit together; a LabelError for a label without
            an output.
    """
    outputs, labels = _outputs_and_labels(model, batch)
    # An evaluation looks at the values of every chunk anyway, so on CUDA this is no wait more.
    _check_values(outputs, labels)
    loss = functional.cross_entropy(outputs, labels, reduction="none")
    return {"loss": loss.float(), "accuracy": (outputs.argmax(dim=1) == labels).float()}


def _outputs_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Run the model and check types and shapes, which costs no wait for a GPU."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)} items" if isinstance(batch, (tuple, list, dict)) else ""
        raise ConfigError(
            f"the batch is a {type(batch).__name__}{size}; the loss of a classifier takes (inputs, labels). "
            "Let the data set give (input, label) pairs, or write a loss function of your own."
        )
    inputs, labels = batch
    outputs = model(inputs)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or outputs.ndim != 2:
        raise ConfigError(
            f"the model gives {kind_of(outputs)}; expected float logits of shape (n, classes). Let the "
            "model's forward return them, or write a loss function of your own."
        )
    whole = isinstance(labels, Tensor) and not (labels.is_floating_point() or labels.is_complex())
    if not whole or labels.shape != outputs.shape[:1]:
        raise ConfigError(
            f"the labels are {kind_of(labels)}, but the model gives {kind_of(outputs)}; expected one whole "
            f"number per sample, shape ({outputs.shape[0]},). Correct the data set, or write a loss "
            "function of your own."
        )
    # The exponentials of a float16 or bfloat16 output are taken in float32, as autocast does.
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    return outputs, labels.long()


def _check_values(outputs: Tensor, labels: Tensor) -> None:
    """Check that every label has an output; on CUDA this waits for the GPU."""
    if labels.numel() == 0:
        return
    num_classes = outputs.shape[1]
    least, most = (int(value) for value in labels.aminmax())
    if least < 0 or most >= num_classes:
        row = int(((labels < 0) | (labels >= num_classes)).nonzero()[0])
        raise LabelError(row, int(labels[row]), num_classes)


def kind_of(value: Any) -> str:
    """Return what a value is, for the message of an error: of a tensor dtype and shape, else the type."""
    if isinstance(value, Tensor):
        return f"a tensor of {_dtype_name(value.dtype)} and shape {tuple(value.shape)}"
    return f"an object of type {type(value).__name__}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def weights_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of weights, as 64 hexadecimal digits.

    Equal weights have equal hashes, whatever device, memory format or view they are in. The hash is taken
    over these bytes, with nothing in between, for each key in sorted order (by code points):

    1. the key, in UTF-8;
    2. the name of the dtype, without ``torch.``, such as ``float32``;
    3. the shape as Python writes a tuple: ``(64, 3, 3, 3)``, ``(10,)``, ``()``;
    4. the values in row-major order, little-endian.

    So anybody can recompute it from a checkpoint's model.safetensors (unless weights are shared: that file
    holds them once, the state_dict under each of their keys)::

        import hashlib, safetensors.numpy
        sha = hashlib.sha256()
        for key, a in sorted(safetensors.numpy.load_file("model.safetensors").items()):
            sha.update(f"{key}{a.dtype}{a.shape}".encode() + a.tobytes())
        print(sha.hexdigest())

    Args:
        state_dict: the tensors by key, as ``model.state_dict()`` gives them.
    """
    sha = hashlib.sha256()
    for key in sorted(state_dict):
        tensor = state_dict[key].detach()
        sha.update(f"{key}{_dtype_name(tensor.dtype)}{tuple(tensor.shape)}".encode())
        # A flat copy with stride 1 whatever the tensor is like, as bytes, because numpy has no bfloat16.
        values = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        sha.update(values.view(torch.uint8).numpy().data)
    return sha.hexdigest()


class RateMeter:
    """Measures samples per second.

    Call :meth:`update` after each step or after some, and :meth:`restart_clock` after anything that is not
    training (an evaluation, a checkpoint), so that its time does not count.

    Args:
        warmup_steps: first updates that :attr:`per_s` leaves out, because they build buffers and caches.
        clock: gives the time in seconds.
    """

    def __init__(self, warmup_steps: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._last = clock()
        self._steps = 0
        self._all = (0, 0.0)
        self._counted = (0, 0.0)
        self._newest = (0, 0.0)

    def restart_clock(self) -> None:
        """Forget the time since the last step."""
        self._last = self._clock()

    def update(self, samples: int) -> None:
        """Count what has just ended: ``samples`` samples over all processes."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._steps += 1
        self._newest = (samples, seconds)
        self._all = (self._all[0] + samples, self._all[1] + seconds)
        if self._steps > self._warmup_steps:
            self._counted = (self._counted[0] + samples, self._counted[1] + seconds)

    @property
    def per_s(self) -> float | None:
        """Samples per second over the updates after the warm-up; over all while there are no such yet.

        None before the first.
        """
        return _rate(self._counted) or _rate(self._all)

    @property
    def current_per_s(self) -> float | None:
        """Samples per second in the last update; None before the first."""
        return _rate(self._newest)


def _rate(samples_and_seconds: tuple[float, float]) -> float | None:
    samples, seconds = samples_and_seconds
    return samples / seconds if seconds > 0 and samples > 0 else None
