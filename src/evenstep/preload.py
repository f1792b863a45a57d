"""Imported by the fork server alone: everything that a worker needs, so that a worker starts in milliseconds.

A module that cannot be imported must not end the fork server; the worker that needs it says what is wrong.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import time
from typing import Any

# torch._dynamo is imported by the constructor of DistributedDataParallel, which takes about a second.
MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "numpy",
    "loguru",
    "cloudpickle",
    "evenstep",
    "evenstep.cli",
    "evenstep.agent",
    "evenstep.worker",
    "evenstep.jobs",
    "evenstep.loop",
    "evenstep.data.digits",
)

# As for the helper processes in launcher.warm_up, whose mask of blocked signals the workers take off.
_before = {
    number: signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
}

# SIGINT stays blocked, too: at Ctrl-C the imports below would end with a traceback. multiprocessing ignores
# it later, but gives what it forks the handler of now, which is Python's own; the mask is taken off here.
_SERVER = os.getpid()


def _heed_ctrl_c() -> None:
    if os.getppid() == _SERVER:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


os.register_at_fork(after_in_child=_heed_ctrl_c)


def _heed_signals(_: object) -> None:
    """Give a process that the script itself has started in this server the signals of any other process.

    A Pool ends its processes with SIGTERM, and would wait for ever. Workers and the launching process set
    theirs when they are ready for them; until then a signal to the whole group must not end them.
    """
    if os.getppid() != _SERVER:  # started by a process that has come by here, and as that one is
        return
    process: Any = multiprocessing.current_process()
    started = (process._target, *process._args[:1])  # torch wraps what it starts, and so does its agent
    if not _OURS.isdisjoint(getattr(what, "__module__", None) for what in started):
        return
    for number, handler in _before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _before)


_OURS = {"torch.distributed.elastic.multiprocessing.api", "evenstep.apart"}
# Called when the process knows what it is to run, before that begins.
multiprocessing.util.register_after_fork(_heed_signals, _heed_signals)

_GONE_TRIES, _GONE_EVERY_S = 100, 0.005
_parent = os.getppid()


def _end() -> None:
    """Remove what the launching process has left if it was killed, and end.

    Taking torch apart would take a second. Workers do not come by here: multiprocessing ends them itself.
    """
    with contextlib.suppress(Exception):
        from evenstep import sharedmem

        for _ in range(_GONE_TRIES):  # its files are closed a little before it is gone
            if os.getppid() != _parent or not sharedmem.is_alive(_parent):
                break
            time.sleep(_GONE_EVERY_S)
        sharedmem.remove_leftovers()
    os._exit(0)


atexit.register(_end)

# Imports make many objects and hardly any garbage; looking for it takes a quarter of the time. What there
# is then stays for good: workers that looked through it would each copy the pages that it is on.
gc.disable()
for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
gc.freeze()
gc.enable()
