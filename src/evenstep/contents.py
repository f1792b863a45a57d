"""Put values into a hash by their content: the bits of tensors and arrays, and how all is nested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def feed(digest: Any, value: Any, other: Callable[[Any], bytes]) -> None:
    """Put a value into a hash, such as ``hashlib.sha256()``.

    Args:
        digest: the hash.
        value: tensors, arrays, numbers, texts, None, and sequences and mappings of these.
        other: gives the bytes for a value of any other kind.
    """
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype}{value.shape}".encode())
        _feed_array(digest, value, other)
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(f"{value!r};".encode(errors="surrogatepass"))
    elif isinstance(value, Mapping):
        digest.update(f"mapping{len(value)}(".encode())
        for key, inner in value.items():
            feed(digest, key, other)
            feed(digest, inner, other)
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__}{len(value)}(".encode())
        for inner in value:
            feed(digest, inner, other)
    else:
        digest.update(other(value))


def _feed_array(digest: Any, value: np.ndarray | np.generic, other: Callable[[Any], bytes]) -> None:
    """Feed the values of an array; its bytes only where these are nothing but values."""
    fields = value.dtype.fields
    if fields is not None:  # between fields there may be bytes that nobody has set
        array = np.asarray(value)
        for name in fields:
            feed(digest, array[name], other)
    elif value.dtype.hasobject:  # the bytes are addresses
        feed(digest, value.ravel().tolist(), other)
    elif value.dtype.type in (np.longdouble, np.clongdouble):  # 10 bytes of 16 are set
        feed(digest, [repr(number) for number in value.ravel()], other)
    else:
        digest.update(value.tobytes())
