import resource
import sys

import pytest

from evenstep.testing import run_ranks


def page_faults(world, megabytes):
    """Page faults of a hundred allocations of the same size, after the first."""
    import torch

    def touch():
        torch.ones(megabytes << 18)

    touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        touch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told to keep pages")
def test_a_worker_keeps_the_pages_that_it_frees():
    faults = run_ranks(page_faults, 1, 40)[0]
    # 40 MB are 10,240 pages: without, a hundred times that many; with it, at most once more.
    assert faults < 50_000
