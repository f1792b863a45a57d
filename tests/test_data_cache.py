import json
import os
import pickle
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from evenstep.data import cache
from evenstep.data.cache import Decoded, ImageArrays, Rows
from evenstep.errors import DataError, MachineError

KEY = "0123456789abcdef0123"


def _decoded(seed=0):
    images = np.random.default_rng(seed).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
    train, test = np.array([8, 0, 3, 2, 7]), np.array([1, 4])
    return Decoded(("cat", "dog"), Rows(images, train, train % 2), Rows(images, test, test % 2))


def test_what_is_stored_is_what_is_opened(tmp_path):
    directory = cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    assert directory == tmp_path / "pets-0123456789abcdef"
    names = ["meta.json", "test-images.npy", "test-labels.npy", "train-images.npy", "train-labels.npy"]
    assert sorted(file.name for file in directory.iterdir()) == names
    decoded = _decoded()
    for arrays, rows in zip(cache.open_arrays(directory), (decoded.train, decoded.test), strict=True):
        np.testing.assert_array_equal(arrays.images, rows.images[rows.rows])
        np.testing.assert_array_equal(arrays.labels, rows.labels)
        assert isinstance(arrays.images, np.memmap)
        assert not arrays.images.flags.writeable
        assert arrays.classes == ("cat", "dog")
        pixels = decoded.train.images[decoded.train.rows].reshape(-1, 3) / 255
        np.testing.assert_allclose(arrays.mean, pixels.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(arrays.std, pixels.std(axis=0), rtol=1e-12)
        assert arrays.fingerprint == cache.content_fingerprint(arrays.images, arrays.labels)


def test_it_is_decoded_once_per_key(tmp_path):
    calls = []

    def decode(work):
        calls.append(work)
        assert work.is_dir()
        (work / "scratch").write_text("x")
        return _decoded()

    first = cache.cached("pets", KEY, tmp_path, decode)
    assert cache.cached("pets", KEY, tmp_path, decode) == first
    assert len(calls) == 1
    assert not (first / "scratch").exists()
    assert cache.cached("pets", "f" + KEY, tmp_path, decode) != first
    assert len(calls) == 2


def test_a_failed_decode_leaves_nothing(tmp_path):
    def decode(work):
        raise DataError("broken source")

    with pytest.raises(DataError, match="broken source"):
        cache.cached("pets", KEY, tmp_path, decode)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda d: os.truncate(d / "train-images.npy", 200), r"train-images.npy has 200 bytes, not 428"),
        (lambda d: (d / "test-labels.npy").unlink(), "test-labels.npy is missing"),
        (lambda d: (d / "meta.json").unlink(), "meta.json is missing"),
        (lambda d: (d / "meta.json").write_text("{"), "meta.json cannot be read"),
        (lambda d: (d / "meta.json").write_text("[]"), "meta.json cannot be read"),
    ],
)
def test_a_damaged_cache_is_rebuilt_with_a_warning(tmp_path, warnings, harm, reason):
    directory = cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    assert warnings == []
    harm(directory)
    assert cache.cached("pets", KEY, tmp_path, lambda work: _decoded(seed=1)) == directory
    np.testing.assert_array_equal(
        cache.open_arrays(directory)[1].images, _decoded(seed=1).test.images[[1, 4]]
    )
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert "WARNING" in warnings[0]
    assert str(directory) in warnings[0]


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / "pets-0123456789abcdef.tmp-1"
    left.mkdir()
    (left / "scratch").write_text("x")
    cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    assert not left.exists()


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match=r"cannot write the cache .* in .*/file/cache: .*--cache-dir"):
        cache.cached("pets", KEY, tmp_path / "file" / "cache", lambda work: _decoded())


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (400, before[1])
    )  # 5 images of 60 bytes and the header need 428
    try:
        with pytest.raises(MachineError, match=r"cannot write the cache .*: File too large.*--cache-dir"):
            cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_images_are_written_one_after_another(tmp_path):
    # Reserving room takes as long as writing twice where the file system cannot (NFS), and a map of a file
    # with holes ends the process when the disk is full.
    sizes = []

    class Watched(Rows):
        def chunks(self):
            for row in self.rows:
                sizes.extend(file.stat().st_size for file in tmp_path.glob("*/train-images.npy"))
                yield self.images[row][None]

    images = np.zeros((4, 200, 200, 3), np.uint8)  # each is more than a buffer takes
    rows = np.arange(4)
    decoded = Decoded(("cat",), Watched(images, rows, rows), Rows(images, rows, rows))
    directory = cache.cached("pets", KEY, tmp_path, lambda work: decoded)
    assert (directory / "train-images.npy").stat().st_size == 128 + images.nbytes
    assert sizes[1:] == [128 + size * images[0].nbytes for size in (1, 2, 3)]


