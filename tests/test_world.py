import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigError, MachineError
from evenstep.world import (
    World,
    current,
    default_threads,
    entered,
    num_cores,
    placement,
    process_started,
    set_variables,
    share,
    variable,
    variables,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@given(st.integers(1, 50), st.integers(0, 500))
def test_shares_cover_everything_once_in_order_and_evenly(parts, n):
    pieces = [share(index, parts, n) for index in range(parts)]
    assert [x for piece in pieces for x in piece] == list(range(n))
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 16), st.integers(0, 30))
def test_every_lane_has_one_owner_and_every_rank_a_lane(world_size, more):
    lanes = world_size + more
    worlds = [World(rank=r, world_size=world_size, lanes=lanes) for r in range(world_size)]
    assert [lane for world in worlds for lane in world.own_lanes] == list(range(lanes))
    assert all(len(world.own_lanes) > 0 for world in worlds)
    assert [world.is_first for world in worlds] == [True] + [False] * (world_size - 1)
    assert worlds[0].lanes_of(world_size - 1) == worlds[-1].own_lanes


def test_more_processes_than_lanes_is_an_error():
    with pytest.raises(ConfigError, match=r"world size 4 is above lanes 2.*--nproc 2.*--lanes 4"):
        World(world_size=4, lanes=2)


def test_nobody_to_receive_from():
    World().send("dropped")
    with pytest.raises(MachineError, match=r"no parent to receive from.*evenstep\.launch"):
        World().receive()


def test_entered_worlds_nest():
    outer, inner = World(seed=1), World(seed=2)
    with entered(outer):
        with entered(inner):
            assert current() is inner
        assert current() is outer
    assert current() == World()


def test_placement_of_torchrun():
    place = placement(TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.node_rank, place.num_nodes, place.restart, place.launcher) == (1, 2, 2, "torchrun")


def test_placement_without_a_launcher():
    assert placement({}) is None


def test_placement_with_a_variable_missing():
    with pytest.raises(MachineError, match=r"WORLD_SIZE is missing although RANK is set.*unset RANK"):
        placement({"RANK": "0"})


def test_placement_with_a_broken_number():
    with pytest.raises(MachineError, match=r"WORLD_SIZE is 'two', not a whole number"):
        placement(TORCHRUN | {"WORLD_SIZE": "two"})


def test_variables_are_put_back(monkeypatch):
    monkeypatch.setenv("EVENSTEP_A", "old")
    monkeypatch.delenv("EVENSTEP_B", raising=False)
    with variables({"EVENSTEP_A": "new", "EVENSTEP_B": "new"}):
        assert (variable("EVENSTEP_A"), variable("EVENSTEP_B")) == ("new", "new")
    assert (variable("EVENSTEP_A"), variable("EVENSTEP_B", "gone")) == ("old", "gone")


def test_set_variables(monkeypatch):
    monkeypatch.setenv("EVENSTEP_A", "old")
    set_variables({"EVENSTEP_A": "new"})
    assert os.environ["EVENSTEP_A"] == "new"


def test_default_threads_depend_on_lanes_alone():
    assert default_threads(1) == num_cores()
    assert default_threads(10 * num_cores()) == 1


def test_variables_that_overlap_are_put_back_by_the_last(monkeypatch):
    monkeypatch.setenv("EVENSTEP_TEST_A", "before")
    monkeypatch.delenv("EVENSTEP_TEST_B", raising=False)
    values = {"EVENSTEP_TEST_A": "held", "EVENSTEP_TEST_B": "held"}
    first, second = variables(values), variables(values)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # not in the order of a stack
    assert os.environ["EVENSTEP_TEST_A"] == os.environ["EVENSTEP_TEST_B"] == "held"
    second.__exit__(None, None, None)
    assert os.environ["EVENSTEP_TEST_A"] == "before"
    assert "EVENSTEP_TEST_B" not in os.environ


def test_when_this_process_was_started():
    assert 0 <= time.time() - process_started() < 24 * 3600
    assert abs(process_started() - process_started()) < 0.1  # a fixed moment, whenever it is asked
