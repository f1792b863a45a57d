"""Values in the form in which a checkpoint stores them: what can be read back without running code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.errors import ConfigError


def plain_weights(
    model: Mapping[str, Tensor], *, copied_from: set[torch.device] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights as contiguous CPU tensors that share no memory, and the keys that share a tensor.

    Args:
        model: a state_dict, on any device, with views and shared tensors.
        copied_from: if given, every tensor is copied, and the devices that they came from are added here. A
            copy from a GPU may still be under way: it is there when the GPU's current stream gets to it.

    Returns:
        The tensors by key; and for each key that shares its tensor with an earlier one, that key's name.
        Without ``copied_from`` the tensors may be those of ``model`` itself, so they are to be read only.

    Raises:
        ConfigError: a value is not a dense tensor; the message names its key.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_key: dict[Any, str] = {}
    storages: set[int] = set()
    for key, value in model.items():
        if not _is_dense(value):
            raise ConfigError(
                f"cannot save model[{key!r}]: it is {_kind(value)}, and the weights of a checkpoint are "
                "ordinary dense tensors only. Leave it out of the state_dict, or keep it in a dense tensor."
            )
        identity = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if value.numel() and identity in first_key:
            aliases[key] = first_key[identity]
            continue
        first_key[identity] = key
        if copied_from is None:
            tensor = _own(value.detach().cpu().contiguous())
        else:
            tensor = _copied(value.detach(), copied_from, torch.contiguous_format)
        if tensor.untyped_storage().data_ptr() in storages:  # safetensors stores no memory twice
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
    return tensors, aliases


def plain_values(
    value: Any, where: str, *, json_only: bool = False, copied_from: set[torch.device] | None = None
) -> Any:
    """Return ``value`` with everything in it in types that are read back without running code.

    Mappings become dicts, named tuples tuples, enums of numbers and NumPy's numbers Python's numbers,
    parameters tensors; tensors go to the CPU.

    Args:
        value: nested dicts, lists and tuples of tensors, numbers, strings, bytes, None, dtypes and devices.
        where: the place of ``value``, for the messages.
        json_only: allow only what JSON can hold; tuples become lists.
        copied_from: as for :func:`plain_weights`.

    Raises:
        ConfigError: something else is in it; the message names its place.
    """
    if value is None or type(value) in (bool, str):
        return value
    inner: dict[str, Any] = {"json_only": json_only, "copied_from": copied_from}
    if isinstance(value, Mapping):
        return {
            _checked_key(key, where, json_only): plain_values(item, f"{where}[{key!r}]", **inner)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [plain_values(item, f"{where}[{i}]", **inner) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) and not json_only else items
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.generic) and isinstance(value.item(), (bool, int, float)):
        return value.item()
    if not json_only:
        if _is_dense(value):
            tensor = value.detach()
            return _own(tensor.cpu()) if copied_from is None else _copied(tensor, copied_from)
        if isinstance(value, (bytes, torch.dtype, torch.device)):
            return value
    allowed = (
        "JSON values" if json_only else "dicts, lists, tuples, dense tensors, numbers, strings, bytes, None"
    )
    hint = " Use torch.from_numpy(...)." if isinstance(value, np.ndarray) and not json_only else ""
    raise ConfigError(
        f"cannot save {where}: it is {_kind(value)}, and a checkpoint holds only {allowed}, so that reading "
        f"one never runs code.{hint} Store its plain values, or leave it out."
    )


def _checked_key(key: Any, where: str, json_only: bool) -> Any:
    if type(key) is str or (not json_only and type(key) in (int, float, bool, type(None))):
        return key
    raise ConfigError(
        f"cannot save {where}: it has the key {key!r}, {_kind(key)}; expected a string"
        f"{'' if json_only else ' or a number'}. Rename the key."
    )


def _is_dense(value: Any) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor that is all of its memory; a file would hold the rest of the memory, too."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _copied(
    tensor: Tensor, copied_from: set[torch.device], layout: torch.memory_format = torch.preserve_format
) -> Tensor:
    """Return a copy on the CPU that is all of its memory."""
    copied_from.add(tensor.device)
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=layout)
    if layout is torch.contiguous_format:
        tensor = tensor.contiguous()
    # From a CUDA GPU this goes into pinned memory and only joins the stream's queue. What later steps write
    # comes behind it in the same queue.
    return tensor.to("cpu", non_blocking=tensor.is_cuda, copy=True)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
        return f"a {layout} tensor of type {type(value).__name__}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"
