import io
import os
import pickle
import socket
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from evenstep.config import SOURCES
from evenstep.data import digits, sources
from evenstep.data.cache import ImageArrays
from evenstep.data.loader import Loader
from evenstep.data.sources import open_source, prepare
from evenstep.errors import ConfigError, DataError, MachineError


@pytest.fixture
def where(tmp_path):
    return {"data_dir": tmp_path / "data", "cache_dir": tmp_path / "cache"}


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "my pets.tar.xz"
    with tarfile.open(path, "w:xz") as file:
        for seed, name in enumerate(["train/cat/0", "train/dog/0", "test/cat/0", "test/dog/0"]):
            buffer = io.BytesIO()
            pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(buffer, format="png")
            info = tarfile.TarInfo(f"pets/{name}.png")
            info.size = len(buffer.getvalue())
            file.addfile(info, io.BytesIO(buffer.getvalue()))
    return path


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Write a CIFAR-10 of 2 images a file as torchvision does, and switch its check of the content off."""
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        pixels = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [i, 9 - i]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class{i}" for i in range(10)]}))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    return folder


def test_digits(where):
    prepared = prepare("digits", **where)
    source = open_source("digits", **where)
    assert (prepared.spec, prepared.name, prepared.note) == ("digits", "digits", None)
    assert (source.name, source.note, source.classes) == ("digits", None, tuple("0123456789"))
    assert source.train.fingerprint == digits.load()[0].fingerprint
    assert not where["cache_dir"].exists()


def test_an_archive(where, archive):
    prepared = prepare(str(archive), **where)
    assert prepared.name == "my pets"
    assert prepared.directory.parent == where["cache_dir"]
    assert prepared.directory.name.startswith("my_pets-")
    archive_state = archive.stat()
    source = open_source(prepared.spec, **where)
    assert source.classes == ("cat", "dog")
    assert (len(source.train), len(source.test)) == (2, 2)
    with Loader(source.train, 2) as loader:
        position = type("Start", (), {"step": 0, "epoch": 0, "epoch_step": 0})
        ids = [batch.lanes[0].ids for batch in loader.batches(position, epochs=1)]
    assert sorted(ids[0]) == [0, 1]
    assert archive.stat().st_mtime_ns == archive_state.st_mtime_ns


def test_a_folder_an_npz_and_a_changed_file(where, archive, tmp_path):
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "folder", filter="data")
    folder = open_source(str(tmp_path / "folder"), **where)
    assert folder.train.fingerprint == open_source(str(archive), **where).train.fingerprint
    path = tmp_path / "a.npz"
    images = np.asarray(folder.train.images)
    np.savez(path, x_train=images, y_train=[0, 1], x_test=images, y_test=[0, 1])
    first = open_source(str(path), **where)
    assert first.train.fingerprint == folder.train.fingerprint
    np.savez(path, x_train=images[:1], y_train=[0], x_test=images, y_test=[1, 1])
    assert len(open_source(str(path), **where).train) == 1


def test_files_alike_in_name_size_and_times_are_kept_apart(where, tmp_path):
    images = np.zeros((2, 4, 4, 3), np.uint8)
    for fold in (1, 2):
        path = tmp_path / f"fold{fold}" / "data.npz"
        path.parent.mkdir()
        labels = np.array([0, 1])
        np.savez(path, x_train=images + fold, y_train=labels, x_test=images + fold, y_test=labels)
        os.utime(path, ns=(0, 0))
    first, second = (open_source(str(tmp_path / f"fold{fold}" / "data.npz"), **where) for fold in (1, 2))
    assert first.train.images.max() == 1
    assert second.train.images.max() == 2
    # The same file again, with another content and its times put back, as an archive unpacks it.
    path = tmp_path / "fold1" / "data.npz"
    path.write_bytes((tmp_path / "fold2" / "data.npz").read_bytes())
    os.utime(path, ns=(0, 0))
    assert open_source(str(path), **where).train.images.max() == 2


def test_folders_alike_in_names_sizes_and_times_are_kept_apart(where, tmp_path):
    for fold in (1, 2):
        for name in ("train/cat", "test/cat"):
            path = tmp_path / f"fold{fold}" / "data" / name / "0.bmp"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.full((4, 4, 3), fold, np.uint8)).save(path)
            os.utime(path, ns=(0, 0))
    for fold in (1, 2):
        source = open_source(str(tmp_path / f"fold{fold}" / "data"), **where)
        assert source.train.images.max() == fold


def test_files_that_cannot_be_read_or_are_left_out_are_named(where, tmp_path, capfd):
    folder = tmp_path / "set"
    for name in ("train/cat", "test/cat"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / name / "0.png")
    (folder / "train/cat/1.gif").touch()
    for _ in range(2):  # with a warm cache, too
        found = prepare(str(folder), **where)
        assert found.note.startswith(f"data {folder}: images left out: 1 with the ending .gif.")
    assert open_source(str(folder), **where).note is None
    (folder / "train/cat/link.png").symlink_to(folder / "gone")
    with pytest.raises(DataError, match=r"cannot read .*/train/cat/link.png: No such file.*leads nowhere"):
        prepare(str(folder), **where)


def test_names_that_are_not_in_utf_8(where, tmp_path):
    folder = tmp_path / "set"
    for name in ("train", "test"):
        path = os.fsencode(folder / name) + b"/caf\xe9"
        try:
            os.makedirs(path)
        except OSError:
            pytest.skip("this file system takes only names in UTF-8")
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(os.fsdecode(path + b"/\xe9.png"))
    for _ in range(2):
        assert [os.fsencode(name) for name in open_source(str(folder), **where).classes] == [b"caf\xe9"]
    link = os.fsencode(tmp_path) + b"/\xe9"
    os.symlink(os.fsencode(folder), link)
    with pytest.raises(ConfigError, match="is not in UTF-8, so no config file can hold it"):
        prepare(os.fsdecode(link), **where)


def test_opening_a_warm_cache_imports_neither_torch_nor_pillow(where, archive):
    prepare(str(archive), **where)
    code = f"""
