"""Objects named on the command line as ``module:attribute``."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Any

from evenstep.errors import ConfigError, did_you_mean


def import_object(spec: str, *, what: str, flag: str) -> Any:
    """Return the object that ``module:attribute`` names.

    The module is looked for as Python does, and in the current directory. An error that the module itself
    raises while it is imported is passed on with its traceback.

    Args:
        spec: such as ``mymodels:net`` or ``package.module:Class.method``.
        what: what the object is, for the messages: ``model``, ``dataset``.
        flag: the option that ``spec`` came from, for the messages: ``--model``.

    Raises:
        ConfigError: ``spec`` has another form, or there is no such module or attribute.
    """
    module_name, _, attribute = spec.partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{what} {spec!r} is not of the form module:attribute, such as mymodule:make. Name the module as "
            f"in an import statement, without .py: {flag} mymodule:make."
        )
    found = _module(module_name, spec, what, flag)
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(
                f"{what} {spec!r}: {getattr(found, '__name__', found)} has no {name!r}."
                f"{did_you_mean(name, names)} Correct {flag}, or define it in {module_name}."
            )
        found = getattr(found, name)
    return found


def _module(name: str, spec: str, what: str, flag: str) -> Any:
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the named module is what is missing, and not something that it imports.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
    hint = did_you_mean(name, [module.name for module in pkgutil.iter_modules([directory])])
    raise ConfigError(
        f"{what} {spec!r}: there is no module {name!r} in Python's path or in the current directory "
        f"{directory}.{hint} Correct {flag}, or start evenstep in the directory that has the module."
    )