def test_a_warm_cache_needs_no_writing(tmp_path):
    cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    (tmp_path / "pets-0123456789abcdef.lock").unlink()
    cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    assert not (tmp_path / "pets-0123456789abcdef.lock").exists()


def test_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "evenstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / ".cache" / "evenstep"
    directory = cache.cached("pets", KEY, None, lambda work: _decoded())
    assert directory.parent == tmp_path / ".cache" / "evenstep"


def test_processes_that_come_at_once_decode_once(tmp_path):
    code = f"""
import time
import numpy as np
from evenstep.data import cache
def decode(work):
    with open({str(tmp_path / "calls")!r}, "a") as file:
        file.write("call\\n")
    time.sleep(0.5)
    rows = cache.Rows(np.arange(36, dtype=np.uint8).reshape(3, 2, 2, 3), np.arange(3), np.arange(3))
    return cache.Decoded(("a", "b", "c"), rows, rows)
directory = cache.cached("pets", {KEY!r}, {str(tmp_path / "cache")!r}, decode)
print(cache.open_arrays(directory)[0].fingerprint)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(printed)) == 1
    assert (tmp_path / "calls").read_text() == "call\n"


def test_image_arrays_are_a_map_style_dataset():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 3, 3), dtype=np.uint8)
    arrays = ImageArrays(images, np.arange(5) + 10)
    image, label = arrays[2]
    assert len(arrays) == 5
    assert torch.equal(image, torch.from_numpy(images[2]).permute(2, 0, 1).float() / 255)
    assert (label, type(label)) == (12, int)
    pixels, labels = arrays.gather((4, 0, 4))
    np.testing.assert_array_equal(pixels, images[[4, 0, 4]])
    assert labels.tolist() == [14, 10, 14]
    with pytest.raises(IndexError):
        arrays[5]
    assert sum(1 for _ in arrays) == 5


def test_image_arrays_of_a_cache_are_small_when_pickled(tmp_path):
    directory = cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    train, _ = cache.open_arrays(directory)
    again = pickle.loads(pickle.dumps(train))
    assert isinstance(again.images, np.memmap)
    np.testing.assert_array_equal(again.images, train.images)
    assert again.classes == train.classes
    part = pickle.loads(pickle.dumps(ImageArrays(train.images[1:3], train.labels[1:3])))
    np.testing.assert_array_equal(part.images, train.images[1:3])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 4, 4), np.uint8), np.zeros(2), r"shape \(2, 4, 4\) and dtype uint8; expected four"),
        (np.zeros((2, 4, 4, 3)), np.zeros(2), r"dtype float64; expected .* uint8"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(3), r"labels have shape \(3,\), but there are 2 images"),
    ],
)
def test_image_arrays_messages(images, labels, message):
    with pytest.raises(DataError, match=message):
        ImageArrays(images, labels)


def test_statistics_do_not_depend_on_the_chunks():
    images = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), dtype=np.uint8)
    assert cache.statistics([images]) == cache.statistics([images[5:], images[:5]])
    assert cache.statistics([np.full((2, 4, 4, 1), 51, np.uint8)]) == (pytest.approx((0.2,)), (1.0,))


def test_meta_is_plain_json(tmp_path):
    directory = cache.cached("pets", KEY, tmp_path, lambda work: _decoded())
    meta = json.loads((directory / "meta.json").read_text())
    assert meta["format"] == cache.FORMAT
    assert meta["bytes"]["train-images.npy"] == (directory / "train-images.npy").stat().st_size
