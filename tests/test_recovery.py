import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import gone_within
from evenstep import (
    Loader,
    TrainState,
    checkpoint,
    cross_entropy,
    evaluate,
    owners,
    sharedmem,
    snapshot,
    train_step,
)
from evenstep.errors import ConfigError, WorkerError
from evenstep.flat import from_flat
from evenstep.heartbeat import Beat, Heartbeats, Phase, Pulse
from evenstep.jobs import train_job
from evenstep.launcher import launch
from evenstep.metrics import classification
from evenstep.recovery import Recovery
from evenstep.testing import kill_at, run_ranks
from scripts import CPU, run_script
from worlds import SmallNet, digest, images, trained


def outcome(world):
    """Adam, a moving average, dropout, BatchNorm of both kinds, clipping: all that a snapshot must hold."""
    state, _ = trained(
        world, optimizer=lambda params: torch.optim.Adam(params, lr=0.01), ema_decay=0.9, clip_norm=1.0
    )
    return digest(state), state.train_loss, state.step, world.restart, world.recovery.steps_lost


@pytest.fixture(scope="module")
def undisturbed():
    (result,) = run_ranks(outcome, 1, lanes=4)
    return result


@pytest.mark.parametrize(
    ("point", "nproc"),
    [
        ("before_forward", 2),
        ("before_reduce", 3),
        ("in_reduce", 2),
        ("in_reduce", 4),
        ("after_reduce", 3),
        ("in_commit", 2),
    ],
)
def test_a_kill_at_any_point_of_a_step_changes_no_bit_and_loses_no_step(point, nproc, undisturbed):
    values = run_ranks(outcome, nproc, lanes=4, fault=kill_at(nproc - 1, 4, point=point))
    assert values == [(*undisturbed[:3], 1, 0)] * nproc


class Faults:
    """Several faults in one run."""

    def __init__(self, *faults):
        self.faults = faults

    def __call__(self, *args):
        for fault in self.faults:
            fault(*args)


def test_many_kills_of_any_rank_two_at_once_and_during_recovery(undisturbed):
    faults = Faults(
        kill_at(0, 2),
        kill_at(1, 0, point="in_recovery", restart=1),
        kill_at((0, 2), 5, point="in_reduce", restart=2),
        kill_at(1, 5, point="before_forward", restart=3),
        kill_at((1, 2), 8, point="after_reduce", restart=4),
    )
    values = run_ranks(outcome, 3, lanes=4, fault=faults, max_restarts=10)
    assert values == [(*undisturbed[:3], 5, 0)] * 3


def two_models(world):
    """Two TrainStates that step by turns, and a line of the loop after each step that changes the weights."""
    torch.manual_seed(1)
    states = [
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (SmallNet(), SmallNet(4))
    ]
    for batch in Loader(images(), 50).batches(states[0], epochs=2):
        for state in states:
            train_step(state, batch, cross_entropy())
            with torch.no_grad():
                for p in state.model.parameters():
                    p.clamp_(-0.1, 0.1)
    return [digest(state) for state in states], [state.step for state in states], world.recovery.steps_lost


def test_several_models_go_on_where_the_loop_was_cut():
    expected = run_ranks(two_models, 2, lanes=4)

    class AtTheSecondModel:
        def __init__(self):
            self.calls = 0

        def __call__(self, rank, restart, point, step):
            self.calls += point == "before_reduce"
            if restart == 0 and rank == 1 and self.calls == 2 * 2 * 5 + 3:  # 2 lanes, 2 models, step 5
                os.kill(os.getpid(), signal.SIGKILL)

    assert run_ranks(two_models, 2, lanes=4, fault=AtTheSecondModel()) == expected


def evaluated(world, told):
    """A loop that evaluates at the end of each epoch, and reports it."""
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for batch in Loader(images(), 50).batches(state, epochs=3):
        train_step(state, batch, cross_entropy())
        if batch.last_in_epoch:
            if world.restart == 0 and world.rank == 1 and batch.epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            told[state.epoch] = evaluate(state.model, images(60), classification, chunk_size=10)["loss"]
    return told


