import base64
import io
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from evenstep import evaluate
from evenstep.metrics import classification
from evenstep.predictions import Predictions, Recorder, png_uri, summary
from evenstep.testing import run_ranks
from worlds import SmallNet, images

SAMPLES = 205


def recorded(world):
    torch.manual_seed(0)
    model, recorder = SmallNet(), Recorder()
    for _ in range(2):  # the second evaluation replaces the first
        recorder.clear()
        values = evaluate(model, images(SAMPLES), recorder, chunk_size=50)
    plain = evaluate(model, images(SAMPLES), classification, chunk_size=50)
    return values, plain, recorder.gather(world)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_predictions_of_all_ranks_are_those_of_one_pass_in_the_order_of_the_data(nproc):
    torch.manual_seed(0)
    model = SmallNet().eval()
    with torch.inference_mode():
        pictures = torch.stack([image for image, _ in images(SAMPLES)])
        outputs = torch.cat([model(chunk) for chunk in pictures.split(50)])
    for values, plain, found in run_ranks(recorded, nproc):
        assert values == plain
        assert found.labels.tolist() == images(SAMPLES).labels.tolist()
        assert found.predicted.tolist() == outputs.argmax(1).tolist()
        assert np.allclose(found.confidence, outputs.softmax(1).amax(1).numpy())
        assert values["accuracy"] == (found.labels == found.predicted).sum() / SAMPLES
        assert np.isclose(values["loss"], found.loss.astype(float).mean())


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_predictions_of_a_stream_are_in_its_order_too():
    def recorded_stream(world):
        torch.manual_seed(0)
        recorder = Recorder()
        test = [(image, 0 if i < 150 else i % 10) for i, (image, _) in enumerate(images(SAMPLES))]
        evaluate(SmallNet(), Stream(test), recorder, chunk_size=20)
        return recorder.gather(world, is_stream=True)

    found = {n: run_ranks(recorded_stream, n) for n in (1, 2, 3)}
    for every in found.values():
        for each in every:
            assert each.labels.tolist() == [0] * 150 + [i % 10 for i in range(150, SAMPLES)]
            assert np.array_equal(each.loss, found[1][0].loss)


def test_more_ranks_than_chunks():
    def few(world):
        recorder = Recorder()
        evaluate(SmallNet(), images(20), recorder, chunk_size=50)
        return len(recorder.gather(world).labels)

    assert run_ranks(few, 2) == [20, 20]


def test_nothing_evaluated_is_nothing():
    assert run_ranks(lambda world: Recorder().gather(world), 1) == [None]


def predictions(labels, predicted, loss=None):
    n = len(labels)
    loss = np.arange(n) if loss is None else np.array(loss)
    return Predictions(
        np.array(labels), np.array(predicted), np.full(n, 0.5, np.float32), loss.astype(np.float32)
    )


def test_the_summary():
    found = predictions([0, 0, 1, 1, 2], [0, 1, 1, 0, 0], [9, 1, 9, 3, 3])
    shown = summary(found, step=7, classes=("cat", "dog"))
    assert shown["classes"] == ["cat", "dog", "2"]
    assert shown["confusion"] == [[1, 1, 0], [1, 1, 0], [1, 0, 0]]
    assert (shown["correct"], shown["samples"], shown["step"]) == (2, 5, 7)
    assert [one["index"] for one in shown["wrong"]] == [3, 4, 1]  # of equal losses the first comes first
    assert shown["pairs"] == [[0, 1, 1], [1, 0, 1], [2, 0, 1]]
    assert shown["wrong"][0]["image"] is None


def test_of_very_many_classes_no_matrix_is_made():
    tracemalloc.start()
    try:
        shown = summary(predictions([0, 49_999, 49_999], [0, 7, 7]), step=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shown["pairs"] == [[49_999, 7, 2]]
    assert peak < 50e6  # 20 GB for each pair of classes; the names are 50,000


def test_of_many_classes_only_the_largest_confusions():
    shown = summary(predictions([0, 5, 5, 99], [0, 7, 7, 99]), step=1)
    assert shown["confusion"] is None
    assert shown["pairs"] == [[5, 7, 2]]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pictures_are_small_pngs(channels, mode):
    image = np.random.default_rng(0).integers(0, 256, (32, 32, channels), dtype=np.uint8)
    kind, _, text = png_uri(image).partition(",")
    assert kind == "data:image/png;base64"
    opened = Image.open(io.BytesIO(base64.b64decode(text)))
    assert opened.mode == mode
    assert np.array_equal(np.asarray(opened).reshape(image.shape), image)


def test_large_pictures_are_made_smaller_and_odd_ones_left_out():
    large = Image.open(
        io.BytesIO(base64.b64decode(png_uri(np.zeros((300, 150, 3), np.uint8)).partition(",")[2]))
    )
    assert large.size == (48, 96)
    assert png_uri(np.zeros((8, 8, 4), np.uint8)) is None
