"""Buffers that a model leaves out of its state_dict (``persistent=False``), as far as its steps change them.

A mask or a table is made anew with the model. What a step changes is part of the training, whatever the
model's file is to hold, so it goes with the training state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the key, the layer and the name of each buffer; under each of its keys if a layer has several."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in module._buffers:
            yield f"{prefix}.{name}" if prefix else name, module, name


def put_back(
    before: Mapping[tuple[int, str], Tensor | None],
    model: nn.Module,
    saved: dict[str, Tensor],
    unsaved: dict[str, Tensor | None],
) -> None:
    """Replace the buffers that a step in hand may have changed by what they were before it.

    Args:
        before: these, by the identity of the layer and their name.
        model: the model.
        saved: its state_dict.
        unsaved: what ``Unsaved.values`` gave; left out there is what no step has changed.
    """
    for key, module, name in _named_buffers(model):
        if (id(module), name) not in before:
            continue
        old = before[id(module), name]
        if name in module._non_persistent_buffers_set:
            if key in unsaved:
                unsaved[key] = old
        elif old is None:
            saved.pop(key, None)
        elif key in saved or module._buffers.get(name) is None:
            saved[key] = old


class Unsaved:
    """The buffers of a model that are not in its state_dict.

    Args:
        model: the model, before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            key: (module, name)
            for key, module, name in _named_buffers(model)
            if name in module._non_persistent_buffers_set
        }
        self._first = {key: _marked(module._buffers[name]) for key, (module, name) in self._places.items()}

    def values(self) -> dict[str, Tensor | None]:
        """Return those that have changed since the model was made, by key."""
        now = {key: module._buffers.get(name) for key, (module, name) in self._places.items()}
        return {key: buffer for key, buffer in now.items() if _marked(buffer) != self._first[key]}

    def take(self, values: Mapping[str, Tensor | None], device: torch.device) -> None:
        """Put in what ``values`` gave.

        Raises:
            KeyError: the model has no such buffer.
        """
        for key, value in values.items():
            module, name = self._places[key]
            module._buffers[name] = None if value is None else value.to(device, copy=True)


def _marked(buffer: Tensor | None) -> tuple[int, int] | None:
    return None if buffer is None else (id(buffer), buffer._version)
