import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from loguru import logger

from evenstep import report
from evenstep.banner import Facts, banner, final_line, group_lines
from evenstep.errors import MachineError
from evenstep.flat import from_flat, read_toml
from evenstep.records import MetricsFile, save_config
from evenstep.reporter import Reporter
from evenstep.timing import Times
from evenstep.world import World, num_cores

FACTS = Facts(
    data="cifar10", train_samples=50_000, test_samples=10_000, steps_per_epoch=391, total_steps=3910,
    num_parameters=123_456, lr=0.05,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def world(**values):
    return World(**{"world_size": 2, "local_world_size": 2, "lanes": 2, "threads": 1, **values})


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_banner_has_the_batch_arithmetic():
    lines = banner(from_flat({"batch_size": 128}), world(run_dir="runs/a"), FACTS)
    assert lines[0] == "evenstep: net (123,456 parameters) on cifar10, exact mode, seed 0, run runs/a"
    assert lines[1] == "batch 128 = 2 lanes x 64; 2 processes x 1 lane x 1 thread on cpu (gloo)"
    assert lines[2] == "50,000 train images -> 391 steps an epoch (the last with 80); 10,000 test images"


def test_the_banner_says_uneven_lanes():
    lines = banner(from_flat({"batch_size": 100}), world(lanes=3), FACTS)
    assert "batch 100 = 3 lanes x 33 or 34; 2 processes x 1 or 2 lanes x 1 thread on cpu (gloo)" in lines


def test_the_banner_gives_a_reason_for_each_automatic_choice():
    facts = Facts(**{**vars(FACTS), "data_note": "cifar10 cannot be had", "precision_note": "bf16 is faster"})
    text = "\n".join(banner(from_flat({}), world(), facts))
    for expected in (
        f"nproc 2: no GPU, {num_cores()} CPU core",
        "lanes 2: one per process; to go on later with the same bits on more processes, start with --lanes 8",
        f"threads 1: {num_cores()} core",
        "device cpu: no GPU found (--device)",
        "data cifar10: cifar10 cannot be had",
        "precision fp32: bf16 is faster",
        "lr 0.05: the default of sgd (--lr)",
    ):
        assert expected in text


def test_the_banner_explains_no_choice_that_was_given():
    config = from_flat({"nproc": 2, "lanes": 2, "threads": 1, "device": "cpu", "lr": 0.1})
    assert len(banner(config, world(), FACTS)) == 3


def test_the_banner_says_that_lanes_limit_the_processes():
    lines = banner(from_flat({"lanes": 2}), world(), FACTS)
    assert any("at most 4, and no more than 2 lanes (--nproc)" in line for line in lines)


def test_the_banner_says_where_a_resumed_run_goes_on():
    facts = Facts(**{**vars(FACTS), "start_step": 782, "start_epoch": 2})
    assert "going on from step 782 (epoch 2)" in banner(from_flat({}), world(), facts)


def test_the_banner_of_an_iterable_data_set_has_no_steps_per_epoch():
    facts = Facts(**{**vars(FACTS), "train_samples": None, "steps_per_epoch": None})
    assert "steps an epoch" not in "\n".join(banner(from_flat({}), world(), facts))


def test_group_lines_of_a_real_optimizer():
    groups = [{"params": [torch.zeros(3, 4)], "weight_decay": 0.01}, {"params": [torch.zeros(5)]}]
    optimizer = torch.optim.SGD([{**g, "params": g["params"]} for g in groups], lr=0.1, momentum=0.9)
    first, second = group_lines(optimizer.param_groups)
    assert first.startswith("group 0: 1 tensor, 12 values, ")
    assert "weight_decay 0.01" in first
    assert "lr 0.1, momentum 0.9" in second


def test_final_line():
    result = {
        "test_accuracy": 0.6123, "test_samples": 10_000, "test_loss": 1.09871, "step": 3910,
        "weights_sha256": "3f2a" * 16, "run_dir": "runs/a",
    }  # fmt: skip
    assert final_line(result | {"test_total": 10_000}) == (
        "test accuracy 61.23 % (10,000 of 10,000 images, each once), test loss 1.0987, "
        "weights 3f2a3f2a3f2a, step 3,910, run runs/a"
    )
    assert "(10,000 images, each once)" in final_line(result)  # a stream tells nobody how long it is


def report_two_epochs(config, stream, run_dir, **facts):
    with Reporter(config, world(run_dir=str(run_dir)), stream) as reporter:
        reporter.start(Facts(**{**vars(FACTS), "total_steps": 4, **facts}))
        for step in range(1, 5):
            reporter.step(step, (step - 1) // 2, torch.tensor(1.0 / step), 0.05, 128)
        reporter.checkpoint(4, 1, run_dir / "checkpoints/step-00000004")
        reporter.evaluation(4, 1, {"accuracy": 0.5, "loss": 0.25, "samples": 10_000.0})


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    stream = io.StringIO()
    report_two_epochs(from_flat({"log_every": 2}), stream, tmp_path)
    shown = stream.getvalue().splitlines()[-4:]
    assert re.fullmatch(r"step 2/4  epoch 0  loss 0\.5000  lr 0\.05  [\d,]+ images/s  ETA [\d:]+", shown[0])
    assert shown[1].startswith("step 4/4  epoch 1  loss 0.2500")
    assert shown[2] == f"saved {tmp_path}/checkpoints/step-00000004"
    assert shown[3] == "evaluation after step 4: accuracy 0.5000  loss 0.2500  (10,000 images)"


def test_a_bar_in_a_terminal_that_tells_no_size():
    # As in a container or in CI: a new pseudo-terminal has 0 columns and 0 rows.
    outer, inner = os.openpty()
    os.set_blocking(outer, False)
    with os.fdopen(outer, "rb", buffering=0), os.fdopen(inner, "w") as terminal:
        assert os.get_terminal_size(inner).columns == 0
        with Reporter(from_flat({"log_every": 1}), world(), terminal) as reporter:
            reporter.start(FACTS)
            os.read(outer, 100_000)
            reporter.step(1, 0, 1.5, 0.05, 128)
            reporter.message("a line")
            assert b"Iter (loss=1.500)" in os.read(outer, 100_000)


def test_a_bar_in_a_terminal(tmp_path):
    stream = Terminal()
    report_two_epochs(from_flat({"log_every": 2}), stream, tmp_path)
    assert "Iter (loss=0.500)" in stream.getvalue()
    assert "4/4" in stream.getvalue()
    assert "images/s" in stream.getvalue()
    assert "step 2/4" not in stream.getvalue()


def test_quiet_shows_nothing_and_writes_all_the_same(tmp_path):
    stream = Terminal()
    report_two_epochs(from_flat({"quiet": True}), stream, tmp_path)
    assert stream.getvalue() == ""
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 4


def test_other_ranks_show_and_write_nothing(tmp_path):
    stream = Terminal()
    with Reporter(from_flat({"log_every": 1}), world(rank=1, run_dir=str(tmp_path)), stream) as reporter:
        reporter.start(FACTS)
        reporter.step(1, 0, 1.0, 0.05, 128)
        reporter.evaluation(1, 0, {"accuracy": 0.5})
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_restarted_worker_does_not_repeat_the_banner(tmp_path):
    stream = io.StringIO()
    with Reporter(from_flat({}), world(run_dir=str(tmp_path), restart=1), stream) as reporter:
        reporter.start(Facts(**{**vars(FACTS), "start_step": 7}))
    assert stream.getvalue() == ""  # what happened and from where it goes on is said by recovery.py


@pytest.mark.parametrize("repeats", [0, 1])
def test_the_first_step_after_a_restart_says_nothing_about_the_speed(repeats, tmp_path):
    config = from_flat({"log_every": 1})
    with Reporter(config, world(run_dir=str(tmp_path), restart=1), io.StringIO()) as reporter:
        reporter.start(Facts(**{**vars(FACTS), "start_step": 8, "repeats": repeats}))
        reporter.step(9 - repeats, 0, 1.0, 0.05, 128)
        reporter.step(10 - repeats, 0, 1.0, 0.05, 128)
    start, first, second = lines_of(tmp_path / "metrics.jsonl")
    assert start["restart"] == 1
    assert first["images_per_s"] is None
    assert second["images_per_s"] > 0


def test_the_loss_is_only_read_when_it_is_shown(tmp_path):
    class Loss:
        read = 0

        def __float__(self):
            self.read += 1
            return 1.0

    loss = Loss()
    with Reporter(from_flat({"log_every": 5}), world(run_dir=str(tmp_path)), io.StringIO()) as reporter:
        reporter.start(FACTS)
        for step in range(1, 11):
            reporter.step(step, 0, loss, 0.05, 128)
    assert loss.read == 2


def test_metrics_have_one_object_a_line(tmp_path):
    report_two_epochs(from_flat({"log_every": 2}), io.StringIO(), tmp_path)
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["kind"], line["step"], line["epoch"]) for line in lines] == [
        ("start", 0, 0), ("train", 2, 0), ("train", 4, 1), ("checkpoint", 4, 1), ("eval", 4, 1)
    ]  # fmt: skip
    assert lines[1].keys() == {"kind", "step", "epoch", "loss", "lr", "images_per_s", "wall_s"}
    assert lines[4]["accuracy"] == 0.5


