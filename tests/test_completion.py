"""Completion in a real bash; that the other shells' scripts are whole."""

import shutil
import subprocess
import sys

import pytest

from evenstep import cli, completion
from evenstep.errors import ConfigError

# What bash does for the Tab key: the words, the number of the one that is completed, the registered function.
BASH = r"""
source "$1"
tab() {
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  [[ $(complete -p evenstep) =~ -F\ ([^ ]+) ]] && "${BASH_REMATCH[1]}"
  echo "$*: ${#COMPREPLY[@]} ${COMPREPLY[*]}"
}
tab evenstep tr
tab evenstep train --mo
tab evenstep train --device c
tab evenstep train --seed 3
tab evenstep verify --ag
tab evenstep config ""
tab evenstep completion z
tab evenstep ""
"""


def test_bash(tmp_path):
    (tmp_path / "script").write_text(completion.script("bash"))
    command = ["bash", "--norc", "-c", BASH, "bash", str(tmp_path / "script")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found["evenstep tr"] == "1 train"
    assert found["evenstep train --mo"] == "3 --mode --model --momentum"
    assert found["evenstep train --device c"] == "2 cpu cuda"
    assert found["evenstep train --seed 3"] == "0 "  # and not one empty word
    assert found["evenstep verify --ag"] == "1 --against"
    assert found["evenstep config "] == "3 -h --help show"
    assert found["evenstep completion z"] == "1 zsh"
    assert found["evenstep "].split()[1:] == ["-h", "--help", *sorted(cli.COMMANDS)]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_all_that_we_change_in_a_script_is_there(shell, monkeypatch):
    """Another version of tyro may write another script; what we change in it may then be needless."""
    ours = completion.script(shell)
    monkeypatch.setitem(completion._CHANGES, shell, ())
    plain = completion.script(shell)
    monkeypatch.undo()
    for before, after in completion._CHANGES[shell]:
        assert plain.count(before) == ours.count(after) > 0
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=ours, text=True, timeout=60).returncode == 0


def test_it_is_written_without_torch():
    code = (
        "import sys; from evenstep.cli import main; code = main(['completion', 'fish']); "
        "sys.exit(code or [m for m in ('torch', 'numpy') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete --no-files --command 'evenstep'" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs the name of a shell, and got nothing. Use evenstep completion bash"),
        (["fisch"], "and got fisch. Did you mean 'fish'?"),
        (["bash", "zsh"], "and got bash zsh"),
    ],
)
def test_what_is_no_shell(argv, message):
    with pytest.raises(ConfigError) as caught:
        completion.run(argv)
    assert message in str(caught.value)


def test_help(capsys):
    assert cli.main(["completion", "--help"]) == 0
    assert "~/.zfunc/_evenstep" in capsys.readouterr().out
