import sys

import pytest

from evenstep import hugepages
from scripts import run_script

linux = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")


@linux
def test_ranges_are_whole_huge_pages_of_private_memory():
    held = bytearray(16 << 20)
    found = hugepages.ranges()
    assert len(found) == len(set(found)) >= 7
    assert all(address % (2 << 20) == 0 for address in found)
    assert len(held) == 16 << 20


@linux
def test_room_is_asked_for_many_times_over():
    assert hugepages.is_room_for(0)
    assert not hugepages.is_room_for(1 << 60)


COLLAPSING = """
    import os, signal, sys, time
    from evenstep import hugepages

    def huge_kb():
        lines = open("/proc/self/smaps_rollup").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))

    held = bytearray(b"x") * (32 << 20)
    hugepages.AFTER_S = 0.01
    can = hugepages.collapse(hugepages.ranges()[0])
    before = huge_kb()
    hugepages.collapse_when_idle()
    assert huge_kb() == before  # not before the first fork
    pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL else 1)
    assert os.waitpid(pid, 0)[1] == 0, "a child has the timer's handler"
    end = time.monotonic() + 30
    while can and huge_kb() < before + (20 << 10) and time.monotonic() < end:
        time.sleep(0.02)
    print(can, huge_kb() - before)
"""


@linux
def test_memory_is_in_huge_pages_some_time_after_the_first_fork(tmp_path):
    done = run_script(COLLAPSING, path=tmp_path / "script.py", timeout=90)
    assert done.returncode == 0, done.stderr
    can, gained = done.stdout.split()
    if can == "False":
        pytest.skip("this kernel cannot collapse pages")
    assert int(gained) >= 20 << 10
