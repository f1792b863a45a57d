"""The options of a run as one flat mapping, as files, the command line and checkpoints have them.

What comes in is checked for unknown keys and wrong types. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from evenstep.config import TrainConfig
from evenstep.errors import ConfigError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def field_groups() -> dict[str, str]:
    """Return the group of every key: ``{"batch_size": "optim", ...}``."""
    return {
        option.name: group.name
        for group in dataclasses.fields(TrainConfig)
        for option in dataclasses.fields(typing.get_type_hints(TrainConfig)[group.name])
    }


def to_flat(config: TrainConfig) -> dict[str, Any]:
    """Return ``{key: value}`` over all groups, in the order of the groups."""
    return {key: getattr(getattr(config, group), key) for key, group in field_groups().items()}


def from_flat(
    values: dict[str, Any], base: TrainConfig | None = None, *, where: str = "config"
) -> TrainConfig:
    """Return ``base`` with ``values`` put in, checked for unknown keys and wrong types.

    Args:
        values: ``{key: value}``.
        base: the values of the keys that are not given; the defaults by default.
        where: what the values come from, for the messages.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or cannot be.
    """
    groups = field_groups()
    changed: dict[str, dict[str, Any]] = {}
    for key, value in check_values(values, where).items():
        changed.setdefault(groups[key], {})[key] = value
    base = base or TrainConfig()
    replaced = {group: dataclasses.replace(getattr(base, group), **new) for group, new in changed.items()}
    return dataclasses.replace(base, **replaced)


def check_values(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return ``values`` with whole numbers made floats where a float is meant.

    Args:
        values: ``{key: value}``.
        where: what the values come from, for the messages.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type.
    """
    groups = field_groups()
    for key in values:
        if key not in groups:
            raise ConfigError(
                f"{where}: unknown key {key!r}.{did_you_mean(key, groups)} A mistyped key would silently "
                "leave a default in place. `evenstep config show` lists all keys."
            )
    return {key: _checked(key, value, where) for key, value in values.items()}


def _checked(key: str, value: Any, where: str) -> Any:
    group = typing.get_type_hints(TrainConfig)[field_groups()[key]]
    hint = typing.get_type_hints(group)[key]
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif type(value) is option:
            return value
    choices = [str(c) for o in options if typing.get_origin(o) is Literal for c in typing.get_args(o)]
    names = [o.__name__ for o in options if isinstance(o, type) and o is not types.NoneType]
    hint_text = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ConfigError(
        f"{where}: {key} is {value!r}; expected {' or '.join(names + choices)}.{hint_text} "
        f"Correct it there, or give --{key.replace('_', '-')}."
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the flat ``{key: value}`` of a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has tables.
    """
    try:
        with open(path, "rb") as file:
            values: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}. Check --config.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Correct it, or leave out --config.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not in UTF-8, as TOML must be: {error.reason} at byte {error.start}. Save it so."
        ) from None
    for key, value in values.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: [{key}] is a table, but the keys of a run are flat. Remove the table's header; "
                f"`evenstep config show --toml` prints an example."
            )
    return values


def write_toml(config: TrainConfig) -> str:
    """Return ``config`` as TOML that ``--config`` reads again. Keys whose value is None are left out."""
    import tomli_w

    return tomli_w.dumps({key: value for key, value in to_flat(config).items() if value is not None})
