"""The command ``evenstep completion``: what bash, zsh and fish read to complete commands, flags and values.

tyro makes the script from the same dataclasses as the flags. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep import options, pages
from evenstep.bench.command import REFUSED as NOT_IN_BENCH
from evenstep.bench.command import BenchOptions
from evenstep.config import TrainConfig
from evenstep.doctor.examine import DoctorOptions
from evenstep.errors import ConfigError, did_you_mean
from evenstep.flags import wants_help
from evenstep.flat import field_groups
from evenstep.inspection import ACTIONS
from evenstep.verify.command import REFUSED as NOT_IN_VERIFY
from evenstep.verify.command import VerifyOptions

if typing.TYPE_CHECKING:
    from tyro.extras import SubcommandApp

HELP = """\
usage: evenstep completion bash|zsh|fish

Print what the shell reads to complete commands, flags and values with the Tab key. Write it where the shell
looks for it, and start a new shell:

  mkdir -p ~/.local/share/bash-completion/completions
  evenstep completion bash > ~/.local/share/bash-completion/completions/evenstep

  mkdir -p ~/.zfunc      # and in ~/.zshrc, before compinit: fpath+=~/.zfunc
  evenstep completion zsh > ~/.zfunc/_evenstep

  evenstep completion fish > ~/.config/fish/completions/evenstep.fish

For this shell alone: source <(evenstep completion bash), and so with zsh; evenstep completion fish | source.
"""

SHELLS = ("bash", "zsh", "fish")

# In tyro's scripts no candidate is one empty candidate, which would take the place of the word that was typed
# (tyro 1.0.17); and then file names are what is left to complete. zsh's script could not be sourced.
_LOOP = "  while IFS= read -r line; do\n"
_CHANGES = {
    "bash": (
        (_LOOP, _LOOP + '    [[ -n "$line" ]] || continue\n'),
        ("complete -F _tyro_evenstep", "complete -o default -o filenames -F _tyro_evenstep"),
    ),
    "zsh": (
        (_LOOP, _LOOP + '    [[ -n "$line" ]] || continue\n'),
        (
            "  _describe 'evenstep completions' completion_array\n",
            "  _describe 'evenstep completions' completion_array || _files\n",
        ),
        (
            'typeset -A opt_args\n_tyro_evenstep "$@"\n',
            "if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then\n"
            '  typeset -A opt_args\n  _tyro_evenstep "$@"\n'
            "else\n  compdef _tyro_evenstep evenstep\nfi\n",
        ),
    ),
    "fish": (),
}


def run(argv: Sequence[str]) -> int:
    """Run ``evenstep completion SHELL``.

    Raises:
        ConfigError: the shell is unknown.
    """
    if wants_help(argv):
        sys.stdout.write(HELP)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        got = " ".join(argv) or "nothing"
        raise ConfigError(
            f"evenstep completion needs the name of a shell, and got {got}.{did_you_mean(got, SHELLS)} Use "
            f"evenstep completion {'|'.join(SHELLS)}; `evenstep completion --help` says where it belongs."
        )
    sys.stdout.write(script(argv[0]))
    return 0


def script(shell: str) -> str:
    """Return what a shell reads.

    Args:
        shell: one of ``SHELLS``.
    """
    import tyro

    printed = io.StringIO()
    words = ["--tyro-write-completion", shell, "-"]
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        _app().cli(prog="evenstep", args=words, config=(tyro.conf.OmitArgPrefixes,))
    text = printed.getvalue()
    for before, after in _CHANGES[shell]:
        text = text.replace(before, after)
    return text


def _app() -> SubcommandApp:
    """Return the commands as tyro takes them. It is never run, only described."""
    from tyro.extras import SubcommandApp

    def group(members: dict[str, Any]) -> SubcommandApp:
        app = SubcommandApp()
        for name, member in members.items():
            app.command(member, name=name)
        return app

    @dataclass
    class Nothing:
        """No flags."""

    @dataclass(frozen=True, kw_only=True)
    class Show(options.TrainFlags):
        toml: bool = False
        """Print a file for --config."""

    checkpoint = {
        action: dataclasses.make_dataclass(
            action, [(key, bool if switch else str, False if switch else "") for key, switch in keys.items()]
        )
        for action, keys in ACTIONS.items()
    }
    return group(
        {
            "train": options.TrainFlags,
            "run": Nothing,
            "eval": options.EvalOptions,
            "config": group({"show": Show}),
            "checkpoint": group(checkpoint),
            "doctor": DoctorOptions,
            "init": Nothing,
            "verify": _with_train_flags("verify", VerifyOptions, NOT_IN_VERIFY),
            "bench": _with_train_flags("bench", BenchOptions, NOT_IN_BENCH),
            "report": pages.ReportOptions,
            "watch": pages.WatchOptions,
            "completion": group(dict.fromkeys(SHELLS, Nothing)),
        }
    )


def _with_train_flags(name: str, own: Any, refused: Collection[str]) -> type:
    """Return a class with the fields of ``own`` and, one after the other, those of ``evenstep train``."""
    hints = typing.get_type_hints(own)
    fields: list[tuple[str, Any, Any]] = [(key, hints[key], getattr(own, key)) for key in hints]
    fields.append(("config", str, ""))
    default = TrainConfig()
    for key, place in field_groups().items():
        if key not in hints and key not in refused:
            hint = typing.get_type_hints(typing.get_type_hints(TrainConfig)[place])[key]
            fields.append((key, hint, getattr(getattr(default, place), key)))
    return dataclasses.make_dataclass(name, fields, kw_only=True)