def test_what_the_loop_does_after_a_step_is_done_after_a_restart():
    expected = run_ranks(evaluated, 1, {}, lanes=2)
    assert set(expected[0]) == {1, 2, 3}
    found = run_ranks(evaluated, 2, {}, lanes=2)
    assert found == [{epoch: expected[0][epoch] for epoch in (2, 3)}] * 2


def test_fewer_processes_go_on_when_one_cannot_be_kept_alive(undisturbed):
    class Cursed:
        def __call__(self, rank, restart, point, step):
            if rank == 2 and point == "before_reduce" and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    values = run_ranks(outcome, 3, lanes=4, fault=Cursed(), max_restarts=1, nproc_min=2)
    assert values == [(*undisturbed[:3], 2, 0)] * 2
    with pytest.raises(WorkerError, match="rank 2 was killed by SIGKILL"):
        run_ranks(outcome, 3, lanes=4, fault=Cursed(), max_restarts=1)


def failing(world, kind, times):
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for batch in Loader(images(), 50).batches(state, epochs=1):
        if state.step == 2 and world.rank == 1 and world.restart < times:
            raise kind("at step 2")
        train_step(state, batch, cross_entropy())
    return state.step, world.restart


def test_an_error_in_the_code_is_tried_once_more_and_then_named_as_such():
    assert run_ranks(failing, 2, OSError, 1, grace_s=1.0) == [(5, 1)] * 2
    with pytest.raises(WorkerError, match="OSError: at step 2") as caught:
        run_ranks(failing, 2, OSError, 9, grace_s=1.0, max_restarts=9)
    assert "the same error at step 2 again, after a new start of all processes" in str(caught.value)
    with pytest.raises(ConfigError, match="at step 2") as refused:
        run_ranks(failing, 2, ConfigError, 9, grace_s=1.0)
    assert "again" not in str(refused.value.__cause__)


def test_a_main_without_a_state_is_not_run_twice_unless_asked_for(tmp_path):
    def main(world, path):
        with open(path, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="SIGKILL"):
        launch(main, str(tmp_path / "a"), nproc=1, **CPU)
    with pytest.raises(WorkerError, match="SIGKILL"):
        launch(main, str(tmp_path / "b"), nproc=1, max_restarts=2, **CPU)
    assert (tmp_path / "a").read_text() == "x"
    assert (tmp_path / "b").read_text() == "xxx"


def alone(world):
    state, _ = trained(world)
    return digest(state), world.recovery.steps_lost


def test_when_nobody_survives_the_steps_that_are_lost_are_counted():
    ((expected, _),) = run_ranks(alone, 1)
    assert run_ranks(alone, 1, fault=kill_at(0, 6)) == [(expected, 6)]


def test_a_checkpoint_of_an_earlier_run_in_the_directory_is_not_taken(tmp_path):
    def main(world, steps, save):
        model = SmallNet()
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for batch in Loader(images(), 50).batches(state, steps=steps):
            train_step(state, batch, cross_entropy())
            if state.step == save:
                state.save(wait=True)
        return state.step, world.recovery.steps_lost

    directory = str(tmp_path)
    assert run_ranks(main, 1, 9, 9, run_dir=directory) == [(9, 0)]
    assert run_ranks(main, 1, 6, None, run_dir=directory, fault=kill_at(0, 4)) == [(6, 4)]
    own = str(tmp_path / "own")
    assert run_ranks(main, 1, 6, 3, run_dir=own, fault=kill_at(0, 4)) == [(6, 1)]


def test_a_death_after_another_main_has_returned_loses_nothing(undisturbed):
    def main(world):
        result = outcome(world)
        if world.rank == 0 and world.restart == 0:
            others = [b for b in world.recovery.pulse.beats.read() if b.rank == 1]
            while others[0].phase != Phase.DONE:
                time.sleep(0.01)
                others = [b for b in world.recovery.pulse.beats.read() if b.rank == 1]
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    assert run_ranks(main, 2, lanes=4) == [(*undisturbed[:3], 1, 0)] * 2


