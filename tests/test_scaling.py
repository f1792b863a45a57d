"""The model of docs/scaling.md, and the order of sums in a tree that goes machine by machine."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.tree import cover, fold
from evenstep.world import share
from trees import subtree, text_of

ROOT = Path(__file__).parent.parent


@pytest.fixture
def scaling(monkeypatch):
    """Import benchmarks/scaling.py, and forget it and its neighbours after the test."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling

    yield scaling
    for name in ("scaling", "loopback", "clusters", "record", "reduce"):
        sys.modules.pop(name, None)


def test_the_page_has_the_tables_that_the_script_prints(scaling):
    page = scaling.PAGE.read_text()
    texts = scaling.tables()
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == texts.keys()
    assert scaling.filled(page, texts) == page, "run python benchmarks/scaling.py --write"
    assert scaling.filled(page, {**texts, "sum": "another"}) != page


def machine_by_machine(values, machines, add):
    """Fold inside each machine, then between machines: (sum, most subtrees that a machine sends)."""
    lanes = len(values)
    covers = [cover(share(machine, machines, lanes), lanes) for machine in range(machines)]
    nodes = {node: subtree(values, node, add) for nodes in covers for node in nodes}
    return fold(nodes, lanes, add), max(len(nodes) for nodes in covers)


@pytest.mark.parametrize(
    ("machines", "gpus"), [(1, 8), (2, 8), (4, 8), (16, 8), (4, 4), (3, 8), (5, 4), (7, 8), (2, 6), (6, 1)]
)
def test_a_tree_that_goes_machine_by_machine_has_the_same_bits(machines, gpus):
    lanes = machines * gpus
    generator = torch.Generator().manual_seed(lanes)
    values = [torch.randn(257, generator=generator) * 10.0 ** (lane % 5 - 2) for lane in range(lanes)]
    whole = fold({(lane, lane + 1): value for lane, value in enumerate(values)}, lanes, torch.add)
    total, sent = machine_by_machine(values, machines, torch.add)
    assert torch.equal(total, whole)
    if lanes > 2:
        assert not torch.equal(sum(values), whole)  # the numbers are not tame
    # With powers of two a machine is one subtree, and sends no more than a ring does.
    is_aligned = math.log2(machines).is_integer()
    assert sent == 1 if is_aligned else sent > 1 or gpus == 1
    names, _ = machine_by_machine([str(lane) for lane in range(lanes)], machines, lambda a, b: f"({a}+{b})")
    assert names == text_of((0, lanes))


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_adding_a_level_at_once_is_the_tree_where_rows_are_a_power_of_two(rows):
    values = torch.randn(rows, 33, generator=torch.Generator().manual_seed(rows))
    whole = fold({(row, row + 1): value for row, value in enumerate(values)}, rows, torch.add)
    left = values
    while len(left) > 1:
        left = left[0::2] + left[1::2]
    assert torch.equal(left[0], whole)


def test_the_parts_of_the_model_are_those_of_the_formulas(scaling):
    import clusters

    plain = clusters.Machines("plain", 1024, 0.0, 1.0, 0.0, 1.0, 10.0, math.inf, math.inf, 0.0)
    parts = scaling.ring(plain, 800.0, 8)
    assert (parts["hops"], parts["bytes"]) == (14, pytest.approx(2 * 800 * 7 / 8 / 10))
    parts = scaling.two_phase(plain, 800.0, 8)
    assert (parts["messages"], parts["hops"]) == (7, 7)
    # Together the bytes of a ring all-reduce.
    moved = parts["all-to-all bytes"] + parts["all-gather bytes"]
    assert moved == pytest.approx(scaling.ring(plain, 800.0, 8)["bytes"])
    three = scaling.two_phase(plain, 800.0, 3, lanes=8)  # a process has two subtrees
    assert three["all-to-all bytes"] == pytest.approx(2 * 800 * 2 / 3 / 10)
    assert scaling.gather(plain, 800.0, 4)["all-gather bytes"] == pytest.approx(800 * 3 / 10)


def test_between_machines_the_flat_sum_has_one_network_card_and_the_ring_all(scaling):
    parts = scaling.two_phase(scaling.H100, scaling.BUCKET, 1024)
    whole = scaling.ring(scaling.H100, scaling.BUCKET, 1024)["bytes"]
    assert 4 < (parts["all-to-all bytes"] + parts["all-gather bytes"]) / whole < 5
    parts = scaling.hierarchical(scaling.H100, scaling.BUCKET, 1024)
    between = 2 * scaling.BUCKET / 8 * 127 / 128 / scaling.H100.between_bytes_per_s
    inside = 2 * scaling.BUCKET * 7 / 8 / scaling.H100.inside_bytes_per_s
    assert parts["all-to-all bytes"] + parts["all-gather bytes"] == pytest.approx(between + inside)


