"""Which checkpoint a run goes on from when the newest is damaged."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from evenstep import Loader, TrainState, checkpoint, cross_entropy, snapshot, train_step
from evenstep.errors import CheckpointError
from evenstep.recovery import Recovery
from evenstep.resuming import newest_whole
from evenstep.testing import kill_at, run_ranks
from worlds import SmallNet, digest, images

FILES = (checkpoint.MODEL, checkpoint.TRAINING, checkpoint.MANIFEST)


def saving(world, steps):
    """Train, and save a checkpoint after every second step."""
    state = TrainState(model := SmallNet(), torch.optim.Adam(model.parameters(), lr=0.01))
    began_at = state.step
    for batch in Loader(images(), 50).batches(state, steps=steps):
        train_step(state, batch, cross_entropy())
        if state.step % 2 == 0 and state.step > began_at:
            state.save(wait=True, keep=9)
    return began_at, digest(state)


def flip(path, where=0.5):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(bytes(data))


def in_checkpoint(run_dir, step, name):
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}" / name


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 6 steps, its checkpoints of the steps 2, 4 and 6, and the digest of 8 steps."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    run_ranks(saving, 1, 6, lanes=2, run_dir=str(run_dir))
    ((_, expected),) = run_ranks(saving, 1, 8, lanes=2)
    return run_dir, expected


@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(name, stopped, tmp_path):
    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    flip(in_checkpoint(run_dir, 6, name))
    found = run_ranks(saving, 2, 8, lanes=2, run_dir=str(run_dir), resume=True)
    assert found == [(4, stopped[1])] * 2
    log = (run_dir / "logs" / "rank0.log").read_text()
    assert log.count("skipping a damaged checkpoint") == 1
    assert f"step-00000006/{name}" in log


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(stopped, tmp_path):
    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    for step, name in zip((2, 4, 6), FILES, strict=True):
        flip(in_checkpoint(run_dir, step, name))
    with pytest.raises(CheckpointError, match=r"no checkpoint of the run directory .* is whole") as caught:
        run_ranks(saving, 2, 8, lanes=2, run_dir=str(run_dir), resume=True)
    assert caught.value.exit_code == 4
    for step, name in zip((2, 4, 6), FILES, strict=True):
        assert f"step-{step:08d}/{name}" in str(caught.value)


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(stopped, tmp_path):
    path = shutil.copytree(in_checkpoint(stopped[0], 6, ""), tmp_path / "step-00000006")
    whole = (path / checkpoint.MANIFEST).read_bytes()
    for place in range(0, len(whole), 7):
        data = bytearray(whole)
        data[place] ^= 1
        (path / checkpoint.MANIFEST).write_bytes(bytes(data))
        same = False
        with contextlib.suppress(ValueError):  # a bit in the white space between two values may mean nothing
            same = json.loads(data) == json.loads(whole)
        assert same or checkpoint.verify(path), place


def test_after_a_death_of_all_a_damaged_checkpoint_is_not_taken(stopped, tmp_path):
    class Spoiling:
        """Kills the only process after step 6, whose checkpoint gets a changed byte first."""

        def __call__(self, rank, restart, point, step):
            if restart == 0 and point == "before_forward" and step == 6:
                flip(in_checkpoint(tmp_path, 6, checkpoint.MODEL))
            kill_at(0, 6, point="before_forward")(rank, restart, point, step)

    ((began_at, found),) = run_ranks(saving, 1, 8, lanes=2, run_dir=str(tmp_path), fault=Spoiling())
    assert (began_at, found) == (4, stopped[1])
    assert "2 steps are done again" in (tmp_path / "logs" / "rank0.log").read_text()


def test_machines_take_what_is_whole_on_all_of_them(stopped, tmp_path):
    def main(world, parent):
        here = dataclasses.replace(world, run_dir=str(Path(parent) / str(world.rank)))
        found = newest_whole(here.run_dir, here)
        lone = str(Path(parent) / ("0" if world.rank == 0 else "empty"))
        with pytest.raises(CheckpointError, match=r"step 6 .* is not, or not whole, on rank 1's machine"):
            newest_whole(lone, here)
        return found.name, newest_whole(str(Path(parent) / "empty"), here)

    for rank in (0, 1):
        shutil.copytree(stopped[0], tmp_path / str(rank))
    flip(in_checkpoint(tmp_path / "1", 6, checkpoint.TRAINING))
    assert run_ranks(main, 2, str(tmp_path)) == [("step-00000004", None)] * 2


def test_machines_go_on_from_the_newest_that_all_have_and_name_the_others(stopped, tmp_path):
    """Four ranks, each with a run directory of its own; 2 is the only step that all have alike."""

    def main(world, parent):
        from loguru import logger  # a global one does not travel to the workers

        here = dataclasses.replace(world, run_dir=str(Path(parent) / str(world.rank)))
        lines = []
        number = logger.add(lines.append, level="WARNING", format="{message}")
        found = newest_whole(here.run_dir, here)
        logger.remove(number)
        return found.name, [line.strip() for line in lines]

    for rank in range(4):
        shutil.copytree(stopped[0], tmp_path / str(rank))
    shutil.rmtree(in_checkpoint(tmp_path / "1", 6, ""))
    shutil.rmtree(in_checkpoint(tmp_path / "3", 6, ""))
    shutil.rmtree(in_checkpoint(tmp_path / "2", 4, ""))
    # Another run's, with other weights.
    other = shutil.copytree(in_checkpoint(tmp_path / "2", 2, ""), tmp_path / "other" / "step-00000004")
    shutil.copytree(other, in_checkpoint(tmp_path / "2", 4, ""))
    said = (
        "going on from the checkpoint of step 2, the newest that is whole on all machines: step 6 is not, "
        "or not whole, on rank 1's and rank 3's machine, step 4 is another one on rank 2's machine than on "
        "rank 0's"
    )
    assert run_ranks(main, 4, str(tmp_path), lanes=4) == [("step-00000002", [said])] * 4


def test_a_resume_goes_on_from_what_both_have_with_the_same_bits(stopped, tmp_path):
    def main(world, parent):
        own = dataclasses.replace(world, run_dir=str(Path(parent) / str(world.rank)))
        state = TrainState(model := SmallNet(), torch.optim.Adam(model.parameters(), lr=0.01), world=own)
        began_at = state.step
        for batch in Loader(images(), 50).batches(state, steps=8):
            train_step(state, batch, cross_entropy())
        return began_at, digest(state)

    for rank in range(2):
        shutil.copytree(stopped[0], tmp_path / str(rank))
    shutil.rmtree(in_checkpoint(tmp_path / "1", 6, ""))
    assert (
        run_ranks(main, 2, str(tmp_path), lanes=2, resume=True, run_dir=str(tmp_path / "run"))
        == [(4, stopped[1])] * 2
    )


def test_machines_of_which_one_has_only_damaged_checkpoints_all_say_so(stopped, tmp_path):
    """A rank that went on alone would wait for the others in its next collective."""

    def main(world, parent):
        here = dataclasses.replace(world, run_dir=str(Path(parent) / str(world.rank)))
        with pytest.raises(CheckpointError, match="is whole, so there is nothing to go on from") as caught:
            newest_whole(here.run_dir, here)
        return str(caught.value).splitlines()[1]

    run_dir = shutil.copytree(stopped[0], tmp_path / "0")
    for step in (2, 4, 6):
        flip(in_checkpoint(run_dir, step, checkpoint.MODEL))
    damaged, empty = run_ranks(main, 2, str(tmp_path))
    assert "step-00000006/" in damaged
    assert empty == "those on rank 0's machine are damaged; see its log"


def test_a_snapshot_is_taken_where_all_newer_checkpoints_are_damaged(stopped, tmp_path):
    def main(world, parent):
        memory = Path(parent) / "memory"
        memory.mkdir()
        state = {"model": {}, "training": {}, "meta": {}, "step": 1}
        snapshot.save([memory], [state], total=1, rank=0)
        recovery = Recovery(memory, None, rank=0, local_rank=0, local_world_size=1, restart=1)
        recovery.agree(dataclasses.replace(world, run_dir=str(Path(parent) / "run"), resume=True))
        return recovery.found().step, recovery.found_checkpoint, recovery.pulse.step

    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    for step in (2, 4, 6):
        flip(in_checkpoint(run_dir, step, checkpoint.MODEL))
    assert run_ranks(main, 1, str(tmp_path)) == [(1, None, 1)]
