"""The command ``evenstep init``: begin a project of one's own from files that work. No torch here."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Sequence
from pathlib import Path

from evenstep.errors import ConfigError, MachineError
from evenstep.flags import wants_help

HELP = """\
usage: evenstep init [DIR]

Write the files of a small project into DIR (default: the current directory): a model, a data function, a
loss and metrics, options, a loop of your own, a test. All of them work, and are there to be changed. Files
that are there already are never overwritten.
"""

FILES = ("README.md", "run.toml", "model.py", "data.py", "objective.py", "train.py", "test_project.py")
"""The files of a project, as they are in ``evenstep/starter``."""


def run(argv: Sequence[str]) -> int:
    """Run ``evenstep init [DIR]``.

    Raises:
        ConfigError: a flag or a second word was given, or a file is there already.
        MachineError: a file cannot be written.
    """
    if wants_help(argv):
        sys.stdout.write(HELP)
        return 0
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise ConfigError(
            f"evenstep init takes one directory and no flags, and got {' '.join(argv)}. Use "
            "evenstep init DIR."
        )
    directory = Path(*argv)
    write(directory)
    inside = "" if directory == Path() else f"cd {directory}\n"
    sys.stdout.write(
        f"wrote {', '.join(FILES)}\nTry it:\n\n{inside}evenstep train --config run.toml\n\n"
        "README.md says what is what.\n"
    )
    return 0


def write(directory: Path) -> None:
    """Write the files of a project.

    Args:
        directory: where to; made if it is not there.

    Raises:
        ConfigError: one of the files is there already; then none is written.
        MachineError: a file cannot be written.
    """
    there = [name for name in FILES if (directory / name).exists() or (directory / name).is_symlink()]
    if there:
        raise ConfigError(
            f"{', '.join(str(directory / name) for name in there)}: there already, and evenstep init "
            "overwrites nothing. Choose another directory (evenstep init DIR), or move what is in the way."
        )
    starter = importlib.resources.files("evenstep") / "starter"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write((starter / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(
            f"cannot write {error.filename or directory}: {error.strerror}. Choose a directory that you may "
            "write to: evenstep init DIR."
        ) from None