def test_a_survivor_is_not_ended_while_it_saves(undisturbed):
    """Neither by the agent's SIGTERM nor by the SIGKILL some time later; a large state takes seconds."""

    def main(world):
        save = snapshot.save

        def slowly(*args, **kwargs):
            time.sleep(2)
            return save(*args, **kwargs)

        if world.restart == 0:
            snapshot.save = slowly
        return outcome(world)

    values = run_ranks(main, 2, lanes=4, fault=kill_at(1, 4), grace_s=0.5)
    assert values == [(*undisturbed[:3], 1, 0)] * 2


def saves_slowly(world):
    """Have the snapshots of this start take so long that the process would end meanwhile."""
    save = snapshot.save

    def slowly(*args, **kwargs):
        time.sleep(1.5)
        return save(*args, **kwargs)

    if world.restart == 0:
        snapshot.save = slowly


def phase_of(world, rank):
    return world.recovery.pulse.beats.read()[rank].phase


def test_a_survivor_whose_train_state_is_dropped_is_not_ended_while_it_saves(undisturbed):
    """Main trains in a function of its own and goes on with something else, such as an export."""

    def main(world):
        saves_slowly(world)
        result = outcome(world)
        torch.distributed.barrier()
        if world.restart == 0:
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # in Python: the signal's handler ends it
        return result

    values = run_ranks(main, 2, lanes=4)
    assert values == [(*undisturbed[:3], 1, 0)] * 2


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_death_of_a_process_whose_main_has_returned_loses_nothing(is_kept, undisturbed):
    """The others still are in main, with their TrainState or without."""

    def main(world):
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        state, _ = trained(world, optimizer=adam, ema_decay=0.9, clip_norm=1.0)
        result = digest(state), state.train_loss, state.step, world.restart, world.recovery.steps_lost
        if not is_kept:
            del state
        if world.restart == 0 and world.rank == 0:
            while phase_of(world, 1) != Phase.DONE:
                time.sleep(0.01)
            os.kill(world.recovery.pulse.beats.read()[1].pid, signal.SIGKILL)
            time.sleep(60)
        return result

    values = run_ranks(main, 2, lanes=4)
    assert values == [(*undisturbed[:3], 1, 0)] * 2


class State:
    """Stands in for a TrainState whose snapshot does ``during`` meanwhile."""

    step = 3

    def __init__(self, during=lambda: None):
        self.during = during

    def snapshot(self):
        self.during()
        return {"model": {}, "training": {}, "meta": {}, "step": self.step}


def recovery_of(directory, state):
    recovery = Recovery(directory, None, rank=0, local_rank=0, local_world_size=1, restart=0)
    recovery.register(state)
    return recovery


def test_main_commits_nothing_between_the_last_snapshot_and_the_end(tmp_path, monkeypatch):
    """A process that leaves waits for a checkpoint after its snapshot, and main may still run then."""
    state = State()
    recovery = recovery_of(tmp_path, state)
    told = []
    recovery.finish = lambda: told.append(recovery._lock.acquire(blocking=False))
    monkeypatch.setattr("evenstep.recovery.end_process", told.append)
    recovery.leave()
    assert told == [False, sharedmem.LEFT_EXIT]
    assert snapshot.total_of(snapshot.newest([tmp_path])) == 3


def test_the_heartbeat_shows_a_snapshot_whatever_main_does_meanwhile(tmp_path):
    shown = []

    def main():
        with recovery.doing(Phase.EVALUATING):
            shown.append(recovery.pulse.beats.read()[0].phase)
        shown.append(recovery.pulse.beats.read()[0].phase)
        recovery.done()
        shown.append(recovery.pulse.beats.read()[0].phase)

    state = State(main)
    recovery = recovery_of(tmp_path, state)
    assert recovery.save() is not None
    assert shown == [Phase.SAVING] * 3
    assert recovery.pulse.beats.read()[0].phase == Phase.DONE


