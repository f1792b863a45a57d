"""Main and its arguments as bytes, by value: lambdas, closures, and what a script or a notebook defines.

Functions and classes of ``__main__`` travel whole; those of modules that can be imported travel as names.
"""

from __future__ import annotations

import inspect
import io
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import cloudpickle

from evenstep.errors import ConfigError

_MAX_DEPTH = 6


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)[:2]
    return make, tuple(
        code.co_filename if isinstance(part, str) and part == "<dynamic-code>" else part for part in parts
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle, except that code keeps the name of its file, so that tracebacks show the user's lines."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def dumps(main: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return ``(main, args)`` pickled.

    Raises:
        ConfigError: main is not callable, or something in it cannot be pickled; the message names it.
    """
    if not callable(main):
        raise ConfigError(
            f"launch: main is {main!r}, which cannot be called. Pass a function: launch(main, nproc=2)."
        )
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump((main, args))
        return buffer.getvalue()
    except Exception as error:
        named = [(f"main ({getattr(main, '__qualname__', main)})", main)]
        named += [(f"argument {i} of main", arg) for i, arg in enumerate(args, start=1)]
        path, culprit, reason = next(
            (found for name, obj in named if (found := find_culprit(name, obj))), (named[0][0], main, error)
        )
        raise ConfigError(
            f"launch: {path} is a {type(culprit).__name__}, which cannot be sent to the workers: {reason}. "
            "Each worker is a process of its own and gets copies. Make this object inside main instead, or "
            "pass what it is made from (a path, a number, a configuration)."
        ) from None


def find_culprit(
    path: str, obj: Any, depth: int = 0, dump: Callable[[Any], Any] = cloudpickle.dumps
) -> tuple[str, Any, Exception] | None:
    """Return the innermost part of ``obj`` that cannot be pickled (where it is, itself, why), or None.

    Args:
        path: what ``obj`` is called in the answer.
        obj: what is looked into.
        depth: how deep ``obj`` already is.
        dump: pickles an object; by default by value, as evenstep.launch does.
    """
    try:
        dump(obj)
    except Exception as error:
        if depth < _MAX_DEPTH:
            for name, part in _parts(obj):
                found = find_culprit(f"{path}{name}", part, depth + 1, dump)
                if found is not None:
                    return found
        return path, obj, error
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.MethodType):
        yield "'s object", obj.__self__
    elif isinstance(obj, types.FunctionType):
        scope = inspect.getclosurevars(obj)
        for kind, values in (("variable", scope.nonlocals), ("global", scope.globals)):
            yield from ((f": its {kind} {name!r}", value) for name, value in values.items())
        yield from ((f": its default value {value!r}", value) for value in obj.__defaults__ or ())
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    else:
        yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())
