import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from conftest import descendants, gone_within
from evenstep import Loader, TrainState, checkpoint, cross_entropy, train_step
from evenstep.errors import StoppedError
from evenstep.launcher import launch
from evenstep.testing import run_ranks
from scripts import CPU, start_script
from worlds import SmallNet, digest, images

SHARED = Path("/dev/shm")


def endless(world, pause_s=0.0, workers=0):
    """Train without end, and tell the parent of each step."""
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    data = images() if workers == 0 else torch.utils.data.TensorDataset(*tensors())
    with Loader(data, 50, workers=workers) as loader:
        for batch in loader.batches(state):
            train_step(state, batch, cross_entropy())
            world.send((world.rank, state.step, os.getpid()))
            time.sleep(pause_s)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(205, 3, 16, 16, generator=generator), torch.randint(0, 10, (205,), generator=generator)


def signalled_rank(number, tmp_path, **options):
    """Send a signal to rank 1 after some steps; return the step of the checkpoint."""
    pids = {}
    enough = threading.Event()

    def on_message(rank, told):
        pids[rank] = told[2]
        if told[1] >= 3 and len(pids) == 2 and not enough.is_set():
            enough.set()
            os.kill(pids[1], number)

    with pytest.raises(
        StoppedError, match=r"asked to stop: all ranks stopped and saved after step \d+"
    ) as caught:
        launch(endless, 0.01, nproc=2, run_dir=str(tmp_path), on_message=on_message, **CPU, **options)
    assert caught.value.exit_code == 75
    (path,) = (tmp_path / "checkpoints").iterdir()
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(number, tmp_path):
    path = signalled_rank(number, tmp_path)
    assert checkpoint.load(path).step >= 3


def signalled_while_saving(world, who):
    """Ranks get SIGTERM in step 3, and rank 0 takes a second to write its checkpoint."""
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    write = state._saver.save

    def slow(*args, **values):
        time.sleep(1.0)
        return write(*args, **values)

    state._saver.save = slow
    for batch in Loader(images(), 50).batches(state, steps=20):
        if batch.step == 3 and world.rank in who:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(state, batch, cross_entropy())


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_the_rank_that_saves_is_not_ended_by_the_end_of_the_others(who, tmp_path):
    """They end long before it has saved, and torch's agent then sends SIGTERM to it, as after a death."""
    with pytest.raises(StoppedError, match="all ranks stopped and saved after step 4"):
        launch(signalled_while_saving, who, nproc=2, run_dir=str(tmp_path), **CPU)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_handle_stops_after_a_step_and_saves(tmp_path):
    stepped = threading.Event()
    handle = launch(
        *(endless, 0.01, 2),
        nproc=2,
        run_dir=str(tmp_path),
        join=False,
        on_message=lambda *_: stepped.set(),
        **CPU,
    )
    assert stepped.wait(60)
    handle.stop()
    with pytest.raises(StoppedError, match="all ranks stopped and saved after step"):
        handle.wait()
    assert checkpoint.latest(tmp_path) is not None


def trained_to(world, steps, run_dir):
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    seen = []
    for batch in Loader(images(), 50).batches(state, steps=steps):
        if world.run_dir and not world.resume and batch.step == 3 and world.rank == 1:
            world.stop.set()
        train_step(state, batch, cross_entropy())
        seen.append(batch.step)
    return digest(state), seen


def test_a_stopped_run_gets_its_last_batch_once_more_and_has_the_same_bits(tmp_path):
    """What the loop does after a step, an evaluation say, would be left out otherwise."""
    with pytest.raises(StoppedError, match="after step 4"):
        run_ranks(trained_to, 2, 8, None, lanes=2, run_dir=str(tmp_path))
    resumed = run_ranks(trained_to, 2, 8, None, lanes=2, run_dir=str(tmp_path), resume=True)
    straight = run_ranks(trained_to, 2, 8, None, lanes=2)
    assert resumed == [(straight[0][0], [3, 4, 5, 6, 7])] * 2


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from evenstep.errors import StoppedError
    from evenstep.launcher import launch
    from test_stopping import endless

    def started(rank, told):
        if rank == 1 and told[1] == 2:
            print("started", flush=True)

    try:
        options = dict(nproc=2, device="cpu", threads=1, run_dir={run_dir!r}, on_message=started)
        launch(endless, 0.01, {workers}, **options)
    except StoppedError as error:
        print("stopped", error, flush=True)
        sys.exit(error.exit_code)
"""


def start(tmp_path, workers=0):
    text = SCRIPT.format(tests=str(Path(__file__).parent), workers=workers, run_dir=str(tmp_path / "run"))
    process = start_script(tmp_path / "script.py", text)
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_to_the_whole_group_saves_and_ends(number, code, tmp_path):
    """As a terminal and Slurm do it: the launching process, the workers and all helpers get the signal."""
    process = start(tmp_path, workers=2 if number == signal.SIGTERM else 0)
    with process:
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")
    assert output.startswith("stopped asked to stop: all ranks stopped and saved after step")
    assert checkpoint.latest(tmp_path / "run") is not None


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(tmp_path):
    text = """
        import os, sys, time
        sys.path.insert(0, {tests!r})
        import torch
        from evenstep import TrainState
        from evenstep.launcher import launch

        def main(world):
            model = torch.nn.Linear(2, 2)
            state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
            os.write(1, f"{{world.recovery.directory}}\\n".encode())
            time.sleep(600)

        launch(main, nproc=2, device="cpu", threads=1)
    """
    process = start_script(tmp_path / "script.py", text.format(tests=str(Path(__file__).parent)))
    with process:
        directory = Path(process.stdout.readline().strip())
        process.stdout.readline()
        assert directory.stat().st_mode & 0o777 == 0o700
        everybody = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)  # also from the command's own process, when a signal is sent to all by their name
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None  # it waits for the end of the step
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert not directory.exists()
    assert not gone_within(lambda: [pid for pid in everybody if pid in descendants(1)])


def test_a_save_is_waited_for_however_short_the_grace_time_is(tmp_path):
    def main(world):
        model = SmallNet()
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        write = state._saver.save

        def slow(*args, **values):
            if world.is_first:
                world.send("saving")
                time.sleep(4.0)
            return write(*args, **values)

        state._saver.save = slow
        for batch in Loader(images(), 50).batches(state):
            train_step(state, batch, cross_entropy())
            state.save()

    saving = threading.Event()
    options = {"run_dir": str(tmp_path), "stop_grace_s": 3.0, "on_message": lambda *_: saving.set(), **CPU}
    handle = launch(main, nproc=2, join=False, **options)
    assert saving.wait(60)
    handle.stop()
    with pytest.raises(StoppedError, match="all ranks stopped and saved after step 2"):
        handle.wait()


def test_a_main_that_never_steps_is_ended_after_the_grace_time(tmp_path):
    def main(world):
        model = torch.nn.Linear(2, 2)
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        world.send("here")
        time.sleep(600)
        return state

    here = threading.Event()
    handle = launch(main, nproc=1, join=False, stop_grace_s=0.5, on_message=lambda *_: here.set(), **CPU)
    assert here.wait(30)
    handle.stop()
    with pytest.raises(StoppedError, match=r"stopped with handle\.stop"):
        handle.wait()


def test_the_slurm_example_asks_for_the_signal_in_time_and_runs_again():
    text = (Path(__file__).parent.parent / "examples" / "slurm" / "train.sbatch").read_text()
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for needed in ("#SBATCH --signal=USR1@60", "#SBATCH --requeue", "#SBATCH --open-mode=append"):
        assert needed in directives
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text
    assert "-eq 75" in text
    assert "--resume" in text