def test_a_state_that_main_has_dropped_is_kept_until_the_next_is_made():
    def main(world):
        import weakref

        recovery = world.recovery
        told = []
        refs = []
        for _ in range(2):
            state = TrainState(model := SmallNet(), torch.optim.SGD(model.parameters(), lr=0.1))
            told.append([ref() is not None for ref in refs])
            refs.append(weakref.ref(model))
            had = recovery.has_states
            del state, model
            told.append((had, recovery.has_states, recovery.has_something_to_save))
        return told

    assert run_ranks(main, 1) == [[[], (True, False, True), [False], (True, False, True)]]


def metrics_of(run_dir):
    """What metrics.jsonl says of training and evaluation, without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kinds = [line for line in lines if line["kind"] in ("train", "eval")]
    return [(m["kind"], m["step"], m["epoch"], m.get("loss"), m.get("accuracy")) for m in kinds]


def test_a_kill_before_an_evaluation_is_not_seen_in_the_metrics(tmp_path):
    """Rank 1 dies in the last commit of an epoch: rank 0 has committed, and nobody has evaluated."""
    results = []
    for name, fault in (("calm", None), ("killed", kill_at(1, 11, point="in_commit"))):
        values = {
            "data": "digits",
            "epochs": 2,
            "run_dir": str(tmp_path / name),
            "log_every": 1,
            "quiet": True,
        }
        config = from_flat(values)
        options = {"run_dir": str(tmp_path / name), "nproc": 2, "lanes": 2, "fault": fault}
        results.append(launch(train_job, config, **options, **CPU))
    calm, killed = results
    assert (killed["restarts"], killed["steps_lost"]) == (1, 0)
    same = ("weights_sha256", "test_accuracy", "train_loss", "step")
    assert [killed[key] for key in same] == [calm[key] for key in same]
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "calm")
    saved = [[(i.step, i.score) for i in checkpoint.ls(tmp_path / name)] for name in ("calm", "killed")]
    assert saved[0] == saved[1]


def test_two_runs_at_once_do_not_touch_each_other(undisturbed):
    handles = [
        launch(outcome, nproc=2, lanes=4, fault=kill_at(rank, 3 + rank), join=False, **CPU) for rank in (0, 1)
    ]
    assert [handle.wait(120) for handle in handles] == [(*undisturbed[:3], 1, 0)] * 2


TORCHRUN = """
    import sys
    sys.path.insert(0, {tests!r})
    from evenstep.launcher import launch
    from evenstep.testing import kill_at
    from test_recovery import outcome

    fault = kill_at(1, 4, point="in_reduce")
    found = launch(outcome, lanes=4, device="cpu", threads=1, timeout_s=20.0, fault=fault)
    sys.stdout.write(f"{{found}}\\n")  # at once: print may write the line end apart
