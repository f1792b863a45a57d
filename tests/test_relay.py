import contextlib
import io
import subprocess
import sys
import threading

from evenstep.launcher import launch
from evenstep.testing import kill_at
from scripts import CPU, run_script


def test_what_workers_print_arrives_where_stdout_leads(capfd):
    def main(world):
        print(f"rank {world.rank} says höhö")
        subprocess.run(["echo", f"child of {world.rank}"], check=True)
        print(f"rank {world.rank} complains", file=sys.stderr)

    shown, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(complaints):
        launch(main, nproc=2, **CPU)
    lines = sorted(shown.getvalue().splitlines())
    assert lines == ["child of 0", "child of 1", "rank 0 says höhö", "rank 1 says höhö"]
    assert sorted(complaints.getvalue().splitlines()) == ["rank 0 complains", "rank 1 complains"]
    assert capfd.readouterr() == ("", "")


def test_a_stream_that_can_only_write_ends_nobody():
    class Tee:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

    def main(world):
        for number in range(3):
            print(number)
        return "done"

    tee = Tee()
    with contextlib.redirect_stdout(tee):
        assert launch(main, nproc=1, **CPU) == "done"
    assert tee.text.split() == ["0", "1", "2"]


class Listener(io.StringIO):
    """Tells when it is written to."""

    def __init__(self):
        super().__init__()
        self.heard = threading.Event()

    def write(self, text):
        self.heard.set()
        return super().write(text)


def test_it_arrives_while_main_goes_on():
    def main(world):
        print("halfway", end="\r")
        sys.stdout.flush()
        print("still here")
        return world.receive(timeout_s=60)

    listener = Listener()
    with contextlib.redirect_stdout(listener):
        handle = launch(main, nproc=1, join=False, **CPU)
    with handle:
        assert listener.heard.wait(60)  # main waits for the next line
        handle.send("go on")
        assert handle.wait(60) == "go on"
    assert listener.getvalue() == "halfway\rstill here\n"


def test_a_line_arrives_without_a_flush():
    def main(world):
        print("a line")
        return world.receive(timeout_s=60)

    listener = Listener()
    with contextlib.redirect_stdout(listener), launch(main, nproc=1, join=False, **CPU) as handle:
        assert listener.heard.wait(60)
        handle.send(1)
        handle.wait(60)


def test_a_new_start_of_the_workers_prints_into_the_same_place():
    def main(world):
        import torch

        from evenstep import TrainState

        model = torch.nn.Linear(1, 1)
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        print(f"start {world.restart}")
        if world.restart == 0:
            world.fault("before_forward", 0)

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        launch(main, nproc=1, fault=kill_at(0, 0, point="before_forward"), **CPU)
    assert shown.getvalue().splitlines() == ["start 0", "start 1"]


def test_a_stream_that_is_closed_meanwhile_does_not_end_the_run():
    def main(world):
        for _ in range(3):
            print("nobody hears this")
        return "done"

    closed = io.StringIO()
    with contextlib.redirect_stdout(closed):
        handle = launch(main, nproc=1, join=False, **CPU)
        closed.close()
    with handle:
        assert handle.wait(60) == "done"


def test_streams_that_lead_where_they_should_are_left_alone(tmp_path):
    script = """
        import contextlib, io, sys
        from evenstep.relay import led_elsewhere
        assert led_elsewhere() == {}
        with contextlib.redirect_stdout(io.StringIO()) as other:
            assert led_elsewhere() == {"stdout": other}
        with contextlib.redirect_stderr(None):
            assert led_elsewhere() == {}
        with open("file.txt", "w") as other, contextlib.redirect_stderr(other):
            assert led_elsewhere() == {"stderr": other}
        print("well")
    """
    done = run_script(script, path=tmp_path / "script.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("well\n", "")
