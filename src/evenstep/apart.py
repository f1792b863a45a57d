"""Do a command's work in a fork of the fork server, so that the command's own process needs no torch.

The fork server has torch in memory when the work can begin. A fork of it has it too, at once and in the same
memory; this process would need a second of CPU time and several hundred megabytes to import it once more. It
stays what the user sees: signals to it are passed on, its death is the end of the work, and its exit code is
that of the work.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from evenstep import relay, sharedmem, world

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
# Those of the fork server, which its children do not find out by themselves.
_SERVER = ("_forkserver_address", "_forkserver_authkey")
# What multiprocessing takes for the exit code of a process whose fork server is gone.
_SERVER_DIED = 255


def run(work: Callable[..., int], *args: Any) -> int:
    """Call ``work(*args)`` in a process of its own and return the exit code that it returns.

    Where there is no fork server, or where stdout or stderr of this process lead elsewhere, it runs here.

    Args:
        work: a function of a module.
        args: its arguments; pickle must know them.
    """
    import multiprocessing
    import multiprocessing.forkserver

    # Where the output is caught (a notebook, a test), it is caught of this process alone.
    if (
        "forkserver" not in multiprocessing.get_all_start_methods()
        or world.placement() is not None
        or relay.led_elsewhere()
    ):
        return work(*args)
    server: Any = multiprocessing.forkserver
    server.ensure_running()
    handed = {name: value for name, value in vars(server._forkserver).items() if name in _SERVER}
    ignored = {number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN}
    # By a pipe of our own: what the fork server would tell of the end comes too early when it dies itself.
    told, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(
        target=_work, args=(work, args, world.environment(), ignored, handed, tell)
    )
    process.start()
    tell.close()
    with told, _signals_passed_on(process.pid or 0, ignored):
        try:
            code: int = told.recv()
        except EOFError:
            process.join()
            code = process.exitcode or 0
            sharedmem.remove_leftovers()  # it may have been killed
        else:
            process.join()
            return code
    if code >= 0 and code != _SERVER_DIED:
        return code
    how = (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else "was ended, and so was the fork server"
    )
    sys.stderr.write(
        f"evenstep: error: the launching process {process.pid} {how}. "
        "The last checkpoint is good: run the same command with --resume to go on.\n"
    )
    return 128 - code if code < 0 else 128 + signal.SIGKILL


@contextlib.contextmanager
def _signals_passed_on(pid: int, ignored: set[signal.Signals]) -> Iterator[None]:
    """Send the signals that come inside this block to another process."""

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def suspend(*_: object) -> None:
        send(signal.SIGSTOP)
        # The signal's own action, which does nothing where no shell could say fg: all goes on then.
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        send(signal.SIGCONT)

    handlers: dict[int, Callable[..., None]] = {
        number: lambda number, _: send(number) for number in _PASSED_ON if number not in ignored
    }
    # Ctrl-Z in a terminal, and fg.
    handlers[signal.SIGCONT] = lambda *_: send(signal.SIGCONT)
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        handlers[signal.SIGTSTP] = suspend
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _work(
    work: Callable[..., int],
    args: tuple[Any, ...],
    environment: Mapping[str, str],
    ignored: set[signal.Signals],
    server: Mapping[str, Any],
    tell: Any,
) -> None:
    """What runs in the fork."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(
        target=functools.partial(_die_after, parent), name="evenstep-parent", daemon=True
    ).start()
    # A signal to the whole group comes from the parent, and once.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # so that a terminal shows what this group prints
    for number in _PASSED_ON:
        # Python's own for SIGINT, as at the start of a process.
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    world.replace_environment(environment)
    _share_server(server)
    code = work(*args)
    tell.send(code)
    sys.exit(code)


def _die_after(parent: Any) -> None:
    """Wait for the end of the parent, and end this process, whose workers notice that."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _share_server(server: Mapping[str, Any]) -> None:
    """Have this process start its own processes in the fork server that it comes from.

    By the documentation of ``ensure_running`` it would anyway; up to Python 3.14 it starts a second one. That
    is done only when the first, which is the parent of this process, has died.
    """
    import multiprocessing.forkserver

    own: Any = multiprocessing.forkserver
    start, pid = own._forkserver.ensure_running, os.getppid()

    def ensure_running() -> None:
        if os.getppid() != pid:
            start()

    vars(own._forkserver).update(server)
    own._forkserver.ensure_running = own.ensure_running = ensure_running
    own.set_forkserver_preload(["evenstep.preload"])