"""


def test_under_torchrun(tmp_path, undisturbed):
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"),
        *("--nproc-per-node", "2", "--monitor-interval", "0.05"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    text = TORCHRUN.format(tests=str(Path(__file__).parent))
    done = run_script(text, path=tmp_path / "script.py", command=torchrun, env=environment, timeout=120)
    assert [eval(line) for line in done.stdout.splitlines()] == [(*undisturbed[:3], 1, 0)] * 2, done.stderr
    assert "went on from step 4 of rank 0's snapshot" in done.stderr


def test_snapshots_are_whole_or_not_there_and_only_the_newest_stays(tmp_path):
    state = {"model": {"w": torch.arange(3.0)}, "training": {"last": None}, "meta": {"seed": 1}, "step": 5}
    places = [tmp_path / "shared", tmp_path / "run"]
    assert snapshot.newest(places) is None
    first = snapshot.save(places, [state, None], total=5, rank=1)
    assert first == places[0] / "snapshot-000000000005.pt"
    saved = snapshot.read(first)
    assert (saved.total, saved.rank, saved.states[0].step, saved.states[1]) == (5, 1, 5, None)
    assert torch.equal(saved.states[0].model["w"], state["model"]["w"])
    before = first.stat().st_mtime_ns
    assert snapshot.save(places, [state], total=5, rank=0) == first  # another survivor was first
    assert first.stat().st_mtime_ns == before
    second = snapshot.save(places, [state], total=6, rank=0)
    assert snapshot.newest(places) == second
    assert [path.name for path in places[0].glob("*.pt")] == [second.name]


def test_a_snapshot_goes_to_the_run_directory_when_shared_memory_is_full(tmp_path, monkeypatch):
    from loguru import logger

    told = []
    number = logger.add(told.append, format="{message}")
    state = {"model": {"w": torch.zeros(1000)}, "training": {}, "meta": {}, "step": 1}
    places = [tmp_path / "shared", tmp_path / "run"]
    usage = snapshot.shutil.disk_usage
    monkeypatch.setattr(
        snapshot.shutil,
        "disk_usage",
        lambda path: usage(path)._replace(free=10 if "shared" in str(path) else 10**9),
    )
    try:
        assert snapshot.save(places, [state], total=1, rank=0).parent == places[1]
        monkeypatch.setattr(snapshot.shutil, "disk_usage", lambda path: usage(path)._replace(free=10))
        assert snapshot.save(places, [state], total=2, rank=0) is None
    finally:
        logger.remove(number)
    assert "cannot take it (it needs 4,000 bytes, and 10 are free)" in told[0]
    assert "no snapshot of step 2 could be written" in told[1]


def test_what_dead_launchers_left_is_removed_and_what_living_ones_have_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sharedmem, "SHARED_MEMORY", tmp_path)
    dead = tmp_path / "evenstep-dead"
    dead.mkdir()
    owners.name(dead, 4194304999)  # above every process id
    mine = sharedmem.Owned()
    other = sharedmem.Owned()
    assert not dead.exists()
    assert mine.path.exists()
    assert mine.path != other.path
    mine.close()
    other.close()
    assert not list(tmp_path.iterdir())


LEAVING = """
    import multiprocessing, os, signal
    from multiprocessing import resource_tracker
    from evenstep import sharedmem

    owned = sharedmem.Owned()
    with sharedmem.semaphores(owned.path):  # as those that torch's agent makes
        event = multiprocessing.get_context("spawn").Event()
    print(owned.path.name, flush=True)
    for pid in (resource_tracker._resource_tracker._pid, os.getpid()):  # so nobody can tidy up
        os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere semaphores are no files")
def test_semaphores_of_a_launch_that_was_killed_with_its_helpers_are_removed(tmp_path):
    done = run_script(LEAVING, path=tmp_path / "script.py")
    assert done.returncode == -signal.SIGKILL, done.stderr
    name = done.stdout.strip()

    def left():
        sharedmem.remove_leftovers()
        return list(sharedmem.SHARED_MEMORY.glob(f"*{name}*"))

    assert not gone_within(left)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere semaphores are no files")
def test_semaphores_are_named_after_their_launch():
    owned = sharedmem.Owned()
    try:
        with sharedmem.semaphores(owned.path):
            event = multiprocessing.get_context("spawn").Event()
        other = multiprocessing.get_context("spawn").Lock()
        found = list(sharedmem.SHARED_MEMORY.glob(f"sem.{owned.path.name}-*"))
        assert len(found) == 5  # of which an Event is made
        assert other._semlock.name.startswith("/mp-")
        del event
        assert not gone_within(lambda: list(sharedmem.SHARED_MEMORY.glob(f"sem.{owned.path.name}-*")))
    finally:
        owned.close()


def test_heartbeats_are_seen_by_others_and_outlive_a_process(tmp_path):
    pulse = Pulse(Heartbeats(tmp_path, 2), 1, 3, 0)
    pulse.step, pulse.phase = 7, Phase.TRAINING
    pulse.beat()
    seen = Heartbeats(tmp_path, 2).read()
    assert seen[0].pid == 0
    assert (seen[1].rank, seen[1].pid, seen[1].step, seen[1].phase) == (3, os.getpid(), 7, Phase.TRAINING)
    again = Pulse(Heartbeats(tmp_path, 2), 1, 3, 1)
    assert isinstance(again.beats.read()[1], Beat)
    assert (again.step, again.highest) == (0, 7)
    again.go_back_to(5)
    assert again.beats.read()[1].highest == 5


def test_a_point_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigError, match="point is 'in_reduc'; Did you mean 'in_reduce'"):
        kill_at(0, 1, point="in_reduc")
