"""What is in the sdist and in the wheel, and that every Python that is claimed reads the sources."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from evenstep.flat import tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "evenstep"
LEFT_OUT = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def build(kind, source, target):
    """Build as pip and ``python -m build`` do, but without a fresh environment, so without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = target.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("dist")
    sdist = build("sdist", ROOT, directory)
    with tarfile.open(sdist) as archive:
        archive.extractall(directory / "unpacked", filter="data")
    (source,) = (directory / "unpacked").iterdir()
    return sdist, build("wheel", source, directory)


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_package_and_nothing_else(built):
    found = names(built[1])
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and not LEFT_OUT & {*path.parts}}
    expected = {f"evenstep/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in files}
    assert {name for name in found if name.startswith("evenstep/")} == expected.keys()
    assert all(found[name] == content for name, content in expected.items())
    for name in (
        "py.typed",
        "data/digits.npz",
        "page/uplot.js",
        "page/uplot-LICENSE.txt",
        "starter/run.toml",
    ):
        assert f"evenstep/{name}" in found
    rest = {name.split("/", 1)[1] for name in found if not name.startswith("evenstep/")}
    assert rest == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_wheel_from_the_sdist_is_that_from_the_checkout(built, tmp_path):
    assert names(built[1]) == names(build("wheel", ROOT, tmp_path))


def test_the_sdist_has_what_the_tests_need_and_no_large_files(built):
    with tarfile.open(built[0]) as archive:
        found = {member.name.split("/", 1)[1]: member.size for member in archive.getmembers()}
    for name in (
        "tests/test_packaging.py",
        "docs/generate.py",
        "examples/own_loop.py",
        "benchmarks/drift.py",
    ):
        assert name in found
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "PKG-INFO",
        "constraints.txt",
        ".ci/run",
    } <= found.keys()
    assert not [name for name in found if re.search(r"\.venv|\.pyc$|\.so$|runs/|\.egg-info", name)]
    assert max(found.values()) < 3_000_000


def test_every_package_that_is_imported_is_a_dependency():
    """Not the other way round, too: torch needs some by itself, and triton is only looked at."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in asked}
    imported = {
        name.partition(".")[0]
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "starter"
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    names = {"PIL": "pillow", "pynvml": "nvidia_ml_py"}  # where a package is not called as its distribution
    others = {names.get(name, name) for name in imported - sys.stdlib_module_names - {"evenstep"}}
    assert others <= declared, others - declared


def test_the_metadata(built):
    (text,) = (content for name, content in names(built[1]).items() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(text)
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) >= {"gpu", "tensorboard", "track", "report"}
    pythons = {c.rpartition(" ")[2] for c in metadata.get_all("Classifier") if ":: Python :: 3." in c}
    assert pythons == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_python_on_this_machine_reads_the_sources(version, tmp_path):
    python = shutil.which(f"python{version}")
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        python = sys.executable
    works = python and subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0
    if not works:
        pytest.skip(f"no Python {version} on this machine")
    command = [python, "-W", "error", "-m", "compileall", "-q", "src", "examples", "tests"]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
