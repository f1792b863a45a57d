import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from evenstep import evaluate, health, options, stacks
from evenstep.errors import ConfigError, MemoryExhaustedError, WorkerError
from evenstep.failure import Frame
from evenstep.flat import from_flat
from evenstep.health import Place, Watch, describe
from evenstep.heartbeat import Activity, Beat, Phase
from evenstep.launcher import launch
from evenstep.testing import run_ranks
from scripts import CPU, run_script
from worlds import SmallNet, images

OWN = os.path.dirname(health.__file__)
TORCH = "/lib/python3/site-packages/torch"
NOW = 1000.0
WATCH = Watch(hang_after=60.0, timeout_s=300.0)


def frames(*places):
    """Frames from the innermost one; those of this project and of torch are no user's."""
    return tuple(
        Frame(file, line, function, "", not file.startswith((OWN, TORCH))) for file, line, function in places
    )


def place(rank, activity, *stack, since=61.0, step=41, phase=Phase.TRAINING, num_states=1, **more):
    beat = Beat(rank, 100 + rank, 0, num_states, step, step, phase, 0.0, activity, NOW - since)
    return Place(beat, frames(*stack), **more)


IN_BACKWARD = [
    (f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward"),
    (f"{OWN}/lanes.py", 300, "backward"),
    (f"{OWN}/step.py", 80, "train_step"),
    ("/u/train.py", 20, "main"),
]
IN_BARRIER = [
    (f"{TORCH}/distributed/distributed_c10d.py", 4000, "barrier"),
    (f"{TORCH}/distributed/c10d_logger.py", 80, "wrapper"),
    ("/u/train.py", 22, "main"),
]
SLEEPING = [
    ("/u/data.py", 31, "__getitem__"),
    (f"{OWN}/data/loader.py", 9, "next"),
    ("/u/train.py", 18, "main"),
]


def test_the_report_names_who_waits_where_and_who_is_missing():
    places = [
        place(0, Activity.REDUCE, *IN_BACKWARD, since=60.9),
        place(1, Activity.USER, *SLEEPING),
        place(2, Activity.REDUCE, *IN_BACKWARD, since=60.9),
        place(3, Activity.REDUCE, *IN_BACKWARD, since=60.8),
    ]
    hang = describe(places, NOW, WATCH)
    assert hang.text.splitlines() == [
        "no progress for 61 s:",
        "rank 1 has not arrived: step 41, in user code since 61 s, at /u/data.py:31 in __getitem__",
        "  /u/train.py:18 in main",
        "ranks 0, 2 and 3 wait for it in the gradient sum of step 41 at /u/train.py:20",
        "the run goes on waiting, at most 300 s (--timeout-s); --on-hang abort would end it",
    ]
    assert hang.missing == (1,)
    assert hang.is_sure


def test_the_last_line_of_a_run_that_will_end():
    places = [place(0, Activity.REDUCE, *IN_BACKWARD), place(1, Activity.USER, *SLEEPING)]
    hang = describe(places, NOW, Watch(hang_after=60.0, on_hang="abort"))
    assert hang.text.splitlines()[-1] == "--on-hang abort ends a run that does not get on"
    error = health.aborted(hang)
    assert str(error).splitlines()[-1] == "the run was ended (--on-hang abort)"
    assert (error.rank, error.exit_code) == (1, 1)


@pytest.mark.parametrize(
    ("activity", "stack", "waits"),
    [
        (Activity.REDUCE, IN_BACKWARD, "the gradient sum of step 41"),
        (Activity.REDUCE, [], "the gradient sum of step 41"),
        # the user's own backward function runs in there
        (Activity.REDUCE, [("/u/ops.py", 3, "backward"), *IN_BACKWARD], None),
        (Activity.FORWARD, [("/u/model.py", 3, "forward"), *IN_BACKWARD[1:]], None),
        (Activity.GATHER, [], "evaluate after step 41"),
        (Activity.CHECK, [], "the check of the weights after step 41"),
        (Activity.USER, IN_BARRIER, "barrier"),
        (Activity.FORWARD, IN_BARRIER, "barrier"),
        (Activity.USER, SLEEPING, None),
        (Activity.USER, [], None),
        (
            Activity.USER,
            [
                (f"{TORCH}/distributed/utils.py", 2, "_verify_param_shape_across_processes"),
                (f"{OWN}/lanes.py", 9, "_wrap"),
                ("/u/train.py", 5, "main"),
            ],
            "TrainState",
        ),
    ],
)
def test_what_a_rank_waits_in(activity, stack, waits):
    assert health.waits_in(place(0, activity, *stack)) == waits


def test_nobody_waits():
    """Users may compute for as long as they like; only data that do not come are reported."""
    busy = [place(rank, Activity.USER, *SLEEPING) for rank in range(2)]
    assert describe(busy, NOW, WATCH) is None
    recent = [place(0, Activity.REDUCE, *IN_BACKWARD, since=59.0), place(1, Activity.USER, *SLEEPING)]
    assert describe(recent, NOW, WATCH) is None
    reading = [place(rank, Activity.DATA, *SLEEPING) for rank in range(2)]
    text = describe(reading, NOW, WATCH).text
    assert "rank 0 has not arrived: step 41, reading data since 61 s, at /u/data.py:31" in text


def test_all_ranks_wait_in_different_places():
    places = [place(0, Activity.GATHER, *IN_BARRIER), place(1, Activity.REDUCE, *IN_BACKWARD)]
    lines = describe(places, NOW, WATCH).text.splitlines()
    assert lines[1] == "rank 0 waits in evaluate after step 41 at /u/train.py:22"
    assert lines[2] == "rank 1 waits in the gradient sum of step 41 at /u/train.py:20"
    assert lines[3].startswith("nobody gets on, because they wait in different places")


def test_all_ranks_wait_in_the_same_place():
    places = [place(rank, Activity.REDUCE, *IN_BACKWARD) for rank in range(5)]
    lines = describe(places, NOW, WATCH).text.splitlines()
    assert lines[1] == "ranks 0-4 wait in the gradient sum of step 41 at /u/train.py:20"
    assert lines[2].startswith("no rank of this machine is missing: look at the other machines")


def test_a_rank_whose_main_has_returned_and_one_without_a_stack():
    places = [
        place(0, Activity.REDUCE, *IN_BACKWARD),
        place(1, Activity.USER, phase=Phase.DONE),
        place(2, Activity.USER, note="it does not answer for its stack", num_states=0),
    ]
    lines = describe(places, NOW, WATCH).text.splitlines()
    assert lines[1] == "rank 1 has not arrived: its main has returned"
    assert lines[2] == "rank 2 has not arrived: in user code since 61 s; it does not answer for its stack"
    assert lines[3] == "rank 0 waits for them in the gradient sum of step 41 at /u/train.py:20"


def test_the_workers_of_a_dataloader_are_shown():
    helper = frames(("/u/data.py", 31, "__getitem__"), (f"{TORCH}/utils/data/_utils/worker.py", 3, "loop"))
    waiting = place(
        1, Activity.DATA, (f"{TORCH}/utils/data/dataloader.py", 3, "next"), helpers=((77, helper),)
    )
    lines = describe([place(0, Activity.REDUCE, *IN_BACKWARD), waiting], NOW, WATCH).text.splitlines()
    assert lines[2] == "  its DataLoader worker (pid 77) is at /u/data.py:31 in __getitem__"


def test_many_missing_ranks_are_folded():
    places = [place(rank, Activity.USER, *SLEEPING[:1]) for rank in range(1, 9)]
    lines = describe([place(0, Activity.REDUCE, *IN_BACKWARD), *places], NOW, WATCH).text.splitlines()
    assert len(lines) == 8
    assert lines[5] == "and 4 more have not arrived"


ANSWER = f"""\
Thread 0x00000000000000aa (most recent call first):
  File "/usr/lib/python3/threading.py", line 324 in wait

Current thread 0x00000000000000bb [main] (most recent call first):
  File "/u/data.py", line 31 in __getitem__
  File "/u/train.py", line 18 in main
  File "{OWN}/worker.py", line 99 in entry
  File "<string>", line 1 in <module>
"""


def test_the_main_threads_frames_are_read():
    found = stacks.parse(ANSWER.splitlines(), 0xBB)
    assert [(frame.file, frame.line, frame.function) for frame in found[:2]] == [
        ("/u/data.py", 31, "__getitem__"),
        ("/u/train.py", 18, "main"),
    ]
    assert found[-1].function == "entry"  # not how the process was started
    assert [frame.function for frame in stacks.parse(ANSWER.splitlines(), 0xAA)] == ["wait"]
    assert stacks.parse(ANSWER.splitlines(), 0xCC) == ()


def test_a_process_answers_only_while_it_is_asked_to(tmp_path):
    path = stacks.stack_file(tmp_path, 3, 1)
    before = signal.getsignal(stacks.SIGNAL)
    try:
        with stacks.answering(tmp_path, 3, 1):
            found, note = stacks.ask(os.getpid(), path)
        assert note == ""
        assert "test_a_process_answers_only_while_it_is_asked_to" in [frame.function for frame in found]
        # No handler: the signal would end the process, so it is not sent.
        assert stacks.ask(os.getpid(), path) == ((), "it does not answer for its stack")
    finally:
        signal.signal(stacks.SIGNAL, before)


def test_a_stranger_and_a_stopped_process_are_left_alone(tmp_path):
    path = stacks.stack_file(tmp_path, 0, 0)
    path.write_text("main 0x1\n")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            assert stacks.ask(process.pid, path) == ((), "it does not answer for its stack")
            process.send_signal(signal.SIGSTOP)
            while stacks.state_of(process.pid) != "T":
                time.sleep(0.01)
            assert "is stopped" in stacks.ask(process.pid, path)[1]
            assert process.poll() is None
        finally:
            process.kill()


def training(world, stop_at, meanwhile, data=None, **loading):
    """Train without end; rank 1 does something else after some steps."""
    import torch

    from evenstep import Loader, TrainState, cross_entropy, train_step

    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with Loader(data or images(), 50, **loading) as loader:
        for batch in loader.batches(state, epochs=2):
            if state.step == stop_at and world.rank == 1:
                meanwhile(world)
            train_step(state, batch, cross_entropy())
    return state.step


def wait_for_the_word(world):
    world.receive(60)


def reported(capsys, handle, words):
    """Wait for a report that has these words, let the run go on, and return the reports.

    On a busy machine a slow start may be reported before.
    """
    text = ""
    while words not in text or not text.endswith("would end it\n"):
        assert handle.poll() is None, text
        text += capsys.readouterr().err
        time.sleep(0.02)
    handle.send("go on")
    return text


def test_a_run_that_waits_is_reported_and_goes_on(capsys):
    handle = launch(training, 3, wait_for_the_word, nproc=3, hang_after=0.5, join=False, **CPU)
    text = reported(capsys, handle, "rank 1 has not arrived: step 3, in user code since")
    assert "test_health.py:" in text
    assert "in wait_for_the_word: world.receive(60)" in text
    assert "ranks 0 and 2 wait for it in the gradient sum of step 3 at " in text
    assert handle.wait() == 10


def sleep(world):
    time.sleep(600)


def test_abort_ends_the_run_with_the_report():
    with pytest.raises(WorkerError, match="rank 1 has not arrived: step 3") as caught:
        launch(training, 3, sleep, nproc=2, hang_after=2.0, on_hang="abort", grace_s=0.5, **CPU)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert str(caught.value).endswith("the run was ended (--on-hang abort)")


def sleep_once(world):
    if world.restart == 0:
        time.sleep(600)


def test_a_rank_that_hangs_is_started_again_when_the_others_have_waited_long_enough(capsys):
    options = {**CPU, "timeout_s": 4.0}
    steps = launch(training, 3, sleep_once, nproc=2, hang_after=0.5, grace_s=0.5, all_values=True, **options)
    assert steps == [10, 10]
    assert "rank 1 has not arrived: step 3, in user code since" in capsys.readouterr().err


def test_a_failure_after_a_hang_tells_of_the_hang():
    def main(world):
        import torch.distributed as dist

        if world.rank == 1:
            time.sleep(600)
        dist.barrier()

    with pytest.raises(WorkerError, match=r"rank 0 failed: .*imed out") as caught:
        launch(main, nproc=2, hang_after=2.0, grace_s=0.5, **{**CPU, "timeout_s": 5.0})
    assert "\nbefore that, no progress for " in str(caught.value)
    assert "rank 1 has not arrived: in user code since" in str(caught.value)
    assert health.remembered(None, 0) == ""
    assert health.remembered((0, health.Hang("text\nlast", (), True)), 1) == ""


def test_a_collective_of_the_users_own_is_named_too():
    def main(world):
        import torch.distributed as dist

        if world.rank == 0:
            time.sleep(600)
        dist.barrier()

    with pytest.raises(WorkerError) as caught:
        launch(main, nproc=2, hang_after=2.0, on_hang="abort", grace_s=0.5, **CPU)
    text = str(caught.value)
    assert "rank 0 has not arrived: in user code since" in text
    assert "rank 1 waits for it in barrier at " in text


def test_rank_0_alone_may_take_longer_than_the_others_would_wait(capsys):
    def main(world):
        from evenstep import on_first

        return on_first(lambda: world.receive(60))

    options = {**CPU, "timeout_s": 3.0, "hang_after": 4.0, "on_hang": "abort"}
    handle = launch(main, nproc=2, join=False, all_values=True, **options)
    text = ""
    while "in on_first" not in text:
        assert handle.poll() is None, text
        text += capsys.readouterr().err
        time.sleep(0.02)
    assert "rank 0 has not arrived: in user code" in text
    handle.send("done")
    assert handle.wait() == ["done", "done"]


def test_on_first_in_a_world_of_one():
    from evenstep import on_first

    assert on_first(sum, [1, 2]) == 3


class Sleeper:
    """A data set whose sample 7 never comes."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        import torch

        if i == 7:
            time.sleep(600)
        return torch.zeros(3, 16, 16), 0


def test_a_dataloader_worker_that_hangs_is_shown():
    with pytest.raises(WorkerError) as caught:
        launch(training, -1, sleep, Sleeper(), nproc=1, hang_after=2.0, on_hang="abort", grace_s=0.5, **CPU)
    assert "reading data since" in str(caught.value)
    assert "in __getitem__: time.sleep(600)" in str(caught.value)
    with pytest.raises(WorkerError, match=r"its DataLoader worker \(pid \d+\) is at .* time.sleep\(600\)"):
        run_ranks(
            lambda world: training(world, -1, sleep, Sleeper(), workers=1),
            1,
            hang_after=2.0,
            on_hang="abort",
            grace_s=0.5,
        )


def test_an_evaluation_on_rank_0_only_is_an_error():
    def main(world):
        import torch

        from evenstep import Loader, TrainState, classification, cross_entropy, train_step

        model = SmallNet()
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for batch in Loader(images(), 50).batches(state, epochs=2):
            train_step(state, batch, cross_entropy())
            if world.rank == 0 and state.step == 3:
                evaluate(model, images(20), classification)

    with pytest.raises(
        ConfigError, match=r"evaluate was called after step 3 on rank 0, while rank 1 does the next step"
    ):
        launch(main, nproc=2, grace_s=0.5, **CPU)


def test_an_evaluation_after_the_others_have_ended_is_an_error():
    def main(world):
        from evenstep import classification

        if world.rank == 1:
            evaluate(SmallNet(), images(20), classification)

    with pytest.raises(ConfigError, match="on rank 1, while rank 0 has ended its main"):
        launch(main, nproc=2, grace_s=0.5, **CPU)


def test_different_models_are_an_error_that_names_the_first_difference():
    def main(world):
        import torch

        from evenstep import TrainState

        model = SmallNet(channels=8 + world.rank)
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))

    with pytest.raises(
        ConfigError,
        match=r"rank 0 has conv1.weight \(8, 3, 3, 3\) torch.float32 where rank 1 has conv1.weight \(9, 3",
    ):
        launch(main, nproc=2, grace_s=0.5, **CPU)


def test_a_caught_error_of_a_step_stops_all_ranks():
    def main(world):
        import torch

        from evenstep import Loader, TrainState, cross_entropy, train_step

        def loss(model, batch):
            if world.rank == 1 and state.step == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return cross_entropy()(model, batch)

        model = SmallNet()
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for batch in Loader(images(), 50).batches(state, epochs=2):
            with contextlib.suppress(MemoryExhaustedError):
                train_step(state, batch, loss)

    with pytest.raises(
        ConfigError, match="step 3 failed before its gradients were summed, and the error was"
    ):
        launch(main, nproc=2, grace_s=0.5, **CPU)


TORCHRUN = """
    import time
    import evenstep

    def main(world):
        import torch.distributed as dist
        if world.rank == 1:
            time.sleep(600)
        dist.barrier()

    evenstep.launch(main, device="cpu", threads=1, hang_after=2.0, on_hang="abort")
"""


def test_under_torchrun_the_first_process_reports(tmp_path):
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_script(TORCHRUN, path=tmp_path / "script.py", command=command, timeout=120)
    assert done.returncode != 0
    assert "rank 1 has not arrived: in user code since" in done.stderr
    assert "in main: time.sleep(600)" in done.stderr
    assert "rank 0 waits for it in barrier at" in done.stderr


class Watched:
    """A data set that notes what the heartbeat says while it is read."""

    def __init__(self, note):
        self.note = note

    def __len__(self):
        return 8

    def __getitem__(self, i):
        import torch

        self.note("data")
        return torch.ones(2), 0


def test_the_heartbeat_shows_what_a_rank_is_about():
    def main(world):
        import torch

        from evenstep import Loader, TrainState, cross_entropy, train_step

        seen = {}

        def note(where):
            beat = world.recovery.pulse.beats.read()[0]
            seen.setdefault(where, set()).add((beat.activity, beat.evaluations))

        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                note("forward")
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                note("backward")
                return gradient

        def loss(model, batch):
            return cross_entropy()(lambda x: Backward.apply(model(x)), batch)

        def metrics(model, batch):
            note("evaluate")
            return {"mean": model(batch[0]).mean()}

        model = torch.nn.Linear(2, 2)
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in Loader(Watched(note), 4).batches(state, epochs=1):
            note("loop")
            train_step(state, batch, loss)
            note("loop")
        evaluate(model, Watched(lambda _: None), metrics)
        note("loop")
        return seen

    alone = run_ranks(main, 1)[0]
    assert alone == {
        "data": {(Activity.DATA, 0)},
        "forward": {(Activity.FORWARD, 0)},
        "backward": {(Activity.REDUCE, 0)},
        "evaluate": {(Activity.EVALUATE, 0)},
        "loop": {(Activity.USER, 0)},
    }
    assert run_ranks(main, 2)[0]["loop"] == {(Activity.USER, 0), (Activity.USER, 1)}


def test_the_command_passes_the_options_on():
    given = options.launch_options(from_flat({"hang_after": 5.0, "on_hang": "abort"}))
    assert (given["hang_after"], given["on_hang"]) == (5.0, "abort")
    assert health.Watch(hang_after=0.0).on_hang == "wait"


@pytest.mark.parametrize("values", [{"on_hang": "stop"}, {"hang_after": -1}])
def test_wrong_options(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        launch(print, **values)
