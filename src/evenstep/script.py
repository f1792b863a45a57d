"""The command ``evenstep run``: a script of one's own, with the fork server started before it.

A script that calls evenstep.launch has imported torch by then, which takes it a second, and only then would
the fork server begin to import it, too. Here the two imports run side by side. All else is as with python:
the script is the ``__main__`` of this process, whose output, errors, signals, input and end are the script's.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from evenstep.errors import ConfigError, MachineError, did_you_mean

HELP = """\
usage: evenstep run SCRIPT [ARGS]
       evenstep run -m MODULE [ARGS]

Run a script of your own that calls evenstep.launch, as python would run it, and have its processes ready
sooner: what they need is imported at once, beside what the script imports. The words behind SCRIPT or MODULE
are the script's. Environment variables that torch reads when it is imported must be set before, not in the
script. Under torchrun it runs the script and nothing else.
"""


def run(argv: Sequence[str]) -> int:
    """Run ``evenstep run SCRIPT [ARGS]`` or ``evenstep run -m MODULE [ARGS]`` in this process.

    Returns:
        The exit code that the script would have with ``python``: its own, or 1 after an error, which is
        printed as Python prints it; 130 after an interrupt that it let through (see :func:`end`).

    Raises:
        ConfigError: there is no such script or module.
        MachineError: the script cannot be read.
    """
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(HELP)
        return 0
    is_module = words[:1] == ["-m"]
    if is_module:
        words.pop(0)
    if not words or words[0].startswith("-"):
        got = words[0] if words else "nothing"
        raise ConfigError(
            f"evenstep run needs a script, or -m and a module, and got {got}. Use evenstep run SCRIPT [ARGS] "
            "(flags of the script go behind it, those of Python in front: python -O -m evenstep run SCRIPT)."
        )
    path = Path(words[0])
    code = None if is_module else _code(path)
    sys.argv = words
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # then Python puts nothing there
        sys.path[0] = str(Path.cwd() if code is None else path.resolve().parent)
    if code is None:
        _check_module(words[0])
    from evenstep.launcher import warm_up

    warm_up()
    try:
        if code is None:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            _run_file(str(path.absolute()), code)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:
        # As Python does; but the first two frames of the trace are not the script's.
        trace = error.__traceback__
        error.__traceback__ = trace = trace and trace.tb_next and trace.tb_next.tb_next
        sys.excepthook(type(error), error, trace)
        if not isinstance(error, KeyboardInterrupt):
            return 1
        _interrupts.append(error)
        return 130
    return 0


_interrupts: list[KeyboardInterrupt] = []


def end(code: int) -> NoReturn:
    """End this process as Python does after a script: with its exit code, or by SIGINT after an interrupt.

    So a loop in a shell ends with the script that Ctrl-C ended. What is to be done at the end is done before.
    """
    if not _interrupts:
        sys.exit(code)
    hook = sys.excepthook

    def hooked(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if error is not _interrupts[0]:  # which has been printed
            hook(kind, error, trace)

    sys.excepthook = hooked
    raise _interrupts[0]


def _run_file(path: str, code: bytes) -> None:
    """Run a script as Python does: in a module that stays ``__main__`` until the end of the process."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    exec(compile(code, path, "exec", dont_inherit=True), vars(main))


def _code(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        there = [str(near) for near in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(
            f"evenstep run: there is no script {path}.{did_you_mean(str(path), there)} Give its path. A "
            "module of Python's path is run with evenstep run -m MODULE."
        ) from None
    except OSError as error:
        raise MachineError(
            f"evenstep run: cannot read {path}: {error.strerror}. Give the path of a script that can be read."
        ) from None


def _check_module(name: str) -> None:
    """Raise ConfigError if the package or module is not there; what is inside a package is found later."""
    top = name.partition(".")[0]
    if top not in sys.modules and (not top or importlib.util.find_spec(top) is None):
        raise ConfigError(
            f"evenstep run: there is no module {name!r} in {Path.cwd()} or elsewhere in Python's path. Start "
            "where the module is, or give the path of a script: evenstep run SCRIPT."
        )
