"""``evenstep run``: a script runs as with python, and its workers' fork server begins before it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from evenstep import cli
from evenstep.script import HELP

PYTHON = [sys.executable]
RUN = [sys.executable, "-m", "evenstep", "run"]
# As under torchrun: then no fork server is started, and the tests of what has no workers are quick.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

WHOLE = """
import atexit, multiprocessing, os, sys

class Point:
    pass

def child(point):
    print("child", __name__, type(point).__module__, sys.argv, flush=True)

def main(world, factor):
    import torch
    import evenstep

    model = torch.nn.Linear(8, 2)
    state = evenstep.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [(torch.full((8,), float(i)), i % 2) for i in range(16)]
    for batch in evenstep.Loader(data, batch_size=8, seed=1).batches(state, epochs=1):
        evenstep.train_step(state, batch, evenstep.cross_entropy())
    return factor * world.world_size, evenstep.weights_sha256(model.state_dict()), sys.argv, os.getcwd()

if __name__ == "__main__":
    print(__name__, __file__, __spec__, __package__, type(__loader__).__name__, sys.argv, sys.path[0])
    print(sys.modules["__main__"].__dict__ is globals(), "torch" in sys.modules)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(Point(),))
    process.start()
    process.join()
    import beside
    import evenstep

    print(beside.NAME, evenstep.launch(main, 3, nproc=2, device="cpu", threads=1))
    print(input(), sys.stdin.read())
    left_open = open("left.txt", "w")
    left_open.write("flushed at the end")
    atexit.register(print, "at the end")
"""

ENDS = """
import sys

class Own(Exception):
    pass

def fail():
    raise Own("what went wrong")

if sys.argv[1] == "interrupt":
    import atexit
    atexit.register(print, "at the end")
    raise KeyboardInterrupt
exec(sys.argv[1])
"""

SERVER = """
import multiprocessing.forkserver, os, sys

server = multiprocessing.forkserver._forkserver._forkserver_pid
early = server is not None and "torch" not in sys.modules
from evenstep.launcher import launch

if __name__ == "__main__":
    print(early, server == launch(lambda world: os.getppid(), nproc=1, device="cpu"))
"""

POOL = """
import multiprocessing, os, signal, sys
import evenstep

def signals(_=None):
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return [signal.getsignal(n).name for n in numbers], sorted(blocked)

def main(world):
    return os.getpid()

if __name__ == "__main__":
    if sys.argv[1:] == ["launch"]:
        evenstep.launch(main, nproc=1, device="cpu", threads=1)
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        print(pool.map(signals, range(2)))
    print("ended")
"""


def ran(how, *words, cwd, **options):
    """Return what a script printed, what it complained of, and its exit code."""
    done = subprocess.run([*how, *words], cwd=cwd, capture_output=True, text=True, timeout=120, **options)
    return done.stdout, done.stderr, done.returncode


@pytest.fixture
def project(tmp_path):
    """A directory with scripts in it."""
    (tmp_path / "project").mkdir()
    for name, text in (("whole", WHOLE), ("ends", ENDS), ("server", SERVER), ("pool", POOL)):
        (tmp_path / "project" / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "project" / "beside.py").write_text("NAME = __name__\n")
    return tmp_path


def test_all_that_a_script_sees_and_does_is_as_with_python(project):
    found = []
    for how in (PYTHON, RUN):
        out, err, code = ran(how, "project/whole.py", "-x", "--help", cwd=project, input="line\nrest")
        assert (err, code) == ("", 0)
        file = project / "left.txt"
        found.append((out, file.read_text()))
        file.unlink()
    assert found[0] == found[1]
    assert "beside (6, " in found[0][0]
    assert found[0][1] == "flushed at the end"


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(3)",
        "sys.exit()",
        "sys.exit('a word')",
        "fail()",
        "compile('a b', 'x', 'exec')",
        "sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno)\nfail()",
    ],
)
def test_it_ends_as_with_python(project, end):
    environment = {**os.environ, **ALONE}
    python, ours = (ran(how, "project/ends.py", end, cwd=project, env=environment) for how in (PYTHON, RUN))
    assert python == ours


def test_a_script_that_is_no_python_and_an_interrupt(project):
    environment = {**os.environ, **ALONE}
    (project / "wrong.py").write_text("x = 1\na b\n")
    python, ours = (ran(how, "wrong.py", cwd=project, env=environment) for how in (PYTHON, RUN))
    assert python == ours
    installed = [str(Path(sys.executable).with_name("evenstep")), "run"]
    python, ours, command = (
        ran(how, "project/ends.py", "interrupt", cwd=project, env=environment)
        for how in (PYTHON, RUN, installed)
    )
    assert python == ours == command
    assert ours[0] == "at the end\n"
    assert ours[2] == -signal.SIGINT


def test_the_fork_server_begins_before_the_script_and_its_workers_come_from_it(project):
    assert ran(PYTHON, "project/server.py", cwd=project) == ("False False\n", "", 0)
    assert ran(RUN, "project/server.py", cwd=project) == ("True True\n", "", 0)


@pytest.mark.parametrize("word", ["", "launch"])
def test_a_scripts_own_pool_ends_as_with_python(project, word):
    for how in (PYTHON, RUN):
        out, err, code = ran(how, "project/pool.py", word, cwd=project)
        all_default = (["SIG_DFL"] * 4, [])
        assert (out, err, code) == (f"{[all_default] * 2}\nended\n", "", 0)


def test_a_module_of_a_package(project):
    package = project / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("NAME = __name__\n")
    lines = ("import sys", "from .beside import NAME", "print(__name__, __spec__.name, sys.argv, NAME)")
    (package / "start.py").write_text("\n".join(lines))
    environment = {**os.environ, **ALONE}
    words = ("-m", "package.start", "-x")
    python, ours = (ran(how, *words, cwd=project, env=environment) for how in (PYTHON, RUN))
    assert python == ours
    assert python[0].startswith("__main__ package.start ")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "needs a script, or -m and a module, and got nothing. Use evenstep run SCRIPT"),
        (["--nproc", "2"], 2, "and got --nproc. Use evenstep run SCRIPT [ARGS] (flags of the script go"),
        (["-m", ".train"], 2, "there is no module '.train' in "),
        (["-m"], 2, "and got nothing"),
        (["tran.py"], 2, "there is no script tran.py. Did you mean 'train.py'? Give"),
        (["nowhere/train.py"], 2, "there is no script nowhere/train.py. Give its path"),
        (["."], 3, "cannot read .: Is a directory. Give the path of a script"),
        (["-m", "no_such_module.train"], 2, "there is no module 'no_such_module.train' in "),
    ],
)
def test_what_cannot_be_run_is_an_error(words, code, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    assert cli.main(["run", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("evenstep: error: evenstep run")
    assert message in err


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help(word, capsys):
    assert cli.main(["run", word]) == 0
    assert capsys.readouterr() == (HELP, "")


def test_a_linked_script_finds_the_modules_beside_the_file_itself(project):
    (project / "link.py").symlink_to(Path("project", "ends.py"))
    environment = {**os.environ, **ALONE}
    code = "import beside; print(__file__, sys.path[0])"
    python, ours = (ran(how, "link.py", code, cwd=project, env=environment) for how in (PYTHON, RUN))
    assert python == ours
    assert python[2] == 0
