import threading
from dataclasses import dataclass

import pytest

from evenstep.errors import ConfigError
from evenstep.launcher import launch
from scripts import CPU, run_script


@dataclass
class Point:
    x: int


def test_lambdas_closures_and_classes_travel_by_value():
    offset = 10

    class Local:
        def add(self, number):
            return number + offset

    local = Local()
    assert launch(lambda world, p: local.add(p.x), Point(5), nproc=1, **CPU) == 15


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def main(world):
        return lock

    with pytest.raises(ConfigError, match=r"variable 'lock' is a lock, which cannot be sent"):
        launch(main, nproc=1, **CPU)

    @dataclass
    class Settings:
        inner: dict

    with pytest.raises(ConfigError, match=r"argument 2 of main\.inner\['socket'\] is a lock"):
        launch(lambda world, a, b: 0, 1, Settings({"socket": lock}), nproc=1, **CPU)
    with pytest.raises(ConfigError, match="main is 3, which cannot be called"):
        launch(3, nproc=1)


def test_a_value_that_cannot_be_pickled_is_named():
    with pytest.raises(ConfigError, match="main returned a lock"):
        launch(lambda world: threading.Lock(), nproc=1, **CPU)


UNGUARDED = """
    import os, sys
    from pathlib import Path
    from evenstep.launcher import launch
    assert "torch" not in sys.modules
    class Mine:
        def __init__(self, rank): self.rank = rank
    def main(world):
        print(f"main ran on rank {world.rank}\\n", end="", flush=True)
        return Mine(world.rank)
    print("script ran", flush=True)
    before = dict(os.environ)
    file = __file__ if "__file__" in globals() else None
    for _ in range(2):
        value = launch(main, nproc=2, device="cpu", threads=1)
        assert type(value).__name__ == "Mine" and value.rank == 0
    assert dict(os.environ) == before
    assert (__file__ if "__file__" in globals() else None) == file
    assert __spec__ is None
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_a_script_without_a_guard_runs_once(stdin, tmp_path):
    done = run_script(UNGUARDED, stdin=stdin, path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [
        *["main ran on rank 0"] * 2,
        *["main ran on rank 1"] * 2,
        "script ran",
    ]
