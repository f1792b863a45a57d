"""Write docs/cli.md from the help texts of the command: python docs/generate_cli.py."""

import contextlib
import io
from pathlib import Path

from evenstep import cli, world

PAGE = Path(__file__).with_name("cli.md")
INTRO = """\
# The command line

This page is made by `make docs` from the help texts; change those.

Every option has one name: the flag `--batch-size`, the key `batch_size` in a file for `--config`, and the
same key in the run directory's `config.toml`. A flag wins over the file, the file over the run directory
(with `--resume`), that over the default. `evenstep config show` takes the flags of `evenstep train` and shows
every option with its value and where the value comes from; with `--toml` it prints a file for `--config`.
"""


def help_text(*words: str) -> str:
    """Return what ``evenstep WORDS --help`` prints."""
    shown = io.StringIO()
    with world.variables({"COLUMNS": "100", "NO_COLOR": "1"}), contextlib.redirect_stdout(shown):
        cli.main([*words, "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().strip().splitlines())


def page() -> str:
    """Return the text of docs/cli.md."""
    commands = [(), *((word,) for word in cli.COMMANDS if word != "config")]
    parts = [
        f"## {' '.join(('evenstep', *words))}\n\n```text\n{help_text(*words)}\n```\n" for words in commands
    ]
    return "\n".join([INTRO, *parts])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
