import itertools

import pytest

from evenstep import Loader, TrainState, cross_entropy, timing, train_step
from evenstep.testing import run_ranks
from evenstep.timing import Stopwatch
from evenstep.world import World
from worlds import SmallNet, images


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by one second with each reading."""
    seconds = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(seconds)))


def test_data_and_steps_are_counted_apart(clock):
    stopwatch = Stopwatch()
    for _ in stopwatch.reading("ab"):
        with stopwatch.stepping():
            pass
    times = stopwatch.everybody(World(), 0.25)
    assert (times.steps, times.data_s, times.step_s, times.wait_s) == (2, [2.0], [2.0], [0.5])
    assert times.first_s == [1.0]


def test_a_long_first_step_is_told_of():
    def line(first_s, steps=100):
        return timing.slowest(timing.Times(steps, [0.0, 0.0], [50.0, 50.0], [None, None], [1.5, first_s]))

    assert (
        line(12.5)
        == "the first step took 12.5 s, 25 % of the time (it sets up buffers, and compiles with --compile)"
    )
    assert (
        line(0.2)
        == "the first step took 1.5 s, 3 % of the time (it sets up buffers, and compiles with --compile)"
    )
    assert line(12.5, steps=1) is None
    assert timing.slowest(timing.Times(9, [0.0], [5.0], [None], [0.9])) is None


def test_waiting_is_never_more_than_the_steps_and_may_be_unknown(clock):
    stopwatch = Stopwatch()
    with stopwatch.stepping():
        pass
    assert stopwatch.everybody(World(), 5.0).wait_s == [1.0]
    assert stopwatch.everybody(World(), None).wait_s == [None]


def test_every_rank_learns_the_times_of_all():
    def main(world):
        import time

        import torch

        torch.manual_seed(0)
        model = SmallNet()
        state, stopwatch = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)), Stopwatch()
        for batch in stopwatch.reading(Loader(images(100), 10).batches(state, epochs=1)):
            if world.rank == 1:
                time.sleep(0.05)  # so rank 0 has to wait for rank 1 in every step
            with stopwatch.stepping():
                train_step(state, batch, cross_entropy())
        times = stopwatch.everybody(world, state.lanes.wait_per_step_s)
        state.lanes.close()
        return times

    first, second = run_ranks(main, 2)
    assert first == second
    assert first.steps == 10
    assert first.wait_s[0] > first.wait_s[1]
    assert first.wait_s[0] > 0.2  # nine of the ten steps are sampled, each with a wait of 0.05 s


@pytest.mark.parametrize(
    ("data_s", "step_s", "wait_s", "line"),
    [
        (
            [1.0, 1.0, 1.0],
            [99.0, 99.0, 99.0],
            [13.0, 1.0, 13.0],
            "rank 1 was the slowest: the others waited 12 % of the time for it; "
            "waiting for data took 1 % of the time",
        ),
        (
            [0.0, 0.0],
            [10.0, 10.0],
            [0.0, 4.0],
            "rank 0 was the slowest: the other waited 40 % of the time for it; "
            "waiting for data took 0 % of the time",
        ),
        # all wait alike: that is what sending takes
        ([1.0, 1.0], [99.0, 99.0], [40.0, 41.0], None),
        ([30.0, 10.0], [70.0, 90.0], [None, None], "waiting for data took 20 % of the time"),
        ([30.0], [70.0], [0.0], "waiting for data took 30 % of the time"),
        ([0.0], [0.0], [0.0], None),
    ],
)
def test_the_slowest_rank_in_words(data_s, step_s, wait_s, line):
    assert timing.slowest(timing.Times(10, data_s, step_s, wait_s)) == line
