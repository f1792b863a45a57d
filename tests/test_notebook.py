"""The notebook in a real kernel: what its cells show, and what an interrupt and an error leave behind."""

import os
import queue
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"
PATIENCE_S = 120


@pytest.fixture
def environment(tmp_path):
    """The environment of a kernel that keeps its files here; ipykernel behaves differently under pytest."""
    own = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")}
    hidden = {"PYTEST_CURRENT_TEST"}
    rest = {name: value for name, value in os.environ.items() if name not in hidden}
    return {
        **rest,
        **own,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def text_of(cell, name):
    return "".join(
        out["text"] for out in cell["outputs"] if out["output_type"] == "stream" and out["name"] == name
    )


def test_the_notebook(environment, tmp_path):
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)  # so that a change is a change of a line
    client = nbclient.NotebookClient(
        book, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)
    *_, two, picture, one = [cell for cell in book.cells if cell["cell_type"] == "code"]
    printed = text_of(two, "stdout")
    assert {"rank 0 of 2 has the lanes [0, 1]", "rank 1 of 2 has the lanes [2, 3]"} < set(
        printed.splitlines()
    )
    assert "60/60" in text_of(two, "stderr")  # the bar
    first, last = (float(word) for word in printed.split("loss ")[1].split(",")[0].split(" to "))
    assert last < first / 2
    assert "rank 0 of 1 has the lanes [0, 1, 2, 3]" in text_of(one, "stdout")
    assert printed.splitlines()[-1] == text_of(one, "stdout").splitlines()[-1]
    assert one["outputs"][-1]["data"]["text/plain"] == "True"
    images = [out["data"]["image/png"] for out in picture["outputs"] if "image/png" in out.get("data", {})]
    assert len(images) == 1
    assert len(images[0]) > 5000


class Kernel:
    """A kernel and what its cells show."""

    def __init__(self, environment, directory):
        self.manager = manager.KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment, cwd=str(directory))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()

    def run(self, code, when=None, do=None):
        """Run a cell; call ``do`` when ``when`` is printed; return what is printed, and the error."""
        number = self.client.execute(code)
        printed, error, end = "", None, time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
                if when is not None and when in printed:
                    do()
                    when = None
            elif kind == "error":
                assert error is None
                error = content
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error
        raise AssertionError(f"the cell does not end; it has printed {printed!r}")


@pytest.fixture
def kernel(environment, tmp_path):
    kernel = Kernel(environment, tmp_path)
    yield kernel
    kernel.close()


CELLS = """
import os, torch, evenstep

def main(world, steps):
    model = torch.nn.Linear(2, 1)
    state = evenstep.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01))
    rows = torch.utils.data.TensorDataset(torch.randn(64, 2))
    for batch in evenstep.Loader(rows, batch_size=8).batches(state, steps=steps):
        evenstep.train_step(state, batch, lambda model, batch: model(batch[0]).square().mean())
        if state.step == 3 and world.is_first:
            print("three steps done by", os.getpid())
    return state.step

def sleep(world):
    import time
    print("asleep")
    time.sleep(600)

def refuse(world):
    raise evenstep.errors.DataError("the file is empty")

def fail(world):
    if world.rank == 1:
        raise ValueError("seven is too many")
    world.receive()
"""


def test_an_interrupt_stops_the_run_and_an_error_is_one_exception(kernel):
    from conftest import descendants

    assert kernel.run(CELLS) == ("", None)
    assert kernel.run("evenstep.launch(main, 4, nproc=2, device='cpu', threads=1)")[1] is None
    pid = int(kernel.run("print(os.getpid())")[0])
    helpers = descendants(pid).keys()

    printed, error = kernel.run(
        "evenstep.launch(main, None, nproc=2, device='cpu', threads=1)",
        when="three steps done",
        do=kernel.manager.interrupt_kernel,
    )
    assert error["ename"] == "StoppedError"
    assert error["traceback"] == [f"StoppedError: {error['evalue']}"]
    assert "all ranks stopped after step" in error["evalue"]
    assert descendants(pid).keys() == helpers

    printed, error = kernel.run(
        "evenstep.launch(sleep, nproc=2, device='cpu', threads=1)",
        when="asleep",
        do=kernel.manager.interrupt_kernel,
    )
    assert error["ename"] == "KeyboardInterrupt"
    assert descendants(pid).keys() == helpers

    printed, error = kernel.run("evenstep.launch(fail, nproc=2, device='cpu', threads=1)")
    assert printed == ""
    assert error["ename"] == "WorkerError"
    text = "\n".join(error["traceback"])
    assert text.startswith("WorkerError: rank 1 failed: ValueError: seven is too many")
    assert 'in fail: raise ValueError("seven is too many")' in text  # the line of the cell
    assert "agent.py" not in text
    assert descendants(pid).keys() == helpers

    _, error = kernel.run("evenstep.launch(refuse, nproc=1, device='cpu', threads=1)")
    assert (error["ename"], error["evalue"]) == ("DataError", "the file is empty")
    assert error["traceback"][0].startswith("WorkerError: rank 0 failed: DataError: the file is empty\n")
    assert kernel.run("evenstep.launch(main, 2, nproc=2, device='cpu', threads=1)")[1] is None