def test_sums_hide_behind_backward_until_they_are_longer(scaling):
    import clusters

    work = clusters.Work("work", 25 * scaling.BUCKET / 4, 3.0)
    assert sum(scaling.buckets(work.gradient_bytes)) == work.gradient_bytes

    def way(seconds):
        return lambda machines, n, world_size: {"all": seconds}

    assert scaling.step_s(scaling.H100, work, 8, way(0.0)) == 3.0
    # Backward takes 2 s for 25 buckets of 0.08 s: sums of 0.04 s leave only the last one in sight.
    assert 3.0 < scaling.step_s(scaling.H100, work, 8, way(0.04)) <= 3.04 + 1e-9
    slow = scaling.step_s(scaling.H100, work, 8, way(1.0))
    assert slow == pytest.approx(1.0 + 2.0 / 25 / 25 + 26, abs=0.01)


def test_on_shared_cores_nothing_overlaps_and_all_is_slower(scaling):
    import clusters

    shared = clusters.Machines(**{**vars(scaling.H100), "cores": 2, "turn_s": 1e-3})
    assert scaling.crowded(shared, 2) is shared
    work = clusters.Work("work", 1000.0, 3.0)
    hop, byte = shared.inside_s + 3 / 4 * shared.turn_s, 4 / shared.inside_bytes_per_s
    expected = 4 * 3.0 + shared.call_s + 14 * hop + 2 * 4000 * 7 / 8 * byte
    assert scaling.step_s(shared, work, 8, scaling.ring) == pytest.approx(expected)
    # The wait for the last process: once for plain DDP, twice with evenstep, which meets after forward, too.
    late = clusters.Machines(**{**vars(shared), "last_s": 0.5})
    for way, meetings in ((scaling.ring, 1), (scaling.evenstep, 2)):
        waited = scaling.step_s(late, work, 8, way) - scaling.step_s(shared, work, 8, way)
        assert waited == pytest.approx(meetings * 0.5 * 2)  # log2(8 processes / 2 cores)
    assert scaling.waiting_s(late, 2, 2) == scaling.waiting_s(late, 1, 2) == 0
    assert scaling.waiting_s(scaling.H100, 1024, 2) == 0  # every process has a GPU of its own


def calibration(last_ms):
    """Return what --calibrate keeps, of steps that follow the model: 20 ms alone, 2 cores."""
    ways = {"all-reduce": 1000.0, "gather": 2000.0, "two-phase": 3000.0}
    sums = {str(w): {"16384": ways, "4194304": ways} for w in (2, 4, 8)}
    own = {1: 0.0, 2: 2.0, 4: 4.0, 8: 5.0}  # the vector and one bucket of 616 KiB, in ms
    alone = {str(w): {"median": 20.0 * max(1, w / 2)} for w in own}
    steps = {
        str(w): {"median": alone[str(w)]["median"] + own[w] + 2 * last_ms * max(0, math.log2(w / 2))}
        for w in own
    }
    return {"parameters": 157_578, "sums_us": sums, "alone_ms": alone, "steps_ms": steps}


def test_the_wait_for_the_last_process_is_fitted_to_a_calibration(scaling):
    import loopback

    kept = calibration(7.0)
    assert [loopback.own_sums_s(kept, w) for w in (1, 2, 4, 8)] == pytest.approx([0, 2e-3, 4e-3, 5e-3])
    assert loopback.fitted_last_s(kept, 2) == pytest.approx(7e-3)
    assert loopback.rest_s(kept, 8) == pytest.approx(4 * 7e-3)
    assert loopback.fitted_last_s(kept, 4) == 0.0  # nobody shares a core
    assert loopback.fitted_last_s(calibration(-3.0), 2) == 0.0


def test_a_calibration_measures_all_ranks(scaling):
    import loopback

    ranks = evenstep.launch(loopback.measure, (4096,), 2, nproc=2, threads=1, device="cpu", all_values=True)
    assert len(ranks) == 2
    for sums, alone, together in ranks:
        assert {way: len(samples) for way, samples in sums[4096].items()} == dict.fromkeys(loopback.WAYS, 2)
        assert len(alone) == len(together) == loopback.STEPS


def test_copies_of_lane_gradients(scaling):
    assert [scaling.copies(lanes, 1) for lanes in (1, 2, 4, 8, 16)] == [0, 1, 2, 3, 4]
    assert scaling.copies(64, 64) == 0
    assert scaling.copies(64, 8) == 3
    assert scaling.copies(32, 3) > scaling.copies(32, 2)  # a process with several subtrees
