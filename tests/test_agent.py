import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from conftest import descendants, gone_within
from evenstep.errors import WorkerError
from evenstep.launcher import launch
from evenstep.testing import run_ranks
from scripts import CPU, run_script, start_script


def test_death_by_signal_is_named_and_not_taken_for_the_peers_error():
    def main(world):
        import torch

        torch.distributed.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(8))

    with pytest.raises(WorkerError, match=r"^rank 1 was killed by SIGKILL") as caught:
        launch(main, nproc=3, grace_s=1.0, **CPU)
    assert (caught.value.rank, caught.value.exit_code) == (1, 137)
    assert "ranks 0 and 2 were stopped" in str(caught.value)


def test_leaving_in_the_middle_is_noticed():
    def main(world):
        if world.rank == 1:
            os._exit(0)
        time.sleep(600)

    with pytest.raises(WorkerError, match=r"^rank 1 left with exit code 0 before its main returned"):
        launch(main, nproc=2, grace_s=0.3, **CPU)


def test_a_worker_that_ignores_sigterm_does_not_outlast_a_failure():
    def main(world):
        if world.rank == 1:
            world.receive(20)
            raise ValueError("enough")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        world.send("deaf")
        time.sleep(600)

    handle = launch(main, nproc=2, join=False, grace_s=0.3, on_message=lambda *_: handle.send("fail"), **CPU)
    with pytest.raises(WorkerError, match="rank 1 failed: ValueError: enough"):
        handle.wait(30)


def test_restarts_after_a_death_but_not_after_an_error():
    def main(world):
        if world.restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.restart == 1:
            raise ValueError("not again")

    with pytest.raises(WorkerError, match="ValueError: not again"):
        launch(main, nproc=1, max_restarts=5, **CPU)

    def recovers(world):
        import torch

        if world.restart < 2 and world.rank == world.restart:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return world.restart, total.item()

    assert run_ranks(recovers, 2, max_restarts=2, grace_s=1.0) == [(2, 2.0), (2, 2.0)]


LISTENING = """
    import os
    from pathlib import Path
    from evenstep.launcher import launch

    def listening(pid):
        inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        found = []
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(fields[1].partition(":")[0])
        return found

    def main(world, parent):
        import torch
        torch.distributed.all_reduce(torch.ones(4))
        return listening(os.getpid()) + listening(parent)

    print(launch(main, os.getpid(), nproc=2, device="cpu", threads=1))
"""


def test_a_run_listens_on_loopback_only(tmp_path):
    done = run_script(LISTENING, path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    addresses = eval(done.stdout)
    assert set(addresses) == {"0100007F"}  # 127.0.0.1; the two sockets of gloo


STUCK = """
    import os, time
    from evenstep.launcher import launch

    def main(world):
        import torch
        try:
            os.write(1, f"{os.getpid()}\\n".encode())  # print may write the line end apart
            if world.rank == 0:
                torch.distributed.all_reduce(torch.ones(4))  # rank 1 never comes
            time.sleep(600)
        finally:
            print("cleaned", flush=True)

    launch(main, nproc=2, device="cpu", threads=1, grace_s=2.0)
"""


def started(tmp_path):
    process = start_script(tmp_path / "script.py", STUCK)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    return process, pids


def alive(pids):
    """Which of the processes live; a zombie does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def test_kill_9_of_the_launching_process_leaves_nothing_behind(tmp_path, own_temporary_directory):
    process, pids = started(tmp_path)
    everybody = [*descendants(process.pid), *pids]
    directories = list(Path(own_temporary_directory).glob("evenstep-*"))
    assert len(directories) == 2  # the run's, and that of multiprocessing's sockets
    assert {directory.stat().st_mode & 0o777 for directory in directories} == {0o700}
    with process:
        process.kill()
    assert not gone_within(lambda: alive(everybody), 5.0)
    assert not gone_within(lambda: list(Path(own_temporary_directory).glob("evenstep-*")))


def test_ctrl_c_ends_everything(tmp_path):
    process, pids = started(tmp_path)
    with process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        output, errors = process.communicate(timeout=30)
    # Python itself ends by SIGINT after a KeyboardInterrupt, which a shell shows as 130.
    assert process.returncode == -signal.SIGINT
    assert "cleaned" in output
    assert errors.count("Traceback") == 1
    assert not gone_within(lambda: alive(pids))


def test_sigterm_ends_everything(tmp_path):
    process, pids = started(tmp_path)
    with process:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == ""
    assert not gone_within(lambda: alive(pids))


def test_a_long_name_of_the_temporary_directory_does_not_matter(monkeypatch, tmp_path):
    """A Unix socket's path may have about a hundred characters."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert launch(lambda world: 1, nproc=1, **CPU) == 1


@pytest.mark.parametrize("is_own", [False, True])
def test_faulthandlers_own_signal_stays(is_own, tmp_path):
    text = f"""
        import contextlib, faulthandler, os, signal, sys
        from evenstep import agent
        if {is_own}:
            faulthandler.register(signal.SIGQUIT)
        run = agent.Run.__new__(agent.Run)
        run._on_signal = lambda number, frame: print("launch's", flush=True)
        for _ in range(2):
            with run._signals_handled():
                os.kill(os.getpid(), signal.SIGQUIT)
        if {is_own}:
            os.kill(os.getpid(), signal.SIGQUIT)
        print("ended")
    """
    done = run_script(text, path=tmp_path / "s.py", timeout=120)
    dumps = done.stderr.count("most recent call first")
    assert (done.stdout, dumps) == (("ended\n", 3) if is_own else ("launch's\n" * 2 + "ended\n", 0))
    assert done.returncode == 0
