"""What ``evenstep doctor`` checks in the user's own code: model, data and script."""

from __future__ import annotations

import ast
import io
import multiprocessing
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenstep.doctor.machine import Check, size
from evenstep.errors import EvenstepError

# Copies of the weights that an optimizer keeps, by its name.
_OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2, "muon": 1}
_STARTS_PROCESSES = ("spawn", "forkserver")


def check_model(spec: str, optimizer: str) -> tuple[Check, int]:
    """Whether the model can be made, and sent to a worker; returns the bytes of a checkpoint, too.

    Args:
        spec: as ``--model``.
        optimizer: its name.
    """
    from evenstep import models, program

    try:
        model = models.build(spec)
    except EvenstepError as error:
        return Check("model", "red", f"{spec} cannot be made", str(error)), 0
    except Exception as error:  # the user's code
        found = f"{spec} cannot be made: {_said(error)}"
        return Check("model", "red", found, "Correct it, or name another one with --model."), 0
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    num_bytes = weights + trained * _OPTIMIZER_COPIES[optimizer]
    text = f"{spec}: {models.num_parameters(model)[1]:,} parameters, {size(num_bytes)} a checkpoint"
    culprit = program.find_culprit("the model", model)
    if culprit is not None:
        found = f"{text}; {_not_picklable(culprit)}"
        fix = "evenstep train makes it in each worker. With evenstep.launch make it inside main, too."
        return Check("model", "yellow", found, fix), num_bytes
    return Check("model", "green", text), num_bytes


def check_data(spec: str, data_dir: str, workers: int, start_method: str | None = None) -> tuple[Check, int]:
    """Whether the data can be opened, and sent to DataLoader workers; returns the bytes of a sample, too.

    Args:
        spec: ``module:callable``, as ``--data``.
        data_dir: as ``--data-dir``.
        workers: DataLoader workers a process.
        start_method: how Python starts processes; by default asked.
    """
    from evenstep import program
    from evenstep.data.dataset import num_samples
    from evenstep.data.sources import open_source

    try:
        train = open_source(spec, data_dir=data_dir, cache_dir=None).train
        text = f"{spec}: {num_samples(train) or 'a stream of'} training samples"
        num_bytes = _sample_bytes(train)
    except EvenstepError as error:
        return Check("data", "red", f"{spec} cannot be opened", str(error)), 0
    except Exception as error:  # the user's code
        found = f"{spec} cannot be opened: {_said(error)}"
        return Check("data", "red", found, "Correct it, or name other data with --data."), 0
    culprit = program.find_culprit("the dataset", train, 0, _dump)
    if culprit is None:
        return Check("data", "green", text), num_bytes
    method = start_method or multiprocessing.get_start_method(allow_none=True) or _default_method()
    found = f"{text}; {_not_picklable(culprit)}"
    fix = (
        "Make it a function of a module, or open it in __getitem__ at first use. DataLoader workers that are "
        "started by spawn or forkserver (Python 3.14's default) get the dataset pickled; forked ones do not."
    )
    return Check("data", "red" if workers and method != "fork" else "yellow", found, fix), num_bytes


def check_guard(script: str) -> Check:
    """Whether a script can be run again from its top by the processes that it starts.

    evenstep.launch does not need ``if __name__ == "__main__"``, since its workers never run the script. Other
    processes do: those of multiprocessing (DataLoader workers among them) that are spawned, or started by a
    fork server.
    """
    try:
        text = Path(script).read_text(encoding="utf8")
        tree = ast.parse(text, script)
    except (OSError, SyntaxError, ValueError) as error:
        return Check("guard", "red", f"{script} cannot be read: {_said(error)}", "Correct --script.")
    if _has_guard(tree):
        return Check("guard", "green", f'{script} has if __name__ == "__main__"')
    calls = [line for statement in tree.body for line in _calls(statement)]
    if not calls:
        return Check("guard", "green", f"{script} only defines things; it needs no guard")
    found = f'{script} has no if __name__ == "__main__", and runs code at line {calls[0]} when it is imported'
    fix = f'Put line {calls[0]} and what follows under if __name__ == "__main__":'
    words = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    named = sorted({word for word in words if word in _STARTS_PROCESSES})
    if named:
        return Check("guard", "red", f"{found}; the processes it starts with {named[0]} run it again", fix)
    why = "evenstep.launch needs none; DataLoader workers started by spawn or forkserver do."
    return Check("guard", "yellow", found, f"{fix} {why}")


def check_script(script: str) -> Check:
    """Whether what a script defines can be sent to workers. Runs its top, as a spawned process would.

    A script without a guard is not run: it might begin to train.
    """
    from evenstep import program

    try:
        tree = ast.parse(Path(script).read_text(encoding="utf8"), script)
    except (OSError, SyntaxError, ValueError):
        return Check("script", "red", f"{script} cannot be read", "Correct --script.")
    if not _has_guard(tree) and any(line for statement in tree.body for line in _calls(statement)):
        found = f"{script} was not run: it has no guard, so it might begin to train"
        return Check("script", "yellow", found, 'Add if __name__ == "__main__": to have its objects checked.')
    module = types.ModuleType("evenstep_doctor_script")
    module.__file__ = script
    sys.path.insert(0, str(Path(script).absolute().parent))
    sys.modules[module.__name__] = module  # dataclasses look it up
    try:
        exec(compile(tree, script, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # the user's code may do anything, sys.exit among it
        return Check("script", "red", f"{script} fails at its top: {_said(error)}", "Correct the script.")
    finally:
        sys.path.pop(0)
        del sys.modules[module.__name__]  # so that its functions are pickled by value, as __main__'s are
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == module.__name__ and isinstance(value, types.FunctionType):
            culprit = program.find_culprit(name, value)
            if culprit is not None:
                fix = "Make this object inside the function that needs it, or pass what it is made from."
                return Check("script", "red", f"{script}: {_not_picklable(culprit)}", fix)
    return Check("script", "green", f"{script}: its functions can be sent to workers")


def _has_guard(tree: ast.Module) -> bool:
    tests = (ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If))
    return any("__name__" in test and "__main__" in test for test in tests)


def _calls(statement: ast.stmt) -> Iterator[int]:
    """Yield the lines of a statement at the top of a script that do something when it is imported."""
    if isinstance(
        statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    ):
        return
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return  # constants and objects: run again, but nothing is started
    if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
        yield statement.lineno


def _default_method() -> str:
    return str(multiprocessing.get_all_start_methods()[0])


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def _dump(obj: Any) -> None:
    """Pickle as DataLoader does, into nothing, and without copying arrays."""
    pickle.Pickler(_Nowhere(), protocol=5, buffer_callback=lambda buffer: None).dump(obj)


def _sample_bytes(dataset: Any) -> int:
    """Return the size of a sample's tensors and arrays; 0 if the dataset is a stream or has none."""
    if not hasattr(dataset, "__getitem__") or len(dataset) == 0:
        return 0
    sample = dataset[0]
    parts = sample if isinstance(sample, tuple | list) else [sample]
    return sum(int(getattr(part, "nbytes", 0)) for part in parts)


def _not_picklable(culprit: tuple[str, Any, Exception]) -> str:
    path, obj, error = culprit
    name = getattr(obj, "__qualname__", None)
    return (
        f"{path} is a {type(obj).__name__}{f' ({name})' if name else ''}, which cannot be pickled ({error})"
    )


def _said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
