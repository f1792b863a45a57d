import os
import sys
import time

import pytest

from evenstep.errors import ConfigError, DivergedError, MachineError, WorkerError
from evenstep.launcher import launch
from evenstep.testing import run_ranks
from scripts import CPU, run_script


def fail_on(rank, error):
    def main(world):
        if world.rank == rank:
            raise error
        time.sleep(600)

    return main


def test_an_error_is_raised_with_the_users_line_and_ends_the_others():
    with pytest.raises(WorkerError) as caught:
        launch(fail_on(1, ValueError("seven is wrong")), nproc=2, grace_s=1.0, **CPU)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed: ValueError: seven is wrong"
    assert "test_worker.py:" in lines[1]
    assert lines[1].endswith("in main: raise error")
    assert lines[2:] == ["rank 0 was stopped"]
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


@pytest.mark.parametrize(("kind", "code"), [(DivergedError, 5), (ConfigError, 2), (MachineError, 3)])
def test_our_own_errors_keep_class_text_and_exit_code(kind, code):
    with pytest.raises(kind, match=r"^the loss is nan$") as caught:
        launch(fail_on(0, kind("the loss is nan")), nproc=2, **CPU)
    assert caught.value.exit_code == code
    assert str(caught.value.__cause__).startswith(f"rank 0 failed: {kind.__name__}: the loss is nan")


def test_a_workers_exit_code_is_kept():
    with pytest.raises(WorkerError, match="rank 0 failed: SystemExit: 7") as caught:
        launch(lambda world: sys.exit(7), nproc=1, **CPU)
    assert caught.value.exit_code == 7
    assert launch(lambda world: sys.exit(0), nproc=1, **CPU) is None


def test_the_log_holds_the_traceback(tmp_path):
    with pytest.raises(WorkerError) as caught:
        launch(fail_on(0, ValueError("to the log")), nproc=2, run_dir=str(tmp_path), grace_s=1.0, **CPU)
    assert str(caught.value).splitlines()[-1] == f"log: {tmp_path}/logs/rank0.log"
    assert "ValueError: to the log" in (tmp_path / "logs" / "rank0.log").read_text()
    assert "rank 0 failed: ValueError" in (tmp_path / "logs" / "launcher.log").read_text()


TORCHRUN = """
    import os
    from evenstep.launcher import launch

    def main(world, fail):
        import torch
        if world.restart == 0 and fail:
            os._exit(9) if world.rank == 1 else None
        total = torch.tensor([world.rank + 1.0])
        torch.distributed.all_reduce(total)
        if not fail and world.rank == 1:
            raise ValueError("wrong under torchrun")
        return total.item(), world.world_size, world.restart

    value = launch(main, True, device="cpu", threads=1, timeout_s=20.0)
    os.write(1, f"{value}\\n".encode())  # whole lines: print may write the line end apart
    launch(main, False, device="cpu", threads=1, timeout_s=20.0)
"""


def test_under_torchrun_a_process_is_a_worker_at_once(tmp_path):
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
        *("--nproc-per-node", "2", "--monitor-interval", "0.05"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = run_script(TORCHRUN, path=tmp_path / "script.py", command=torchrun, env=environment, timeout=120)
    assert done.stdout.splitlines() == ["(3.0, 2, 1)"] * 2, done.stderr
    assert done.returncode != 0
    assert done.stderr.count("rank 1 failed: ValueError: wrong under torchrun") == 1


def test_a_handle_makes_no_sense_under_torchrun(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="join=False needs this process to launch the workers"):
        launch(lambda world: None, join=False)


def test_run_ranks_ends_a_hanging_collective():
    def main(world):
        import torch

        if world.rank == 0:
            torch.distributed.barrier()
        else:
            world.receive()

    with pytest.raises(WorkerError, match=r"rank 0 failed: .*imed out"):
        run_ranks(main, 2, timeout_s=1.0)


def test_idle_gpus_are_not_chosen_by_each_process_alone(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--gpus idle:1 under environment: each process would choose"):
        launch(lambda world: None, gpus="idle:1")