def test_a_resumed_run_drops_the_lines_it_does_again_and_a_line_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"kind": "train", "step": step}) for step in (10, 20, 30)]
    path.write_text("\n".join([*whole, '{"kind": "tra']))
    metrics = MetricsFile(path, 20)
    metrics.write(kind="train", step=25, loss=float("nan"))
    metrics.close()
    assert [line["step"] for line in lines_of(path)] == [10, 20, 25]
    assert lines_of(path)[-1]["loss"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind\xff: "train"}\n{"kind": "train", "step": 2}\n')
    assert [line["step"] for line in report.collect(tmp_path)["starts"]] == []
    assert report.collect(tmp_path)["train"]["step"] == [1, 2]
    MetricsFile(path, 5).close()
    assert [line["step"] for line in lines_of(path)] == [1, 2]


def test_a_run_that_was_cut_off_after_a_step_reports_that_one_again_and_goes_on_from_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = [("start", 0), ("train", 6), ("start", 7), ("train", 7), ("eval", 7), ("train", 8)]
    path.write_text("".join(json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in before))
    stream = io.StringIO()
    with Reporter(from_flat({"log_every": 1}), world(run_dir=str(tmp_path)), stream) as reporter:
        reporter.start(Facts(**{**vars(FACTS), "start_step": 7, "repeats": 1}))
        reporter.step(7, 0, 1.0, 0.05, 128)
        reporter.step(8, 0, 1.0, 0.05, 128)
    assert "going on from step 7 " in stream.getvalue()
    after = [("start", 0), ("train", 6), ("start", 7), ("start", 7), ("train", 7), ("train", 8)]
    assert [(line["kind"], line["step"]) for line in lines_of(path)] == after


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    MetricsFile(path, 0).close()
    assert path.read_text() == ""


