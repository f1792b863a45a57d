"""Imported by the fork server alone: everything that a worker needs, so that a worker starts in milliseconds.

A module that cannot be imported must not end the fork server; the worker that needs it says what is wrong.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import time

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
for _number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_IGN)

# SIGINT stays blocked, too: at Ctrl-C the imports below would end with a traceback. multiprocessing ignores
# it later, but gives what it forks the handler of now, which is Python's own; the mask is taken off here.
_SERVER = os.getpid()


def _heed_ctrl_c() -> None:
    if os.getppid() == _SERVER:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


os.register_at_fork(after_in_child=_heed_ctrl_c)

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
