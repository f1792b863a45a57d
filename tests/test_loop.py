import pytest
import torch

from evenstep import Cadence, Loader, TrainState, checkpoint, cross_entropy, evaluate, fit, launch
from evenstep.errors import CheckpointError
from evenstep.metrics import classification
from evenstep.optim import make_schedule
from evenstep.testing import run_ranks
from evenstep.world import current
from worlds import SmallNet, digest, images


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self):
        self.events = []

    def step(self, step, epoch, loss, lr, images, grad_norm=None):
        self.events.append(("step", step, epoch, images, round(lr, 6)))

    def evaluation(self, step, epoch, metrics):
        self.events.append(("evaluation", step))

    def times(self, step, epoch, times):
        assert len(times.data_s) == len(times.step_s) == len(times.wait_s) == current().world_size
        assert times.steps <= step
        for wait_s, step_s in zip(times.wait_s, times.step_s, strict=True):
            assert wait_s is None or 0 <= wait_s <= step_s  # None: torch DDP has not sampled a step yet

    def checkpoint(self, step, epoch, path):
        assert checkpoint.verify(path) == []
        self.events.append(("checkpoint", step))

    def epoch_end(self, step, epoch, groups):
        self.events.append(("epoch_end", step))


def run(world, epochs=3, steps=None, cadence=None, **options):
    model = SmallNet()
    state = TrainState(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        schedule=make_schedule("step", epochs=3, steps_per_epoch=5, decay=0.5, decay_epochs=1),
        **options,
    )
    notes = Notes()
    result = fit(
        state,
        Loader(images(), 50),
        cross_entropy(),
        epochs=epochs,
        steps=steps,
        evaluation=lambda: evaluate(state.evaluated_model, images(60), classification),
        cadence=cadence or Cadence(),
        watcher=notes,
    )
    state.lanes.close()
    return digest(state), state.train_loss, result.metrics, notes.events


def test_what_happens_when(tmp_path):
    cadence = Cadence(evaluate_every=2, checkpoint_every=2, checkpoint_every_steps=4)
    _, _, metrics, events = run_ranks(
        lambda world: run(world, cadence=cadence), 1, lanes=2, run_dir=str(tmp_path)
    )[0]
    assert [event for event in events if event[0] not in ("step", "checkpoint")] == [
        ("epoch_end", 5),
        ("epoch_end", 10),
        ("evaluation", 10),
        ("epoch_end", 15),
        ("evaluation", 15),
    ]
    # Written in the background: told in order, when they are there, and the last one before the end.
    assert [event[1] for event in events if event[0] == "checkpoint"] == [4, 8, 10, 12, 15]
    assert events[-1] == ("checkpoint", 15)
    steps = [event for event in events if event[0] == "step"]
    assert steps[0] == ("step", 1, 0, 50, 0.05)
    assert steps[4] == ("step", 5, 0, 5, 0.05)  # the last, shorter batch is kept
    assert steps[-1] == ("step", 15, 2, 5, 0.0125)  # 0.05 x 0.5 x 0.5
    assert set(metrics) == {"loss", "accuracy", "samples"}


@pytest.mark.parametrize("stop", [5, 7, 14])
def test_stopping_and_resuming_on_another_number_of_processes_changes_no_bit(stop, tmp_path):
    options = {"ema_decay": 0.9, "clip_norm": 1.0}
    whole = run_ranks(lambda world: run(world, **options), 1, lanes=4)[0]
    run_ranks(lambda world: run(world, steps=stop, **options), 3, lanes=4, run_dir=str(tmp_path))
    resumed = run_ranks(lambda world: run(world, **options), 2, lanes=4, run_dir=str(tmp_path), resume=True)
    assert [value[:3] for value in resumed] == [whole[:3]] * 2
    assert resumed[0][3][0][:2] == ("step", stop + 1)


def test_resuming_a_finished_run_only_evaluates(tmp_path):
    first = run_ranks(run, 1, lanes=2, run_dir=str(tmp_path))[0]
    again = run_ranks(run, 1, lanes=2, run_dir=str(tmp_path), resume=True)[0]
    assert again[:3] == first[:3]
    assert again[3] == [("evaluation", 15)]


def test_the_best_and_the_newest_checkpoints_stay(tmp_path):
    run_ranks(lambda world: run(world, cadence=Cadence(keep=1)), 1, run_dir=str(tmp_path))
    kept = {info.step: info.score for info in checkpoint.ls(tmp_path)}
    assert 15 in kept
    assert len(kept) <= 2


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    run_ranks(lambda world: run(world, steps=2), 1, run_dir=str(tmp_path))

    def other(world):
        model = SmallNet()
        TrainState(model, torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1))

    with pytest.raises(CheckpointError, match=r"does not fit this run: .*saved with another optimizer"):
        run_ranks(other, 1, run_dir=str(tmp_path), resume=True)


def test_another_numerics_key_is_named(tmp_path):
    run_ranks(lambda world: run(world, steps=2), 1, lanes=2, run_dir=str(tmp_path))
    run_ranks(
        lambda world: run(world, steps=3, precision="bf16"), 1, lanes=2, run_dir=str(tmp_path), resume=True
    )
    log = (tmp_path / "logs" / "rank0.log").read_text()
    assert "another numerics key" in log
    assert "precision: 'fp32' in the checkpoint, 'bf16' now" in log


def test_a_resumed_run_keeps_its_lanes_and_threads(tmp_path):
    run_ranks(lambda world: run(world, steps=2), 1, lanes=4, threads=2, run_dir=str(tmp_path))
    seen = launch(
        lambda world: (world.lanes, world.threads), nproc=2, device="cpu", run_dir=str(tmp_path), resume=True
    )
    assert seen == (4, 2)
