"""Every public name is in the reference, and its docstring says what goes in, comes out and is raised."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from pathlib import Path

import pytest

import evenstep
from evenstep import errors, evaluation, launcher, loop, optim, step, testing
from evenstep.data import batch, sources

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
ENTRY = re.compile(r"^\.\. auto\w+:: ([\w.]+)$", re.M)
SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns|Yields):$")
# Public beside the names in evenstep.__all__: what these modules have that users import.
FURTHER = {
    "evenstep.data.batch.LaneBatch": batch.LaneBatch,
    "evenstep.data.sources.Prepared": sources.Prepared,
    "evenstep.data.sources.Source": sources.Source,
    "evenstep.data.sources.open_source": sources.open_source,
    "evenstep.data.sources.prepare": sources.prepare,
    "evenstep.evaluation.Metrics": evaluation.Metrics,
    "evenstep.launcher.LaunchOptions": launcher.LaunchOptions,
    "evenstep.loop.FitResult": loop.FitResult,
    "evenstep.loop.Watcher": loop.Watcher,
    "evenstep.optim.Schedule": optim.Schedule,
    "evenstep.optim.make_optimizer": optim.make_optimizer,
    "evenstep.step.Loss": step.Loss,
    "evenstep.testing.KillAt": testing.KillAt,
    "evenstep.testing.POINTS": testing.POINTS,
    "evenstep.testing.kill_at": testing.kill_at,
    "evenstep.testing.run_ranks": testing.run_ranks,
}
ERRORS = {f"evenstep.errors.{name}": value for name, value in vars(errors).items() if name.endswith("Error")}
PUBLIC = {
    **{f"evenstep.{name}": getattr(evenstep, name) for name in evenstep.__all__},
    **FURTHER,
    **ERRORS,
}


def callables():
    """Every public function, class and method, as (name, object)."""
    for name, value in PUBLIC.items():
        if inspect.isclass(value):
            yield name, value
            for key, member in vars(value).items():
                if not key.startswith("_"):
                    member = getattr(member, "__func__", member)  # of a class method
                    member = member.fget if isinstance(member, property) else member
                    if inspect.isfunction(member):
                        yield f"{name}.{key}", member
        elif inspect.isfunction(value):
            yield name, value


def sections(docstring):
    """``{section: its text}`` of a Google docstring; the text before the first is under an empty name."""
    found, current = {"": ""}, ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        head = SECTION.match(line)
        if head:
            current = head[1]
            found[current] = ""
        elif line and not line.startswith(" ") and current:
            current = ""
        else:
            found[current] += line + "\n"
    return {name: textwrap.dedent(text) for name, text in found.items()}


def entries(text):
    """The names that a section explains: ``name: ...`` or ``name, name: ...`` at the beginning of a line."""
    heads = re.findall(r"^(\*{0,2}\w[\w, *]*)(?: \([^)]*\))?:", text, re.M)
    return {name.strip(" *") for head in heads for name in head.split(",")}


def fields_with_text(cls):
    """The fields that have a docstring of their own, below their line."""
    (body,) = (
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        if isinstance(node, ast.ClassDef)
    )
    return {
        node.target.id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def parameters(function):
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def raised(function):
    """The errors that a function raises itself, by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    return {node.func.id for node in found if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def gaps(name, value):
    """What the docstring of a function, method or class does not say."""
    text = sections(value.__doc__)
    if not text[""].strip():
        return [f"{name} has no docstring"]
    if inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            names = {f.name for f in dataclasses.fields(value) if f.repr and not f.name.startswith("_")}
            missing = names - entries(text.get("Attributes", "")) - fields_with_text(value)
            return [f"{name}: no word on the attribute {each}" for each in sorted(missing)]
        # Nobody makes these by hand.
        is_made = "__init__" in vars(value) and name not in ("evenstep.Handle", *ERRORS)
        if not is_made or getattr(value, "_is_protocol", False):
            return []
        function = value.__init__
    else:
        function = value
    missing = set(parameters(function)) - entries(text.get("Args", ""))
    found = [f"{name}: no word on the argument {each}" for each in sorted(missing)]
    if function is value:
        returns = str(inspect.signature(function).return_annotation)
        says = {"Returns", "Yields"} & text.keys() or re.match(
            r"(Return|Yield|Whether|The|Wait|Run|Make|Samples|Steps|None)", text[""]
        )
        if returns not in ("None", "NoReturn") and not says:
            found.append(f"{name}: no word on what it returns")
    for each in sorted(raised(function) - entries(text.get("Raises", ""))):
        if each not in ("AttributeError", "NotImplementedError"):
            found.append(f"{name}: no word on raising {each}")
    return found


@pytest.mark.parametrize(("name", "value"), [pytest.param(*each, id=each[0]) for each in callables()])
def test_a_docstring_says_what_goes_in_comes_out_and_is_raised(name, value):
    assert gaps(name, value) == []


def test_every_public_name_is_in_the_reference():
    shown = [entry for page in REFERENCE.glob("*.md") for entry in ENTRY.findall(page.read_text())]
    assert len(shown) == len(set(shown))
    again = {"evenstep.EvenstepError"}  # among the errors
    assert set(shown) == PUBLIC.keys() - again


def test_a_gap_is_found():
    def without(a: int, b: int) -> int:
        """Add.

        Args:
            a: a number.
        """
        if a < 0:
            raise ValueError(a)
        return a + b

    assert gaps("without", without) == [
        "without: no word on the argument b",
        "without: no word on what it returns",
        "without: no word on raising ValueError",
    ]
