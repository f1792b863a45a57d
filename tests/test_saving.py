import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from evenstep import Loader, TrainState, checkpoint, cross_entropy, train_step
from evenstep.errors import ConfigError, MachineError
from evenstep.saving import Saver
from evenstep.testing import run_ranks
from evenstep.world import World
from evenstep.writing import gather
from worlds import SmallNet, images


class Gate:
    """Holds the writer of checkpoints back until it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.begun = threading.Event()
        write = checkpoint.write_files

        def wait_and_write(*args):
            self.begun.set()
            assert self.opened.wait(30)
            return write(*args)

        monkeypatch.setattr(checkpoint, "write_files", wait_and_write)


def values(step, tensor):
    training = {"momentum": [tensor.view(2, -1)], "step": step}
    return {
        "step": step,
        "model": {"w": tensor, "t": tensor[::2]},
        "training": training,
        "meta": {"epoch": 0},
    }


def steps(run_dir):
    return [info.step for info in checkpoint.ls(run_dir)]


def test_training_goes_on_and_does_not_change_what_is_written(tmp_path, monkeypatch):
    gate, world = Gate(monkeypatch), World()
    saver, tensor = Saver(world), torch.arange(10.0)
    saver.save(tmp_path, keep=3, **values(1, tensor))
    assert gate.begun.wait(30)
    assert saver.take_saved() == []
    assert world.pending == {saver}
    tensor.fill_(-1)
    gate.opened.set()
    world.finish()
    (saved,) = saver.take_saved()
    assert (saved.step, saved.epoch) == (1, 0)
    loaded = checkpoint.load(saved.path)
    assert loaded.model["w"].tolist() == list(range(10))
    assert loaded.model["t"].tolist() == [0, 2, 4, 6, 8]
    assert loaded.training["momentum"][0].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert world.pending == set()
    assert saver.take_saved() == []


def test_a_second_save_waits_for_the_first_before_it_copies(tmp_path, monkeypatch):
    gate, saver, tensor = Gate(monkeypatch), Saver(World()), torch.zeros(4)
    saver.save(tmp_path, keep=3, **values(1, tensor))
    assert gate.begun.wait(30)
    second = threading.Thread(target=lambda: saver.save(tmp_path, keep=3, **values(2, tensor)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    tensor.fill_(7)  # the second save has taken nothing yet
    gate.opened.set()
    second.join()
    saver.wait()
    assert [saved.step for saved in saver.take_saved()] == [1, 2]
    assert checkpoint.load(tmp_path / "checkpoints/step-00000002").model["w"].tolist() == [7] * 4


def test_one_failure_is_survived_and_the_second_in_a_row_is_raised(tmp_path, monkeypatch):
    saver, tensor = Saver(World()), torch.zeros(4)
    saver.save(tmp_path, keep=3, wait=True, **values(1, tensor))
    fsync = os.fsync

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saver.save(tmp_path, keep=3, **values(2, tensor))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        MachineError, match=r"step-00000003: .*No space left .*older checkpoints are untouched"
    ):
        saver.save(tmp_path, keep=3, **values(3, tensor))
    assert steps(tmp_path) == [1]

    saver.save(tmp_path, keep=3, **values(4, tensor))
    saver._thread.join()
    monkeypatch.setattr(os, "fsync", fsync)
    saver.save(tmp_path, keep=3, **values(5, tensor))  # freed in time: nothing is raised
    saver.wait()
    assert steps(tmp_path) == [1, 5]
    assert [saved.step for saved in saver.take_saved()] == [1, 5]


def test_the_end_raises_the_last_failure_once_and_without_the_copy(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    saver = Saver(World())
    saver.save(tmp_path, keep=3, **values(1, torch.zeros(4)))
    saver._thread.join()
    assert saver._error.__traceback__ is None
    assert saver._error.__cause__ is saver._error.__context__ is None
    with pytest.raises(MachineError, match="cannot write the checkpoint"):
        saver.wait()
    saver.wait()


def test_what_cannot_be_stored_is_raised_at_once(tmp_path):
    saver = Saver(World())
    with pytest.raises(ConfigError, match=r"cannot save training\['a'\]"):
        saver.save(tmp_path, keep=1, step=1, model={}, training={"a": object()}, meta={"epoch": 0})
    saver.wait()


def test_a_copy_shares_no_memory_and_has_no_second_copy_of_shared_weights():
    weight = torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last)
    content = gather(
        step=1, model={"a": weight, "b": weight, "c": weight[0]}, training={"t": weight}, meta={}, copy=True
    )
    assert content.aliases == {"b": "a"}
    copies = [*content.tensors.values(), content.training["t"]]
    assert len({t.untyped_storage().data_ptr() for t in [*copies, weight]}) == 4
    assert content.tensors["a"].is_contiguous()
    assert content.training["t"].stride() == weight.stride()
    assert content.tensors["c"].untyped_storage().nbytes() == 48 * 4
    assert torch.equal(content.tensors["a"], weight)


CHILD = """
import os, signal, sys, threading, time, torch
from evenstep.saving import Saver
from evenstep.world import World

