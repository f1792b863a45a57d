"""Run directories as a training leaves them, made at once, for the tests of the report and its pages."""

import json

import numpy as np

from evenstep.flat import from_flat
from evenstep.predictions import Predictions, summary
from evenstep.records import MetricsFile, save_config, save_sources, start_line
from evenstep.report import to_json
from evenstep.world import World

WORLD = World(world_size=2, local_world_size=2, lanes=2)
FACTS = {"data": "digits", "num_parameters": 1234, "total_steps": 40}


def make_run(path, *, lr=0.05, accuracy=0.9, finished=True, classes=("cat", "dog", "<b>fox</b>"), own=None):
    """A run of 40 steps: a restart after step 17, two evaluations, pictures; ``own``: the user's metrics."""
    path.mkdir()
    save_config(from_flat({"data": "digits", "lr": lr}), path, WORLD)
    save_sources({"data": "flag", "lr": "file run.toml", "epochs": "default"}, path)
    metrics = MetricsFile(path / "metrics.jsonl", 0)
    metrics.write(**start_line(WORLD, step=0, epoch=0, **FACTS) | {"time": 1000.0})
    for step in range(1, 18):
        write_step(metrics, step, lr, step / 10)
    metrics.write(**start_line(WORLD, step=17, epoch=0, **FACTS) | {"time": 1004.0, "restart": 1})
    for step in range(18, 41):
        write_step(metrics, step, lr, (step - 17) / 10)
        if step in (20, 40):
            times = {"steps": step - 17, "data_s": [0.1, 0.2], "step_s": [1.5, 1.6], "wait_s": [0.4, 0.3]}
            metrics.write(kind="time", step=step, epoch=step // 20, **times, wall_s=(step - 17) / 10)
            values = {"loss": 2.0 / step, "accuracy": accuracy * step / 40, "samples": 30, **(own or {})}
            metrics.write(kind="eval", step=step, epoch=step // 20, **values, wall_s=(step - 17) / 10)
    metrics.close()
    if finished:
        labels = np.arange(30) % 3
        predicted = np.where(np.arange(30) < 4, (labels + 1) % 3, labels)
        found = Predictions(labels, predicted, np.full(30, 0.7, np.float32), np.arange(30, dtype=np.float32))
        pictures = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
        shown = summary(found, step=40, classes=classes, images=pictures)
        (path / "evaluation.json").write_text(to_json(shown))
        result = {"step": 40, "test_accuracy": accuracy, "weights_sha256": "ab" * 32, "restarts": 1}
        result["test_metrics"] = own or {}
        (path / "result.json").write_text(json.dumps({**result, "numerics": {"torch": "2.14.1"}}))
    return path


def write_step(metrics, step, lr, wall_s):
    metrics.write(
        kind="train", step=step, epoch=step // 20, loss=3.0 / step, lr=lr, images_per_s=500.0, wall_s=wall_s
    )
