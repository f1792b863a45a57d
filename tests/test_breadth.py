"""Everything a training may contain has the same bits on any number of processes."""

import pytest
import torch

import breadth
from evenstep.testing import run_ranks

LANES = 8
WORLD_SIZES = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def found():
    """``{(world_size, rank): {case: outcome}}``: one launch for each world size."""
    return {
        (world_size, rank): outcomes
        for world_size in WORLD_SIZES
        for rank, outcomes in enumerate(
            run_ranks(breadth.outcomes, world_size, list(breadth.CASES), lanes=LANES)
        )
    }


@pytest.mark.parametrize("case", breadth.CASES)
def test_the_same_bits_on_every_world_size(found, case):
    expected = found[1, 0][case]
    assert not isinstance(expected, str), expected
    different = {where: outcomes[case] for where, outcomes in found.items() if outcomes[case] != expected}
    assert not different, (expected, different)


def test_items_from_workers_are_those_without_workers(found):
    first = found[1, 0]
    assert first["random_items_from_workers"] == first["random_items_without_workers"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # the compiler: a minute, and much more on a busy machine
def test_a_compiled_model():
    def compiled(world):
        torch.manual_seed(7)
        return breadth.train(world, breadth.smooth(), compile=True, epochs=1)

    found = [value for n in (1, 2) for value in run_ranks(compiled, n, lanes=2, timeout_s=150)]
    assert all(value == found[0] for value in found[1:]), found


def test_a_run_that_goes_on_inside_an_epoch_with_other_numbers_of_processes(tmp_path):
    def part(steps, world_size, directory, **options):
        return run_ranks(
            breadth.part_of_a_run, world_size, steps, lanes=LANES, run_dir=str(directory), **options
        )

    whole = part(8, 1, tmp_path / "whole")[0]
    assert whole[2:] == (8, 2)  # 90 samples in batches of 32: three steps an epoch
    for steps, world_size in [(2, 3), (4, 1), (8, 2)]:
        found = part(steps, world_size, tmp_path / "parts", resume=steps > 2)
    assert all(value == whole for value in found), (whole, found)