torch.set_num_threads(1)
run_dir = sys.argv[1]
saver = Saver(World())

def save(step, wait=False):
    value = torch.full((2_000_000,), float(step))
    content = {"model": {"w": value}, "training": {"m": [value]}, "meta": {"epoch": 0}}
    saver.save(run_dir, keep=2, wait=wait, step=step, **content)

save(1, wait=True)
print("ready", flush=True)
"""


def child(tmp_path, text):
    code = CHILD + textwrap.dedent(text)
    return subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)


def test_kill_9_while_the_thread_writes_leaves_a_good_checkpoint(tmp_path):
    # The writing takes some tens of milliseconds; the process is killed at many moments of it.
    done = child(
        tmp_path,
        """
        for k in range(24):
            pid = os.fork()
            if pid == 0:
                save(2 + k)
                time.sleep(k * 0.004)
                os.kill(os.getpid(), signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
            from evenstep import checkpoint
            left = [name for name in os.listdir(run_dir + "/checkpoints") if name.startswith(".tmp")]
            newest = checkpoint.load(checkpoint.latest(run_dir))
            assert float(newest.model["w"][0]) == float(newest.training["m"][0][-1]) == newest.step
            print(newest.step - k - 2, len(left))
        """,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 24
    assert any(int(left) for _, left in rows), "no kill came in the middle of the writing"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('x')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_the_interpreter_waits_for_the_writer(tmp_path, end, code):
    done = child(tmp_path, f"save(2)\n{end}\n")
    assert done.returncode == code, done.stderr
    assert steps(tmp_path) == [1, 2]
    assert checkpoint.verify(tmp_path / "checkpoints/step-00000002") == []


def trained(world, end):
    model = SmallNet(256)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    for batch in Loader(images(), 50).batches(state, steps=3):
        if end == "stop" and state.step == 1:
            world.stop.set()
        train_step(state, batch, cross_entropy())
        if end != "stop":
            state.save()
    if end == "error" and world.rank == 0:
        raise ValueError("after the save")
    if end == "interrupt" and world.rank == 0:
        raise KeyboardInterrupt
    return str(checkpoint.path_of(world.run_dir, 3))


@pytest.mark.parametrize("end", ["return", "error", "interrupt", "stop"])
def test_every_regular_way_out_of_a_worker_waits_for_the_writer(tmp_path, end):
    if end == "return":
        assert checkpoint.verify(run_ranks(trained, 1, end, lanes=2, run_dir=str(tmp_path))[0]) == []
    else:
        with pytest.raises(Exception, match=r"after the save|KeyboardInterrupt|asked to stop"):
            run_ranks(trained, 1, end, lanes=2, run_dir=str(tmp_path))
    assert steps(tmp_path)[-1] == (2 if end == "stop" else 3)
    assert all(checkpoint.verify(info.path) == [] for info in checkpoint.ls(tmp_path))
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_a_checkpoint_that_cannot_be_written_fails_the_run_at_its_end(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(MachineError, match=r"cannot write the checkpoint .*step-0000000[23]"):
        run_ranks(trained, 2, "return", run_dir=str(tmp_path))
