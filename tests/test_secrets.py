"""Values of environment variables must not get into any file of a run, however its workers fail."""

import os

import pytest
import torch

from evenstep import Loader, TrainState, cross_entropy, train_step
from evenstep.errors import EvenstepError
from evenstep.testing import run_ranks
from worlds import SmallNet, images

SECRET = "hunter2-3f9ab1"


def main(world, way):
    token = os.environ["EVENSTEP_TEST_TOKEN"]
    model = SmallNet()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in Loader(images(), 50).batches(state, steps=2):
        train_step(state, batch, cross_entropy())
    state.save()
    if world.rank == 1:
        if way == "error":
            raise ValueError("characters in the token", len(token))
        if way == "exit":
            os._exit(7)
        if way == "signal":
            os.abort()
        if way == "shape":
            model(torch.zeros(1, 5, 8, 8))
    torch.distributed.barrier()


@pytest.mark.parametrize("way", ["none", "error", "exit", "signal", "shape"])
def test_no_file_and_no_message_has_the_value(tmp_path, monkeypatch, capfd, way):
    monkeypatch.setenv("EVENSTEP_TEST_TOKEN", SECRET)
    if way == "none":
        run_ranks(main, 2, way, run_dir=str(tmp_path), log_level="TRACE")
        text = ""
    else:
        with pytest.raises(EvenstepError) as caught:
            run_ranks(main, 2, way, run_dir=str(tmp_path), log_level="TRACE")
        text = f"{caught.value}{caught.value.__cause__}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"rank0.log", "rank1.log", "manifest.json"} <= {path.name for path in files}
    out, err = capfd.readouterr()
    assert SECRET not in text + out + err
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_search_would_find_it(tmp_path, monkeypatch):
    # With diagnose, loguru writes the values of variables into tracebacks.
    monkeypatch.setenv("EVENSTEP_TEST_TOKEN", SECRET)
    with pytest.raises(EvenstepError):
        run_ranks(main, 2, "error", run_dir=str(tmp_path), log_diagnose=True)
    assert SECRET in (tmp_path / "logs" / "rank1.log").read_text()