import sys
from evenstep.data.sources import open_source, prepare
where = {{"data_dir": {str(where["data_dir"])!r}, "cache_dir": {str(where["cache_dir"])!r}}}
for spec in ({str(archive)!r}, "digits"):
    prepare(spec, **where)
    source = open_source(spec, **where)
    assert source.train.gather([0])[0].shape[0] == 1
print([name for name in ("torch", "torchvision", "PIL", "loguru", "tqdm") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert result.stdout == "[]\n"


def test_cifar10_that_is_there(where, cifar10, monkeypatch):
    monkeypatch.setattr(sources, "_unreachable", lambda url: pytest.fail("asked the network"))
    for spec in ("cifar10", "auto"):
        prepared = prepare(spec, **where)
        assert (prepared.spec, prepared.name, prepared.note) == ("cifar10", "cifar10", None)
        source = open_source(spec, **where)
        assert source.classes == tuple(f"class{i}" for i in range(10))
        assert source.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert source.test.labels.tolist() == [5, 4]
        batch = pickle.loads((cifar10 / "data_batch_2").read_bytes())
        np.testing.assert_array_equal(source.train.images[2].transpose(2, 0, 1).reshape(-1), batch["data"][0])


@pytest.mark.parametrize("spec", ["cifar10", "auto"])
def test_damaged_cifar10_is_an_error(where, cifar10, spec):
    (cifar10 / "data_batch_3").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"CIFAR-10 files in .*cifar-10-batches-py are damaged.*Remove that folder"
    ):
        prepare(spec, **where)


def _no_download(self, *args, **kwargs):
    raise OSError("the line is cut")


def test_cifar10_that_cannot_be_downloaded(where, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", _no_download)
    timeout = socket.getdefaulttimeout()
    with pytest.raises(DataError, match=r"cannot download .*: the line is cut\..*--data-dir.*--data digits"):
        prepare("cifar10", **where)
    assert socket.getdefaulttimeout() == timeout


def test_cifar10_is_downloaded_once(where, cifar10, monkeypatch, tmp_path):
    elsewhere, calls = tmp_path / "elsewhere", []
    cifar10.rename(elsewhere)

    def download(self):
        calls.append(socket.getdefaulttimeout())
        elsewhere.rename(cifar10)

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", download)
    monkeypatch.setattr(sources, "_unreachable", lambda url: "")
    assert prepare("auto", **where).name == "cifar10"
    assert prepare("cifar10", **where).name == "cifar10"
    assert calls == [30.0]


def test_auto_without_a_network_takes_the_digits_and_says_so(where, monkeypatch):
    monkeypatch.setattr(sources, "CIFAR10_URL", "http://127.0.0.1:9/cifar.tar.gz")
    prepared = prepare("auto", **where)
    assert (prepared.spec, prepared.name, prepared.directory) == ("digits", "digits", None)
    assert "CIFAR-10 is not in" in prepared.note
    assert "127.0.0.1:9 cannot be reached" in prepared.note
    assert "using the small built-in digits instead" in prepared.note
    assert "1,442 training images" in prepared.note
    assert len(open_source("digits", **where).train) == 1442
    assert open_source("auto", **where).note == prepared.note


def test_auto_whose_download_fails_takes_the_digits(where, monkeypatch):
    monkeypatch.setattr(sources, "_unreachable", lambda url: "")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", _no_download)
    prepared = prepare("auto", **where)
    assert prepared.spec == "digits"
    assert "it cannot be downloaded (the line is cut)" in prepared.note


def test_auto_does_not_wait_for_a_silent_network(where, monkeypatch):
    def hang(*args, **kwargs):
        time.sleep(5)
        raise OSError

    monkeypatch.setattr("urllib.request.urlopen", hang)
    monkeypatch.setattr(sources, "_PROBE_S", 0.05)
    prepared = prepare("auto", **where)
    assert prepared.spec == "digits"
    assert "does not answer within" in prepared.note


def test_a_cache_that_cannot_be_written(archive, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="--cache-dir"):
        prepare(str(archive), data_dir=tmp_path, cache_dir=tmp_path / "file")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar-10", r"'cifar-10' is neither auto, cifar10, digits nor .* exists\. Did you mean 'cifar10'\?"),
        ("digit", r"Did you mean 'digits'\? Give --data one of these"),
        ("no/such/folder", r"neither auto.*exists\. Give --data"),
        ("README.md", r"a file with an unknown ending.*\.tar\.xz"),
    ],
)
def test_messages_about_the_spec(where, spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(ConfigError, match=message):
        prepare(spec, **where)


def test_all_names_of_the_config_are_known(where, cifar10):
    assert [prepare(name, **where).name for name in SOURCES] == ["cifar10", "cifar10", "digits"]


MODULE = """
import torch
from torch.utils.data import IterableDataset, TensorDataset
class Named(TensorDataset):
    classes = ["a", "b"]
class Stream(IterableDataset):
    def __iter__(self): return iter([])
train, test = TensorDataset(torch.zeros(3)), TensorDataset(torch.zeros(2))
def pair(): return train, test
def named(): return Named(torch.zeros(3)), test
def mapping(): return {"train": train, "test": Stream(), "classes": [0, 1]}
def broken(): raise ZeroDivisionError("mine")
def one(): return train
def keys(): return {"train": train, "tset": test}
def wrong(): return train, torch.utils.data.DataLoader(test)
def lists(): return train, iter([])
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "evenstep_user_data.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "evenstep_user_data"
    sys.modules.pop("evenstep_user_data", None)


def test_the_users_own_datasets(where, module):
    prepared = prepare(f"{module}:pair", **where)
    assert module not in sys.modules  # it may need torch, and is the workers' business
    source = open_source(prepared.spec, **where)
    assert (len(source.train), len(source.test), source.classes) == (3, 2, None)
    assert source.name == f"{module}:pair"
    assert open_source(f"{module}:named", **where).classes == ("a", "b")
    source = open_source(f"{module}:mapping", **where)
    assert source.classes == ("0", "1")
    assert isinstance(source.test, torch.utils.data.IterableDataset)


def test_the_users_own_image_arrays(where, monkeypatch):
    arrays = ImageArrays(np.zeros((2, 4, 4, 3), np.uint8), np.arange(2), classes=("x", "y"))
    monkeypatch.setattr(sources, "import_object", lambda spec, **_: lambda: (arrays, arrays))
    source = open_source("my:data", **where)
    assert source.train is arrays
    assert source.classes == ("x", "y")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pairs", r"has no 'pairs'\. Did you mean 'pair'\? Correct --data"),
        ("one", r":one returned TensorDataset; expected \(train, test\), or a dict"),
        ("keys", "returned dict with the keys train, tset; expected"),
        ("wrong", "test is DataLoader, not a dataset.*evenstep makes the batches"),
        ("lists", "test is list_iterator, not a dataset"),
        ("number", "is int, which cannot be called.*Give a function"),
    ],
)
def test_messages_about_the_users_own_datasets(where, module, name, message):
    with pytest.raises(ConfigError, match=message):
        open_source(f"{module}:{name}", **where)


def test_an_error_of_the_users_function_is_passed_on(where, module):
    with pytest.raises(ZeroDivisionError, match="mine"):
        open_source(f"{module}:broken", **where)
