"""Fixtures for all tests: a test that leaves something behind fails."""

import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

SERVICES = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
PATIENCE_S = 5.0
# pytest sets the first; torch sets the second when its compiler is imported, as its optimizers do.
PASSING_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def processes():
    """``{pid: (parent's pid, state, command)}`` of all processes that /proc shows."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            command = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found[int(path.name)] = (int(parent), state, command)
    return found


def descendants(root):
    """``{pid: command}`` of the living descendants of a process, without multiprocessing's own servers."""
    table = processes()
    children = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found, todo = {}, [(pid, True) for pid in children.get(root, [])]
    while todo:
        pid, direct = todo.pop()
        _, state, command = table[pid]
        # A worker is forked by the fork server and has its command line, but is not our direct child.
        if state != "Z" and not (direct and any(service in command for service in SERVICES)):
            found[pid] = command
        todo += [(child, False) for child in children.get(pid, [])]
    return found


def gone_within(condition, seconds=PATIENCE_S):
    """Whether ``condition()`` gets empty or false within some seconds; returns what is left."""
    end = time.monotonic() + seconds
    while (left := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


@pytest.fixture(scope="session", autouse=True)
def heeds_the_keyboard():
    """A shell lets its background jobs ignore SIGINT and SIGQUIT, and what they start inherits that."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    handlers[signal.SIGHUP] = signal.SIG_DFL  # nohup
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory):
    """A temporary directory of this session, so that other runs on the machine are not taken for leaks."""
    # These two live longer than the session, so they get their places first.
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    directory = tempfile.mkdtemp(prefix="es-")
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    yield directory
    tempfile.tempdir = before[1]
    if before[0] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[0]
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind(own_temporary_directory):
    """Fail a test that leaves a process, an environment variable, a process group or a directory of a run."""
    variables = {name: value for name, value in os.environ.items() if name not in PASSING_VARIABLES}
    before = descendants(os.getpid())
    yield
    left = gone_within(lambda: {p: c for p, c in descendants(os.getpid()).items() if p not in before})
    assert not left, f"the test left processes behind: {left}"
    after = {name: value for name, value in os.environ.items() if name not in PASSING_VARIABLES}
    assert after == variables, "the test changed environment variables"
    directories = list(Path(own_temporary_directory).glob("evenstep-*"))
    for directory in directories:
        shutil.rmtree(directory)
    assert not directories, f"the test left directories of runs behind: {directories}"
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
        pytest.fail("the test left a process group behind")


@pytest.fixture
def warnings():
    """The lines that are logged as warnings or worse."""
    from loguru import logger

    lines = []
    number = logger.add(lines.append, level="WARNING", format="{level} {message}")
    yield lines
    logger.remove(number)