def test_the_config_in_the_run_directory_keeps_lanes_and_threads(tmp_path):
    config = from_flat({"run_dir": "x", "resume": True, "batch_size": 64})
    save_config(config, tmp_path)
    assert "lanes" not in read_toml(tmp_path / "config.toml")
    save_config(config, tmp_path, world(lanes=6, threads=3))
    values = read_toml(tmp_path / "config.toml")
    assert (values["lanes"], values["threads"], values["batch_size"]) == (6, 3, 64)
    assert (values.get("run_dir"), values["resume"]) == (None, False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_fast_mode_keeps_no_threads_because_they_follow_the_processes(tmp_path):
    save_config(from_flat({}), tmp_path, world(mode="fast"))
    assert "threads" not in read_toml(tmp_path / "config.toml")
    lines = banner(from_flat({"mode": "fast"}), world(mode="fast"), FACTS)
    assert any("// processes, at least 1 (--threads)" in line for line in lines)


def test_the_end_of_an_epoch_logs_the_groups(tmp_path):
    messages = []
    sink = logger.add(lambda message: messages.append(message.record["message"]), format="{message}")
    groups = torch.optim.SGD([torch.zeros(5)], lr=0.3).param_groups
    for rank in (0, 1):
        Reporter(from_flat({}), world(rank=rank), io.StringIO()).epoch_end(391, 0, groups)
    logger.remove(sink)
    (message,) = messages
    assert message.startswith("epoch 0 done at step 391: group 0: 1 tensor, 5 values, lr 0.3")


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    report_two_epochs(from_flat({"log_every": 2, "tensorboard": True}), io.StringIO(), tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
    assert b"eval/accuracy" in events.read_bytes()


def test_tensorboard_that_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    reporter = Reporter(from_flat({"tensorboard": True}), world(run_dir=str(tmp_path)), io.StringIO())
    with (
        reporter,
        pytest.raises(MachineError, match=r"--tensorboard needs .*pip install 'evenstep\[tensorboard"),
    ):
        reporter.start(FACTS)


def test_the_slowest_rank_is_told_at_the_end(tmp_path):
    stream = io.StringIO()
    with Reporter(from_flat({}), world(), stream) as reporter:
        reporter.start(FACTS)
        reporter.times(10, 1, Times(10, [0.0, 0.0], [10.0, 10.0], [0.0, 4.0]))
        reporter.finish({}, None)
    assert stream.getvalue().splitlines()[-1].startswith("rank 0 was the slowest: the other waited 40 %")


STOPPING_LOSS = """
import os, signal, time
from pathlib import Path
from torch.nn import functional
from evenstep import world

calls = []


def loss(model, batch):
    calls.append(1)
    if len(calls) == 3 and not Path("stopped").exists():
        Path("stopped").touch()
        os.kill(int(Path("pid").read_text()), signal.SIGTERM)
        assert world.current().stop.wait(120)  # however long the command takes to pass it on
    return functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_a_stopped_command_goes_on_from_the_step_that_it_has_named(tmp_path):
    (tmp_path / "stopping.py").write_text(STOPPING_LOSS)
    words = f"{sys.executable} -m evenstep train --data digits --loss stopping:loss --nproc 1 --epochs 1 "
    words += "--batch-size 200 --device cpu --log-every 1 --run-dir run"

    def run(more=""):
        command = ["sh", "-c", f"echo $$ > pid; exec {words} {more}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    stopped = run()
    found = re.search(r"stopped and saved after step (\d+) ", stopped.stderr)
    assert (stopped.returncode, found is not None) == (75, True), stopped.stderr
    resumed = run("--resume")
    assert (resumed.returncode, f"going on from step {found[1]} " in resumed.stderr) == (0, True), (
        resumed.stderr
    )
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "start"] == [0, int(found[1])]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 9))
    assert lines[-1]["step"] == 8
