"""Write what follows from the code into the pages: docs/cli.md, and the tree of modules in README.md.

Run it with ``make docs``.
"""

import ast
import contextlib
import io
import re
from pathlib import Path

from evenstep import cli, world

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "evenstep"
CLI_PAGE = ROOT / "docs" / "cli.md"
README = ROOT / "README.md"
TREE = re.compile(r"(?<=```text\nsrc/evenstep/\n).*?(?=```)", re.S)
INTRO = """\
# The command line

This page is made by `make docs` from the help texts; change those.

Every option has one name: the flag `--batch-size`, the key `batch_size` in a file for `--config`, and the
same key in the run directory's `config.toml`. A flag wins over the file, the file over the run directory
(with `--resume`), that over the default. `evenstep config show` takes the flags of `evenstep train` and shows
every option with its value and where the value comes from; with `--toml` it prints a file for `--config`.

An option that would do nothing beside the others is an error: `--flip alternate` without `--augment`,
`--lr-decay` with another schedule than `step`. Where a flag takes its meaning from what a recipe or a file
says (`--recipe fast --no-augment`), that is left out, and the first lines say so.
"""


def help_text(*words: str) -> str:
    """Return what ``evenstep WORDS --help`` prints."""
    shown = io.StringIO()
    with world.variables({"COLUMNS": "100", "NO_COLOR": "1"}), contextlib.redirect_stdout(shown):
        cli.main([*words, "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().strip().splitlines())


def cli_page() -> str:
    """Return the text of docs/cli.md."""
    commands = [(), *((word,) for word in cli.COMMANDS if word != "config")]
    parts = [
        f"## {' '.join(('evenstep', *words))}\n\n```text\n{help_text(*words)}\n```\n" for words in commands
    ]
    return "\n".join([INTRO, *parts])


def modules() -> set[str]:
    """Return the modules of the package, as paths in it."""
    found = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    return {name for name in found if name != "data/__init__.py" and not name.startswith("starter/")}


def readme(text: str) -> str:
    """Return the README with a line for each module; a new one's is made from its docstring."""
    found = TREE.search(text)
    assert found is not None, "README.md has no tree of src/evenstep"
    roles = dict(line.split(maxsplit=1) for line in found[0].splitlines())
    there = modules()
    kept = {name: role for name, role in roles.items() if name in there or not name.endswith(".py")}
    new = {name: _role(name) for name in sorted(there - kept.keys())}
    # The modules in folders come behind the others, and folders that have no modules last.
    lines = sorted({**kept, **new}.items(), key=lambda item: ("/" in item[0], item[0].endswith("/")))
    return TREE.sub(lambda _: "".join(f"  {name:<18} {role}\n" for name, role in lines), text)


def _role(name: str) -> str:
    text = ast.get_docstring(ast.parse((SOURCE / name).read_text(encoding="utf-8"))) or "?"
    role = re.split(r"[.;](?:\s|$)", text.splitlines()[0])[0].replace("``", "")
    for mark in (":", ","):
        role = role.partition(mark)[0] if len(role) >= 70 else role
    # It goes on behind a name, so only what has more capitals (BatchNorm) keeps its first one.
    return re.sub(r"^[A-Z][a-z]*\b", lambda match: match[0].lower(), role)


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
