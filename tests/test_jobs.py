import numpy as np
import pytest

from evenstep import jobs
from evenstep.data.cache import ImageArrays
from evenstep.data.sources import Source, open_source
from evenstep.errors import ConfigError
from evenstep.flat import from_flat
from evenstep.world import World, entered

DECODED = ImageArrays(np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, np.int64))


@pytest.mark.parametrize(
    ("train", "options", "memory_format"),
    [
        (DECODED, {}, None),  # in channels_last as it is
        (DECODED, {"memory_format": "contiguous"}, "contiguous"),
        ([1, 2], {}, "channels_last"),
        ([1, 2], {"model": "own_models:NormNet"}, None),  # whose forward may need contiguous images
        ([1, 2], {"model": "own_models:NormNet", "memory_format": "channels_last"}, "channels_last"),
        ([1, 2], {"memory_format": "contiguous"}, "contiguous"),
    ],
)
def test_the_memory_format_follows_from_data_and_model(train, options, memory_format):
    source = Source("some", train, None, None)
    assert jobs._loading(from_flat(options), source)["memory_format"] == memory_format


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a model for dark images, and how a folder or a file of other images is evaluated."""

    def config(data):
        values = {"data": str(data), "cache_dir": str(tmp_path / "cache"), "augment": True, "batch_size": 8}
        return from_flat(values)

    def npz(name, brightness, num_classes=5):
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 99, (2, 10, 32, 32, 3), dtype=np.uint8) + np.uint8(brightness)
        labels = np.arange(10) % num_classes
        np.savez(tmp_path / name, x_train=pixels[0], y_train=labels, x_test=pixels[1], y_test=labels)
        return config(tmp_path / name)

    dark = npz("dark.npz", 0)
    source = open_source(dark.data.data, data_dir=".", cache_dir=dark.data.cache_dir)
    world = World(run_dir=str(tmp_path / "run"))
    with entered(world):
        state = jobs._state(dark, source, 2, world)
        path = state.save(wait=True)
        yield dark, npz, source, str(path)


def test_other_data_are_normalised_as_the_run_s_own(saved, monkeypatch):
    dark, npz, source, path = saved
    seen = []
    evaluate = jobs.evaluate
    monkeypatch.setattr(jobs, "evaluate", lambda *a, **k: seen.append(k["normalize"]) or evaluate(*a, **k))
    bright = npz("bright.npz", 150)
    for config in (dark, bright):
        jobs.eval_job(World(), config, path)
    assert seen == [(source.train.mean, source.train.std)] * 2
    # Of a checkpoint from before that was noted.
    load = jobs.checkpoint.load

    def older(path):
        saved = load(path)
        del saved.meta["normalize"]
        return saved

    monkeypatch.setattr(jobs.checkpoint, "load", older)
    jobs.eval_job(World(), bright, path)
    assert seen[2][0][0] == pytest.approx(source.train.mean[0] + 150 / 255, abs=1e-2)


@pytest.mark.parametrize(
    ("trained", "found", "message"),
    [
        (
            ["cat", "dog"],
            ("dog", "fox"),
            r"have the classes \(dog, fox\), .* trained on \(cat, dog\).*--data",
        ),
        (["cat", "dog"], ("dog", "cat"), r"\(dog, cat\)"),
        (["cat", "dog"], ("0", "1", "2"), r"\(0, 1, 2\)"),
        ([str(i) for i in range(30)], ("a",), r"\(0, 1, .*, 19 and 10 more\)"),
        (["cat", "dog"], ("cat", "dog"), None),
        (["cat", "dog"], ("0", "1"), None),
        (["0", "1"], ("cat", "dog"), None),
        (["cat", "dog", "fox"], ("0", "1"), None),
        (["cat", "dog", "fox"], ("cat", "dog"), None),
        (["cat", "dog", "fox"], ("dog", "fox"), r"\(dog, fox\)"),
        (["0", "1", "2"], ("cat", "dog"), r"\(cat, dog\)"),
        ([], ("cat", "dog"), None),
        (["cat", "dog"], None, None),
    ],
)
def test_classes_of_other_data_must_be_the_run_s_own(trained, found, message):
    source = Source("some", DECODED, DECODED, found)
    if message is None:
        made = jobs._with_classes(from_flat({}), source, {"classes": trained})
        assert list(made.classes) == (trained or list(found))
        return
    with pytest.raises(ConfigError, match=message):
        jobs._with_classes(from_flat({}), source, {"classes": trained})


def test_eval_refuses_other_classes(saved):
    _, npz, _, path = saved
    with pytest.raises(ConfigError, match=r"\(0, .*, 5\), and the model was trained on \(0, 1, 2, 3, 4\)"):
        jobs.eval_job(World(), npz("other.npz", 0, num_classes=6), path)


def test_eval_takes_data_in_which_the_last_classes_do_not_occur(saved):
    _, npz, _, path = saved
    assert jobs.eval_job(World(), npz("fewer.npz", 0, num_classes=4), path)["test_samples"] == 10
