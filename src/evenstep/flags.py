"""From the words of a command line to the flags of a dataclass.

Nothing here imports torch, and only :func:`read_flags` imports tyro: what is mistyped is found at once.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from evenstep.errors import ConfigError, did_you_mean

Flags = TypeVar("Flags")


def wants_help(argv: Sequence[str]) -> bool:
    """Return whether the command line asks for the help text."""
    return "-h" in argv or "--help" in argv


def keys_of(flags: Any) -> dict[str, bool]:
    """Return every key of a class of flags, groups opened, and whether it is a switch.

    Args:
        flags: a dataclass whose fields are flags, or groups of them; such as :class:`TrainFlags`.
    """
    keys: dict[str, bool] = {}
    for name, hint in typing.get_type_hints(flags).items():
        keys |= keys_of(hint) if dataclasses.is_dataclass(hint) else {name: hint is bool}
    return keys


def scan_flags(argv: Sequence[str], keys: Mapping[str, bool], prog: str) -> dict[str, str | bool]:
    """Return the flags that are on a command line: ``{key: text, or True or False for a switch}``.

    Args:
        argv: the words.
        keys: every key, and whether it is a switch (``--x`` / ``--no-x``).
        prog: the command, for the messages.

    Raises:
        ConfigError: a flag is unknown or has no value, or a word belongs to no flag.
    """
    found: dict[str, str | bool] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--"):
            raise ConfigError(f"{prog}: {word!r} belongs to no flag. `{prog} --help` lists all flags.")
        if keys.get(key) or keys.get(key.removeprefix("no_")):
            if equals:
                plain = key.removeprefix("no_").replace("_", "-")
                raise ConfigError(
                    f"{prog}: {name} takes no value, and got {value!r}. Use --{plain} or --no-{plain}."
                )
            found[key.removeprefix("no_")] = key in keys
        elif key in keys:
            if not equals and (not words or words[0].partition("=")[0] in _spellings(keys)):
                raise ConfigError(f"{prog}: {name} needs a value. `{prog} --help` says which.")
            found[key] = value if equals else words.pop(0)
        else:
            hint = did_you_mean("--" + key.replace("_", "-"), _spellings(keys))
            raise ConfigError(
                f"{prog}: unknown flag {name}.{hint} A mistyped flag would silently leave a default in "
                f"place. `{prog} --help` lists all flags."
            )
    return found


def read_flags(flags: type[Flags], argv: Sequence[str], prog: str, default: Flags) -> Flags:
    """Return a class of flags with what a command line says.

    Args:
        flags: a dataclass whose fields are flags, or groups of them; such as :class:`TrainFlags`.
        argv: the words after the command word.
        prog: the command, for the messages and the help.
        default: the values of the flags that are not given.

    Raises:
        SystemExit: the help was printed (0), or a value does not fit its flag (2).
    """
    import tyro

    return tyro.cli(flags, args=list(argv), prog=prog, default=default, config=(tyro.conf.OmitArgPrefixes,))


def _spellings(keys: Mapping[str, bool]) -> list[str]:
    names = [*keys, *(f"no_{key}" for key, switch in keys.items() if switch)]
    return [f"--{spelling}" for name in names for spelling in dict.fromkeys((name.replace("_", "-"), name))]
