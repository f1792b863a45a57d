"""The layers of the package: a module imports only from its own layer and the ones above it in this list."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "evenstep"


def name_of(path):
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


# The files of evenstep init are a project of its own, outside the package.
PATHS = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "starter"]
MODULES = {name_of(path): path for path in PATHS}

LAYERS = {
    "values": ["errors", "recipes", "config", "flat", "schedulers", "together", "world", "machines"],
    "ground": [
        "files",
        "owners",
        "sharedmem",
        "heartbeat",
        "allocator",
        "seeding",
        "contents",
        "log",
        "guests",
        "devices",
        "precision",
    ],
    "sums": ["tree", "collectives"],
    "parts": [
        *(
            "agreement",
            "lanes",
            "wrapping",
            "handover",
            "globalnorm",
            "globallanes",
            "staging",
            "parameters",
            "passes",
            "objects",
            "storable",
            "manifest",
            "whitenet",
            "pooling",
            "models",
            "muon",
            "optim",
            "metrics",
            "writing",
            "checkpoint",
            "saving",
            "several",
            "unsaved",
            "export",
            "snapshot",
            "rescue",
            "recovery",
            "resuming",
        ),
        *(module for module in MODULES if module.partition(".")[0] == "data"),
    ],
    "the step": [
        "numerics",
        "position",
        "state",
        "views",
        "memory",
        "step",
        "evaluation",
        "objective",
        "drift",
        "predictions",
        "timing",
        "loop",
    ],
    "the run": [
        *("agent", "alone", "course", "mainmodule", "rendezvous", "verdict", "program", "stopping"),
        *(
            "jobs",
            "launcher",
            "worker",
            "channel",
            "relay",
            "preload",
            "apart",
            "stacks",
            "health",
            "failure",
            "banner",
            "reporter",
            "report",
        ),
        *("records", "watch", "track"),
    ],
    "tools": [
        *(m for m in MODULES if m.partition(".")[0] == "verify" and m != "verify.command"),
        *(m for m in MODULES if m.partition(".")[0] == "doctor"),
        *(m for m in MODULES if m.partition(".")[0] == "bench" and m != "bench.command"),
        "testing",
    ],
    "face": [
        "rundir",
        "runlock",
        "flags",
        "needs",
        "options",
        "inspection",
        "pages",
        "starting",
        "script",
        "completion",
        "cli",
        "verify.command",
        "bench.command",
        "__main__",
        "__init__",
    ],
}
LEVEL = {module: level for level, modules in enumerate(LAYERS.values()) for module in modules}
NO_TORCH = [
    "errors",
    "config",
    "flat",
    "schedulers",
    "world",
    "machines",
    "objects",
    "rundir",
    "runlock",
    "flags",
    "needs",
    "options",
    "cli",
    "script",
    "__main__",
    "apart",
    "relay",
    "banner",
    "reporter",
    "records",
    "report",
    "watch",
    "track",
    "pages",
    "starting",
    "completion",
    "inspection",
    "verify.command",
    "bench.command",
    "bench.plan",
    "bench.results",
    "bench.chart",
    "__init__",
]


def imported(node):
    """The full names that an import statement names; of ``from a import b`` also ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def type_checking_only(tree):
    """The nodes below ``if TYPE_CHECKING:``, which never run."""
    tests = (n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
    return {inner for test in tests for statement in test.body for inner in ast.walk(statement)}


def own_imports(tree):
    """Our modules that a module imports anywhere, in functions too."""
    skipped = type_checking_only(tree)
    names = {name for node in ast.walk(tree) if node not in skipped for name in imported(node)}
    inner = {name.removeprefix("evenstep.") for name in names if name.startswith("evenstep.")}
    return sorted(inner & MODULES.keys())


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_layer_or_above(module):
    assert module in LEVEL, f"{module} is in no layer: put it into LAYERS in this file, where it belongs"
    wrong = [
        other for other in own_imports(ast.parse(MODULES[module].read_text())) if LEVEL[other] > LEVEL[module]
    ]
    assert not wrong, f"{module} imports {wrong}, which are below it in the list of layers"


@pytest.mark.parametrize("module", [module for module in NO_TORCH if module in MODULES])
def test_no_torch_at_module_level(module):
    tree = ast.parse(MODULES[module].read_text())
    lazy = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    } | type_checking_only(tree)
    top = {name.partition(".")[0] for node in ast.walk(tree) if node not in lazy for name in imported(node)}
    assert not top & {"torch", "torchvision"}


def test_the_rule_catches_an_upward_import_in_a_function():
    tree = ast.parse("def f():\n    from evenstep import cli\n    from evenstep.options import parse\n")
    assert own_imports(tree) == ["cli", "options"]


def test_only_world_reads_the_environment():
    readers = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert readers == {"world"}
