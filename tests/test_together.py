"""Several TrainStates, several steps a batch, and the loop's body: after a death, a stop, a resume."""

import dataclasses
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import TensorDataset

from evenstep import Loader, TrainState, checkpoint, rescue, snapshot, train_step, weights_sha256
from evenstep.data.batch import Batch
from evenstep.errors import CheckpointError, StoppedError
from evenstep.position import Position, Progress
from evenstep.recovery import Recovery
from evenstep.testing import run_ranks
from evenstep.together import Together

CPU = {"lanes": 2, "timeout_s": 20.0}


def points(n=32):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.arange(n) % 3)


def die(world, rank=1):
    if world.rank == rank and world.restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def state_of(model, **options):
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def classifier(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def digest(*states):
    return [weights_sha256(state.model.state_dict()) for state in states]


def gan(world, *, driver=0, kill=None, stop=None, every=1, save=False):
    """A GAN whose generator is trained on each ``every``-th batch; one of the two has the batches."""
    torch.manual_seed(7)
    critic = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    generator_state, critic_state = state_of(nn.Linear(3, 6)), state_of(critic)

    def critic_loss(model, batch):
        fake = generator_state.model(torch.randn(len(batch[0]), 3)).detach()
        return softplus(-model(batch[0])).mean() + softplus(model(fake)).mean()

    def generator_loss(model, batch):
        return softplus(-critic(model(torch.randn(len(batch[0]), 3)))).mean()

    seen = []
    for batch in Loader(points(), 8).batches((generator_state, critic_state)[driver], epochs=2):
        seen.append(batch.step)
        if batch.step == stop and not world.resume:
            world.stop.set()
        train_step(critic_state, batch, critic_loss)
        if batch.step == kill:
            die(world)
        if batch.step % every == 0:
            train_step(generator_state, batch, generator_loss)
        if save:
            generator_state.save(score=float(batch.step))
            critic_state.save()
    return digest(generator_state, critic_state), generator_state.step, critic_state.step, seen


@pytest.mark.parametrize("driver", [0, 1])
@pytest.mark.parametrize("every", [1, 3])
def test_no_step_is_done_twice_after_a_death_between_the_steps_of_a_gan(driver, every):
    def main(world, kill):
        return gan(world, driver=driver, every=every, kill=kill)

    (whole,) = run_ranks(main, 1, None, **CPU)
    assert whole[1:3] == (8 if every == 1 else 3, 8)
    found = run_ranks(main, 2, 6, max_restarts=1, **CPU)
    assert found == [(*whole[:3], [6, 7])] * 2


def test_a_gan_that_was_stopped_goes_on_from_one_checkpoint(tmp_path):
    def main(world, stop=None):
        return gan(world, stop=stop)

    (whole,) = run_ranks(main, 1, **CPU)
    with pytest.raises(StoppedError, match="stopped and saved after step 3"):
        run_ranks(main, 2, 2, run_dir=str(tmp_path), **CPU)
    # Two steps on each of two batches, and the critic's on the third.
    assert [path.name for path in checkpoint.directories(tmp_path)] == ["step-00000005"]
    assert (
        run_ranks(main, 2, run_dir=str(tmp_path), resume=True, **CPU)
        == [(*whole[:3], [2, 3, 4, 5, 6, 7])] * 2
    )


def test_a_checkpoint_holds_all_states_whichever_is_asked_to_save(tmp_path):
    def main(world):
        return gan(world, save=True)

    (whole,) = run_ranks(main, 1, run_dir=str(tmp_path), **CPU)
    found = checkpoint.ls(tmp_path)
    assert [info.step for info in found] == [12, 14, 16]
    assert [info.score for info in found] == [5.0, 6.0, 7.0]
    saved = checkpoint.load(found[0].path)
    assert set(saved.model) == {"weight", "bias"}
    assert [part["number"] for part in saved.training["others"]] == [1]
    for info in found[1:]:
        for file in info.path.iterdir():
            file.unlink()
        info.path.rmdir()
    (resumed,) = run_ranks(main, 1, run_dir=str(tmp_path), resume=True, **CPU)
    assert resumed == (*whole[:3], [6, 7])


def test_a_snapshot_of_several_states_becomes_one_checkpoint(tmp_path):
    parts = [
        {"model": {"w": torch.full((2,), float(n))}, "training": {"a": n}, "meta": {"epoch": 0}, "step": n}
        for n in (3, 4)
    ]
    snapshot.save([tmp_path], parts, total=7, rank=0)
    step, path = rescue.save_as_checkpoint([tmp_path], tmp_path / "run")
    whole = checkpoint.load(path)
    assert (step, whole.model["w"][0], whole.training["a"]) == (7, 3.0, 3)
    assert whole.training["others"][0]["training"] == {"a": 4}


def thrice(world, stop_after=None):
    """Three steps on each batch, whose losses draw random numbers."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = TrainState(model, optimizer, schedule=schedule, schedule_every="epoch")
    drawn, seen = [], []

    def loss(model, batch):
        drawn.append(float(torch.rand(())))
        return classifier(model, batch)

    for batch in Loader(points(16), 8).batches(state, epochs=3):
        for _ in range(3):
            train_step(state, batch, loss)
        seen.append((batch.step, state.step, state.epoch, state.epoch_step))
        if batch.step == stop_after:
            state.save(wait=True)
            break
    return digest(state), seen, optimizer.param_groups[0]["lr"], drawn


def test_epochs_are_counted_by_batches_where_a_batch_has_several_steps(tmp_path):
    (whole,) = run_ranks(thrice, 1, **CPU)
    assert whole[1] == [(0, 3, 0, 1), (1, 6, 1, 0), (2, 9, 1, 1), (3, 12, 2, 0), (4, 15, 2, 1), (5, 18, 3, 0)]
    assert whole[2] == 0.1 * 0.5**3
    assert len(set(whole[3])) == len(whole[3])  # no step repeats the random numbers of another
    assert [each[:3] for each in run_ranks(thrice, 2, **CPU)] == [whole[:3]] * 2
    run_ranks(thrice, 1, 2, run_dir=str(tmp_path), **CPU)
    (resumed,) = run_ranks(thrice, 1, run_dir=str(tmp_path), resume=True, **CPU)
    assert resumed[:3] == (whole[0], whole[1][3:], whole[2])


def with_body(world, kill):
    """The loop's body keeps an average of its own, and steps a schedule by a metric."""
    torch.manual_seed(7)
    model, target = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    state = TrainState(model, optimizer, schedule=plateau, extras={"target": target})
    for batch in Loader(points(), 8).batches(state, epochs=4):
        if (batch.step, "before") == kill:
            die(world)
        train_step(state, batch, classifier)
        if (batch.step, "after") == kill:
            die(world)
        with torch.no_grad():
            for p, q in zip(target.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
        if batch.last_in_epoch:
            plateau.step(5.0)
        if (batch.step, "after") == kill and world.restart == 0:
            time.sleep(0.4)  # the body goes on while the other one's death is told
    return digest(state), weights_sha256(target.state_dict()), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kill", [(8, "before"), (7, "after")])
def test_what_the_body_changes_is_changed_once_after_a_death(kill):
    (whole,) = run_ranks(with_body, 1, None, **CPU)
    assert whole[2] == 0.05
    assert run_ranks(with_body, 2, kill, max_restarts=1, **CPU) == [whole] * 2


def batch_of(step):
    return Batch(step, step // 4, step % 4, 8, step % 4 == 3, ())


def progresses(n, together):
    """The counting parts of n TrainStates that train together."""
    found = [Progress(torch.device("cpu"), together) for _ in range(n)]
    for number, progress in enumerate(found):
        together.add(progress)
        progress.number = number
    return found


def no_loss():
    return torch.zeros((), dtype=torch.float64)


def test_a_loop_that_only_looks_at_batches_moves_nothing():
    (progress,) = progresses(1, Together())
    for step in range(3):
        progress.handed_out(batch_of(step))
        progress.asked()
    progress.handed_out(batch_of(3))
    assert progress.progress_values(cut_off=True)["again"] is None
    assert progress.progress_values(cut_off=False)["position"]["batch"] == 0
    assert progress.start == Position(0, 0, 0)


def test_two_loops_in_step_are_over_together():
    together = Together()
    both = progresses(2, together)
    batches = [batch_of(3), batch_of(3)]
    for progress, batch in zip(both, batches, strict=True):
        progress.handed_out(batch)
    for progress, batch in zip(both, batches, strict=True):
        progress.count_step(batch, no_loss(), 0.1, None)
    assert [p.progress_values(cut_off=True)["again"]["step"] for p in both] == [3, 3]
    both[0].asked()  # the second loop has not asked yet
    assert not any(progress.has_batch for progress in both)
    for progress in both:
        taken = Progress(torch.device("cpu"), Together())
        taken.take_progress(progress.progress_values(cut_off=True))
        assert taken.start == Position(4, 1, 0)
        assert taken.replayed(batch_of(4)) is None
    assert together.total == 2


def test_a_loop_inside_of_anothers_body_does_not_end_that():
    outer, inner = progresses(2, Together())
    outer.handed_out(batch_of(0))
    for step in range(3):
        batch = batch_of(step)
        inner.handed_out(batch)
        inner.count_step(batch, no_loss(), 0.1, None)
        inner.asked()
    assert outer.progress_values(cut_off=True)["again"]["step"] == 0
    assert inner.progress_values(cut_off=True)["again"] is None


def ahead(world, *, save_after=None, kill=None):
    """A loop that has the next batch before it does a step with the one in hand."""
    torch.manual_seed(7)
    state = state_of(nn.Linear(6, 3))
    seen = []
    batches = Loader(points(), 8).batches(state, epochs=2)
    for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
        if kill is not None and batch.step == kill[0] and kill[1] == "before":
            die(world)
        seen.append(batch.step)
        train_step(state, batch, classifier)
        if kill is not None and batch.step == kill[0] and kill[1] == "after":
            die(world)
        assert (state.epoch, state.epoch_step) == divmod(batch.step + 1, 4)
        assert following is None or following.step == batch.step + 1
        if batch.step == save_after and not world.resume:
            state.save(wait=True)
            break
    return digest(state), state.step, seen


@pytest.mark.parametrize("step", [0, 2, 3, 6])
def test_a_loop_that_reads_ahead_loses_no_batch_when_it_is_resumed(step, tmp_path):
    (whole,) = run_ranks(ahead, 1, **CPU)
    assert whole[1:] == (8, list(range(8)))

    def main(world):
        return ahead(world, save_after=step)

    run_ranks(main, 1, run_dir=str(tmp_path), **CPU)
    (resumed,) = run_ranks(ahead, 1, run_dir=str(tmp_path), resume=True, **CPU)
    assert resumed == (*whole[:2], list(range(step + 1, 8)))


@pytest.mark.parametrize(("kill", "seen"), [((1, "before"), 0), ((4, "before"), 3), ((5, "after"), 5)])
def test_a_loop_that_reads_ahead_loses_no_batch_in_a_death(kill, seen):
    def main(world):
        return ahead(world, kill=kill)

    (whole,) = run_ranks(ahead, 1, **CPU)
    found = run_ranks(main, 2, max_restarts=1, **CPU)
    # The survivor does the step on batch ``kill`` only if the other one lives, or dies after it.
    assert [each[:2] for each in found] == [whole[:2]] * 2
    assert all(each[2][0] in (seen, seen + 1) and each[2][-1] == 7 for each in found)


def test_a_gan_whose_loop_reads_ahead_is_where_its_steps_are():
    driver, critic = progresses(2, Together())
    batches = [batch_of(step) for step in range(6)]
    driver.handed_out(batches[0])
    for step in range(5):
        driver.asked()
        driver.handed_out(batches[step + 1])
        critic.count_step(batches[step], no_loss(), 0.1, None)
        if step % 3 == 0:
            driver.count_step(batches[step], no_loss(), 0.1, None)
        assert driver.progress_values(cut_off=False)["position"]["batch"] == step + 1
        assert driver.progress_values(cut_off=True)["again"]["step"] == step


def test_a_step_in_the_body_of_a_loop_that_reads_ahead_does_not_use_what_is_read():
    outer, inner = progresses(2, Together())
    outer.handed_out(batch_of(0))
    outer.asked()
    outer.handed_out(batch_of(1))
    batch = batch_of(1)
    inner.handed_out(batch)
    inner.count_step(batch, no_loss(), 0.1, None)
    assert outer.progress_values(cut_off=False)["position"]["batch"] == 1
    assert outer.progress_values(cut_off=True)["again"]["step"] == 0


def test_a_copy_of_a_batch_that_was_read_ahead_counts_as_that():
    progress = Progress(torch.device("cpu"), Together())
    for step in range(3):
        progress.handed_out(batch_of(step))
        progress.asked()
    progress.count_step(batch_of(0), no_loss(), 0.1, None)
    progress.asked()
    assert progress.start == Position(1, 0, 1)
    assert progress.progress_values(cut_off=True)["again"] is None


def test_the_batch_that_is_due_once_more_outlives_another_death_before_the_loop_begins():
    progress = Progress(torch.device("cpu"), Together())
    batch = batch_of(2)
    progress.handed_out(batch)
    progress.count_step(batch, no_loss(), 0.1, None)
    for _ in range(2):
        values = progress.progress_values(cut_off=True)
        assert values["again"]["step"] == 2
        progress = Progress(torch.device("cpu"), Together())
        progress.take_progress(values)
        assert progress.start == Position(2, 0, 2)
    assert progress.replayed(batch_of(2)) is not None


def test_a_checkpoint_without_this_state_is_an_error_where_it_was_asked_for(tmp_path):
    def main(world, path=None):
        states = [state_of(nn.Linear(6, 3)) for _ in range(3 if path else 2)]
        for number, state in enumerate(states):
            nn.init.constant_(state.model.weight, number + 1.0)
        if path is None:
            for batch in Loader(points(), 8).batches(states[0], epochs=1):
                for state in states:
                    train_step(state, batch, classifier)
            states[0].save(wait=True)
            return digest(*states)
        with pytest.raises(CheckpointError, match="nothing of TrainState number 2: it holds number 0, 1,"):
            states[2].restore(path)
        with pytest.raises(CheckpointError, match="number 7"):
            states[0].restore(path, number=7)
        assert states[2].resumed_from is None
        states[2].restore(path, number=1)
        states[1].restore(path)
        return digest(states[1], states[2])

    (saved,) = run_ranks(main, 1, run_dir=str(tmp_path), **CPU)
    (info,) = checkpoint.ls(tmp_path)
    assert run_ranks(main, 2, str(info.path), **CPU) == [[saved[1], saved[1]]] * 2


def test_the_second_state_does_not_take_nor_pass_over_an_old_checkpoint_that_may_be_its_own(tmp_path):
    def main(world, is_old):
        first = state_of(nn.Linear(6, 3))
        if not world.resume:
            for batch in Loader(points(), 8).batches(first, epochs=1):
                train_step(first, batch, classifier)
            values = first.checkpoint_values()
            if is_old:
                del values["training"]["position"]["batch"]
            checkpoint.save(world.run_dir, **values, keep=3)
            return 0
        if is_old:
            with pytest.raises(CheckpointError, match="does not say which one"):
                state_of(nn.Linear(6, 3))
            return first.step
        return first.step + state_of(nn.Linear(6, 3)).step  # it came later: it begins anew

    for is_old in (True, False):
        run_dir = str(tmp_path / str(is_old))
        run_ranks(main, 1, is_old, run_dir=run_dir, **CPU)
        assert run_ranks(main, 1, is_old, run_dir=run_dir, resume=True, **CPU) == [4]


def test_a_commit_tells_the_stream_of_snapshots_before_anybody_may_take_one():
    """On a GPU the optimizer's kernels still run when the commit has returned."""

    def main(world):
        class Event:
            def record(self):
                told.append((world.recovery._lock.locked(), state.step))

        told = []
        state = state_of(nn.Linear(6, 3))
        state._committed = Event()
        for batch in Loader(points(), 8).batches(state, steps=2):
            train_step(state, batch, classifier)
        return told

    assert run_ranks(main, 1, **CPU) == [[(False, 0), (True, 1), (False, 1), (True, 2)]]


@pytest.mark.parametrize("is_asked", [(False, True), (True, False), (True, True)])
def test_machines_whose_snapshots_of_a_step_differ_go_on_from_one_of_them(is_asked, tmp_path):
    def main(world, parent):
        memory = Path(parent) / f"memory-{world.rank}"
        progress = Progress(torch.device("cpu"), Together())
        batch = batch_of(2)
        progress.handed_out(batch)
        progress.count_step(batch, no_loss(), 0.1, None)
        if is_asked[world.rank]:
            progress.asked()
        training = progress.progress_values(cut_off=True)
        state = {"model": {"w": torch.ones(3)}, "training": training, "meta": {}, "step": 1}
        snapshot.save([memory], [state], total=1, rank=world.rank)
        recovery = Recovery(memory, None, rank=world.rank, local_rank=0, local_world_size=1, restart=1)
        recovery.agree(dataclasses.replace(world, local_world_size=1, num_nodes=2, run_dir=None))
        return recovery.found().training["again"], recovery._snapshot.rank

    first, second = run_ranks(main, 2, str(tmp_path), **CPU)
    assert first[0] == second[0] == (None if is_asked[0] else {"step": 2, "epoch": 0, "epoch_step": 2})
    assert (first[1], second[1]) == (0, 1 if all(is_asked) else 0)


def test_the_digest_of_a_snapshot_is_that_of_its_states(tmp_path):
    def digest_of(rank=0, **training):
        state = {"model": {"w": torch.ones(2, 3).T}, "training": training, "meta": {"a": [1]}, "step": 1}
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        return snapshot.read(snapshot.save([directory], [None, state], total=1, rank=rank)).digest()

    half = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    same = digest_of(x=half, y={"n": (1, None)}), digest_of(rank=1, x=half.clone(), y={"n": (1, None)})
    others = digest_of(x=half.float(), y={"n": (1, None)}), digest_of(x=half, y={"n": (2, None)})
    assert same[0] == same[1]
    assert len({same[0], *others, digest_of(x=torch.empty(0)), digest_of(x=torch.tensor(True))}) == 5
