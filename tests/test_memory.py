"""Out of memory: the message, and how a run goes on with more lanes. Stand-ins raise what a GPU would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep import TrainState, cross_entropy, memory, train_step
from evenstep.checkpoint import ls
from evenstep.devices import GpuProcess, GpuUse
from evenstep.errors import MachineError, MemoryExhaustedError
from evenstep.flat import from_flat
from evenstep.launcher import launch
from evenstep.testing import run_ranks
from evenstep.world import World
from scripts import CPU
from worlds import SmallNet, digest, images

GIB = 2**30
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.1 GiB "
    "is free. Including non-PyTorch memory, this process has 9 GiB memory in use."
)
FULL = GpuUse(0, "GPU-0", 80 * GIB, 79 * GIB, (GpuProcess(17, "ann", 60 * GIB), GpuProcess(18, "bob", None)))


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def no_driver():
    raise MachineError("no driver")


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError(SAID), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_it):
    assert memory.is_exhausted(error) == is_it


def test_the_message_says_who_holds_the_gpu_and_what_to_change():
    world = World(rank=1, world_size=2, lanes=4, device="cuda:0")
    told = memory.exhausted(torch.OutOfMemoryError(SAID), world, "in step 7, lane 3", query=lambda: [FULL])
    text = str(told)
    assert text.startswith(
        "rank 1 ran out of memory on cuda:0 in step 7, lane 3: CUDA out of memory. Tried to allocate 2.00 "
        "GiB. GPU 0 (79.0 of 80.0 GiB in use) is held by pid 17 of ann with 60.0 GiB, pid 18 of bob. All"
    )
    for advice in ("--lanes 8", "--lanes-on-oom", "--precision bf16", "--gpus idle"):
        assert advice in text
    assert (told.exit_code, isinstance(told, MachineError)) == (3, True)


def test_a_limit_of_our_own_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25, raising=False)
    text = str(memory.exhausted(MemoryError(), World(device="cuda:0"), "now", query=lambda: [FULL]))
    assert "on cuda:0 now: MemoryError. GPU 0" in text
    assert "raise this run's own limit (--gpu-memory-fraction; now 0.25 for this process)" in text


def test_without_a_driver_to_ask_the_message_says_so():
    text = str(memory.exhausted(MemoryError(), World(device="cuda:0"), "now", query=no_driver))
    assert "The driver was not asked who holds it (pip install 'evenstep[gpu]' for that)" in text


def test_on_the_cpu_it_is_the_machines_memory():
    text = str(memory.exhausted(MemoryError(), World(lanes=2), "now", query=no_driver))
    assert "The machine has " in text
    assert "GiB available" in text
    assert "--lanes 4" in text
    assert "use a smaller --batch-size or fewer processes" in text
    assert "bf16" not in text


class OneIsHungry(SmallNet):
    """A lane of rank 1 does not fit from its third step on."""

    forwards = 0

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x):
        self.forwards += 1
        if self.forwards > 2 and self.rank == 1:
            # A CPU's own answer; 2**44 floats are more than any machine has.
            x = x + torch.empty(2**44)
        return super().forward(x)


def hungry_training(world, make=OneIsHungry):
    from evenstep import Loader

    model = make(world.rank)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in Loader(images(60), 20).batches(state, steps=4):
        train_step(state, batch, cross_entropy())


def test_one_rank_out_of_memory_ends_all_with_one_error():
    with pytest.raises(MemoryExhaustedError) as caught:
        launch(hungry_training, nproc=2, grace_s=1.0, **CPU)
    text, report = str(caught.value), str(caught.value.__cause__)
    assert "rank 1 ran out of memory on cpu in step 2, lane 1 (10 of the batch's 20 samples)" in text
    assert "DefaultCPUAllocator" in text
    assert "rank 1 failed: MemoryExhaustedError" in report
    assert "torch.empty(2**44)" in report, "the user's line"
    assert report.splitlines()[-1] == "rank 0 was stopped"


def test_out_of_memory_outside_of_a_lane_is_explained_too():
    with pytest.raises(MemoryExhaustedError, match="rank 0 ran out of memory on cpu outside of a lane's"):
        launch(lambda world: torch.empty(2**44), nproc=1, **CPU)


def test_the_state_before_the_step_is_saved_once_whichever_ranks_call(tmp_path):
    def save(world):
        torch.manual_seed(0)
        model = SmallNet()
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        memory.save_for_more_lanes(state)
        state.lanes.close()
        return digest(state)

    digests = run_ranks(save, 2, run_dir=str(tmp_path))
    (found,) = ls(tmp_path)
    assert (found.step, found.problem) == (0, None)
    assert json.loads((tmp_path / memory.NOTE).read_text()) == {"step": 0, "lanes": 4, "threads": 1}
    assert digests[0] == digests[1]


def hungry_config(run_dir, **values):
    flat = {"run_dir": str(run_dir), "lanes_on_oom": True, "batch_size": 64, **values}
    return from_flat(flat)


@pytest.fixture
def saved(tmp_path):
    """A run directory whose newest checkpoint waits for 4 lanes."""

    def save(world):
        model = SmallNet()
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        memory.save_for_more_lanes(state)

    run_ranks(save, 1, lanes=2, run_dir=str(tmp_path))
    return tmp_path


def test_a_run_goes_on_with_the_lanes_and_threads_of_the_note(saved):
    again = memory.retried(hungry_config(saved))
    assert (again.process.lanes, again.process.threads, again.run.resume) == (4, 1, True)
    assert memory.retried(hungry_config(saved)) is None, "a note counts once"


@pytest.mark.parametrize("values", [{"lanes_on_oom": False}, {"batch_size": 3}])
def test_a_run_that_did_not_ask_or_has_fewer_samples_than_lanes_does_not_go_on(saved, values):
    assert memory.retried(hungry_config(saved, **values)) is None


def test_a_note_of_another_step_than_the_newest_checkpoint_does_not_count(saved):
    (saved / memory.NOTE).write_text(json.dumps({"step": 7, "lanes": 4, "threads": 1}))
    assert memory.retried(hungry_config(saved)) is None


def evenstep(*argv, cwd):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "evenstep", "train", *argv]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=150)


COMMON = (
    *("--data", "digits", "--batch-size", "64", "--threads", "1", "--device", "cpu"),
    *("--json", "--log-every", "1"),
)


@pytest.mark.slow
def test_the_command_doubles_the_lanes_and_loses_no_step(tmp_path):
    hungry = ("--model", "own_models:hungry", *COMMON)
    done = evenstep(*hungry, "--steps", "6", "--nproc", "2", "--lanes-on-oom", "--run-dir", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ran out of memory on cpu in step 3, lane " in done.stderr
    assert "--lanes-on-oom: going on with lanes 4" in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["step"], result["lanes"], result["numerics"]["lanes"]) == (6, 4, 4)
    lines = map(json.loads, (tmp_path / "a/metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if "lr" in line]
    assert steps, "every step was logged"
    assert steps == list(range(steps[0], steps[0] + 6)), "none twice, none lost"

    # The same by hand: three steps on two lanes, the rest on four.
    plain = ("--model", "own_models:NormNet", *COMMON, "--run-dir", "b")
    assert evenstep(*plain, "--steps", "3", "--nproc", "2", cwd=tmp_path).returncode == 0
    by_hand = evenstep(*plain, "--steps", "6", "--nproc", "1", "--resume", "--lanes", "4", cwd=tmp_path)
    assert by_hand.returncode == 0, by_hand.stderr
    assert json.loads(by_hand.stdout.splitlines()[-1])["weights_sha256"] == result["weights_sha256"]


def test_lanes_on_oom_needs_our_own_launcher(tmp_path):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    code = "import sys; from evenstep.cli import main; sys.exit(main(['train', '--lanes-on-oom']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
        timeout=60,
    )
    assert done.returncode == 2
    assert "--lanes-on-oom starts all processes again, and environment has started these" in done.stderr
