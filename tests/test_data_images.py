import io
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from evenstep.data.images import decode_files, decode_npz, state_of
from evenstep.errors import DataError


def encoded(seed, *, size=(6, 4), mode="RGB", kind="png"):
    """Return the bytes of an image file of random pixels."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if bands == 1 else pixels).save(buffer, format=kind)
    return buffer.getvalue()


def small_set():
    """Return {path: bytes} of a data set of 2 classes; not sorted, with files that are no images."""
    files = {
        "train/dog/b.png": encoded(1),
        "train/dog/a.png": encoded(2),
        "train/cat/x.png": encoded(3),
        "test/dog/c.png": encoded(4),
        "test/cat/sub/d.png": encoded(5),
        "test/cat/a.png": encoded(6),
    }
    return files | {"README.txt": b"hello", "train/cat/._x.png": b"junk", "train/labels.csv": b"1"}


def write_folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_tar(path, files):
    mode = {".xz": "w:xz", ".gz": "w:gz", ".tgz": "w:gz"}.get(path.suffix, "w")
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write(path, files):
    if path.suffix == ".zip":
        return write_zip(path, files)
    return write_tar(path, files) if path.suffix else write_folder(path, files)


def decode(path, tmp_path):
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return decode_files(path, work, quiet=True)


def images(rows):
    return np.concatenate(list(rows.chunks()))


NAMES = ["set", "set.tar", "set.tar.gz", "set.tgz", "set.tar.xz", "set.zip"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", ["", "pets/", "./"])
def test_folders_and_archives_give_the_same(tmp_path, name, prefix):
    files = small_set()
    decoded = decode(write(tmp_path / name, {prefix + key: data for key, data in files.items()}), tmp_path)
    assert decoded.classes == ("cat", "dog")
    assert decoded.train.labels.tolist() == [0, 1, 1]
    assert decoded.test.labels.tolist() == [0, 0, 1]
    order = ["train/cat/x.png", "train/dog/a.png", "train/dog/b.png"]
    order += ["test/cat/a.png", "test/cat/sub/d.png", "test/dog/c.png"]
    expected = [np.asarray(Image.open(io.BytesIO(files[key]))) for key in order]
    np.testing.assert_array_equal(np.concatenate([images(decoded.train), images(decoded.test)]), expected)


@pytest.mark.parametrize(("kind", "exact"), [("jpeg", False), ("bmp", True), ("webp", False), ("png", True)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_kinds_of_image_files(tmp_path, kind, exact, mode):
    ending = "JPG" if kind == "jpeg" else kind
    files = {f"{split}/a/0.{ending}": encoded(7, mode=mode, kind=kind) for split in ("train", "test")}
    decoded = decode(write_folder(tmp_path / "set", files), tmp_path)
    result = images(decoded.train)[0]
    assert result.shape == (4, 6, 3)
    with Image.open(io.BytesIO(files[f"train/a/0.{ending}"])) as file:
        np.testing.assert_array_equal(result, np.asarray(file.convert("RGB")))
    if exact:
        original = np.random.default_rng(7).integers(
            0, 256, (4, 6, 3 if mode == "RGB" else 1), dtype=np.uint8
        )
        np.testing.assert_array_equal(result, np.broadcast_to(original, (4, 6, 3)))


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_image_is_named(tmp_path, name):
    files = small_set()
    files["train/dog/b.png"] = files["train/dog/b.png"][:60]
    with pytest.raises(DataError, match=r"set.*: cannot decode .*train/dog/b.png \(60 bytes\).*remove it"):
        decode(write(tmp_path / name, files), tmp_path)


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_archive_that_was_cut_off(tmp_path, name):
    files = {f"{split}/a/{i:03d}.png": encoded(i) for split in ("train", "test") for i in range(50)}
    path = write(tmp_path / name, files)
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.raises(
        DataError, match=r"set\..* cannot be read (after (train|test)/a/\d+.png|before the first)"
    ):
        decode(path, tmp_path)


def test_a_tar_that_was_cut_off_between_two_members(tmp_path):
    files = {f"{split}/a/{i}.png": encoded(i) for split in ("test", "train") for i in range(3)}
    path = write_tar(tmp_path / "set.tar", files)
    with tarfile.open(path) as archive:
        end = archive.getmembers()[4].offset
    os.truncate(path, end)
    with pytest.raises(DataError, match=r"after train/a/0\.png: the end-of-archive block is missing"):
        decode(path, tmp_path)


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_archive_that_is_none(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is no archive at all" * 50)
    with pytest.raises(DataError, match=r"set\..* cannot be read before the first image.*download it again"):
        decode(tmp_path / name, tmp_path)


def test_an_archive_with_a_flipped_bit(tmp_path):
    path = write_tar(tmp_path / "set.tar.xz", small_set())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(lzma.LZMAError):
        lzma.decompress(bytes(data))
    with pytest.raises(DataError, match=r"set\.tar\.xz"):
        decode(path, tmp_path)


@pytest.mark.parametrize("name", ["set.tar", "set.zip"])
@pytest.mark.parametrize(
    "member", ["../train/cat/evil.png", "/tmp/train/cat/evil.png", "train/../../cat/evil.png"]
)
def test_a_member_that_points_outside_is_refused(tmp_path, name, member):
    (tmp_path / "deep" / "down").mkdir(parents=True)
    path = write(tmp_path / "deep" / "down" / name, small_set() | {member: encoded(0)})
    with pytest.raises(DataError, match=rf"{name}: the member '{member}' points outside"):
        decode(path, tmp_path)
    assert list(tmp_path.rglob("evil.png")) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_a_tar_is_not_followed(tmp_path, kind):
    path = write_tar(tmp_path / "set.tar", small_set())
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("train/cat/link.png")
        link.type, link.linkname = kind, "train/cat/x.png"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"train/cat/link\.png is a link .*tar --dereference"):
        decode(path, tmp_path)


def test_an_image_that_is_there_twice(tmp_path):
    path = write_tar(tmp_path / "set.tar", small_set())
    with tarfile.open(path, "a") as archive:
        data = encoded(9)
        info = tarfile.TarInfo("train/cat/x.png")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    with pytest.raises(DataError, match=r"train/cat/x\.png is in it 2 times"):
        decode(path, tmp_path)


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_the_progress_bar_is_for_terminals(tmp_path, monkeypatch, terminal, quiet):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stderr)
    (tmp_path / "work").mkdir()
    decode_files(write_folder(tmp_path / "set", small_set()), tmp_path / "work", quiet=quiet)
    assert ("decoding images" in stderr.getvalue()) == (terminal and not quiet)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/dog/b.png": encoded(1, size=(7, 4))}, r"train/dog/b.png has 7x4 pixels, but .* has 6x4"),
        ({"test/cow/b.png": encoded(1)}, "differ: only in train: none; only in test: cow"),
        ({"train/cow/b.png": encoded(1)}, "differ: only in train: cow; only in test: none"),
        (
            {"other/train/cat/b.png": encoded(1)},
            r"train and test folders in more than one place: '\.' and 'other'",
        ),
    ],
)
def test_sets_that_do_not_fit(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        decode(write_folder(tmp_path / "set", small_set() | change), tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.txt": b"x", "pictures/cat/a.png": encoded(0)},
            "no images found; images left out: 1 in no folder of .* train/<class>.*Check --data",
        ),
        ({"a.txt": b"x"}, "no images found. Expected train/<class>.*Check --data"),
        ({"train/cat/a.png": encoded(0)}, "there are images in train, but none in test"),
        ({"test/cat/a.png": encoded(0)}, "there are images in test, but none in train"),
    ],
)
def test_sets_with_nothing_in_them(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        decode(write_folder(tmp_path / "set", files), tmp_path)


def test_more_images_than_one_batch_keep_their_order(tmp_path):
    one = [encoded(i, size=(2, 2)) for i in range(10)]
    files = {f"train/a/{i:04d}.png": one[i % 10] for i in range(1200)} | {"test/a/0.png": one[0]}
    decoded = decode(write_tar(tmp_path / "set.tar", files), tmp_path)
    ten = images(decoded.train)[:10]
    np.testing.assert_array_equal(images(decoded.train), np.tile(ten, (120, 1, 1, 1)))


def test_state_changes_with_any_file(tmp_path):
    folder = write_folder(tmp_path / "set", small_set())
    before = state_of(folder)
    assert state_of(folder) == before
    file = folder / "train/dog/b.png"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    changed = state_of(folder)
    assert changed != before
    file.rename(file.with_name("z.png"))
    assert state_of(folder) not in (before, changed)
    path = write_zip(tmp_path / "set.zip", small_set())
    before = state_of(path)
    path.write_bytes(path.read_bytes() + b"x")
    assert state_of(path) != before


@pytest.mark.parametrize("name", ["set", "set.zip"])
def test_state_does_not_depend_on_the_mount(tmp_path, monkeypatch, name):
    path = write(tmp_path / name, small_set())
    before, stat = state_of(path), Path.stat

    class Mounted:
        st_dev = 12345

        def __init__(self, status):
            self.status = status

        def __getattr__(self, key):
            return getattr(self.status, key)

    monkeypatch.setattr(Path, "stat", lambda path, **options: Mounted(stat(path, **options)))
    assert state_of(path) == before


@pytest.mark.parametrize("name", NAMES)
def test_images_that_are_left_out_are_counted(tmp_path, name):
    files = small_set() | {
        "train/cat/1.TIF": b"",
        "train/cat/2.tif": b"",
        "train/dog/3.gif": b"",
        "train/4.png": encoded(7),
        ".trash/5.png": b"",
    }
    decoded = decode(write(tmp_path / name, files), tmp_path)
    assert decoded.note.startswith(
        "images left out: 1 in no folder of a class, 1 with the ending .gif, 2 with the ending .tif. Expected"
    )
    assert decode(write(tmp_path / f"all-{name}", small_set()), tmp_path).note is None


@pytest.fixture
def lock(monkeypatch):
    """Lets folders of some names be unreadable, which root's never are."""
    scandir, locked = os.scandir, set()

    def guarded(path):
        if os.path.basename(path) in locked:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    return locked.add


@pytest.mark.parametrize("prefix", ["", "pets/"])
@pytest.mark.parametrize("name", ["test/cat/sub", "train", "test"])
def test_a_folder_in_a_folder_that_cannot_be_read_is_an_error(name, prefix, tmp_path, lock):
    files = {prefix + key: data for key, data in small_set().items()}
    folder = write_folder(tmp_path / "set", files)
    lock(os.path.basename(name))
    with pytest.raises(PermissionError, match=f"{prefix}{name}"):
        state_of(folder)
    with pytest.raises(DataError, match=rf"Permission denied: '.*/{prefix}{name}'"):
        decode(folder, tmp_path)


def test_the_folder_around_train_and_test_must_be_readable(tmp_path, lock):
    folder = write_folder(tmp_path / "set", {f"pets/{key}": data for key, data in small_set().items()})
    lock("set")
    with pytest.raises(PermissionError, match="set"):
        state_of(folder)
    (tmp_path / "other/pets").mkdir(parents=True)
    lock("pets")
    with pytest.raises(PermissionError, match="other/pets"):
        state_of(tmp_path / "other")


@pytest.mark.parametrize("prefix", ["", "pets/"])
@pytest.mark.parametrize(
    "name",
    ["lost+found", "#recycle", "@eaDir", "$RECYCLE.BIN", "private", ".git", "notes/more", "train/.git"],
)
def test_a_folder_that_holds_no_data_need_not_be_readable(name, prefix, tmp_path, lock):
    folder = write_folder(tmp_path / "set", {prefix + key: data for key, data in small_set().items()})
    (folder / name).mkdir(parents=True)
    lock(os.path.basename(name))
    assert state_of(folder)
    assert len(decode(folder, tmp_path).test.rows) == 3


def test_a_link_that_leads_nowhere_matters_only_for_images(tmp_path):
    folder = write_folder(tmp_path / "set", small_set())
    (folder / "notes.txt").symlink_to(folder / "gone")
    assert state_of(folder)
    assert len(decode(folder, tmp_path).train.rows) == 3
    (folder / "train/cat/link.png").symlink_to(folder / "gone")
    with pytest.raises(FileNotFoundError, match=r"train/cat/link.png"):
        state_of(folder)


def pixels_of(tmp_path, picture, **options):
    """Return the pixels that a picture of Pillow has when it is decoded."""
    buffer = io.BytesIO()
    picture.save(buffer, **options)
    data = buffer.getvalue()
    decoded = decode(write_folder(tmp_path / "set", {"train/a/0.png": data, "test/a/0.png": data}), tmp_path)
    return images(decoded.train)[0]


def test_grey_images_of_16_bits_keep_their_greys(tmp_path):
    values = np.array([[0, 255, 256], [1000, 32768, 65535]], np.uint16)
    pixels = pixels_of(tmp_path, Image.fromarray(values), format="png")
    np.testing.assert_array_equal(pixels, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_images_without_a_known_range_are_refused(tmp_path):
    picture = Image.fromarray(np.zeros((2, 3), np.float32))
    with pytest.raises(DataError, match=r"cannot decode .*a/0.png.*32 bits a pixel \(mode F\)"):
        pixels_of(tmp_path, picture, format="tiff")


def test_images_are_turned_as_their_camera_was_held(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    pixels = pixels_of(tmp_path, Image.fromarray(values), format="png", exif=exif)
    np.testing.assert_array_equal(pixels, np.rot90(values, -1))


@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_as_pillow_turns_them(tmp_path, orientation):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    picture.save(buffer, format="png", exif=exif)
    pixels = pixels_of(tmp_path, picture, format="png", exif=exif)
    np.testing.assert_array_equal(pixels, np.asarray(ImageOps.exif_transpose(Image.open(buffer))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow's, where it is cut off
@pytest.mark.parametrize("exif", [b"garbage", b"II*\0", b"II*\0\x08\0\0\0\x05\0\x12\x01", b""])
def test_images_with_damaged_exif_are_taken_as_they_are(tmp_path, exif):
    values = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    pixels = pixels_of(tmp_path, Image.fromarray(values), format="png", exif=b"Exif\0\0" + exif)
    np.testing.assert_array_equal(pixels, values)


def save_npz(path, **changes):
    rng = np.random.default_rng(0)
    values = {
        "x_train": rng.integers(0, 256, (5, 4, 3, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 1, 0]),
        "x_test": rng.integers(0, 256, (2, 4, 3, 3), dtype=np.uint8),
        "y_test": np.array([[2], [0]], dtype=np.uint8),
    } | changes
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    return values


def test_npz(tmp_path):
    values = save_npz(tmp_path / "a.npz")
    decoded = decode_npz(tmp_path / "a.npz")
    np.testing.assert_array_equal(images(decoded.train), values["x_train"])
    assert (decoded.train.labels.tolist(), decoded.test.labels.tolist()) == ([0, 1, 2, 1, 0], [2, 0])
    assert decoded.train.labels.dtype == decoded.test.labels.dtype == np.int64
    assert decoded.classes == ("0", "1", "2")


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 4, 3, 1)])
def test_npz_with_grey_images(tmp_path, shape):
    grey = np.arange(24, dtype=np.uint8).reshape(shape)
    save_npz(tmp_path / "a.npz", x_test=grey)
    result = images(decode_npz(tmp_path / "a.npz").test)
    np.testing.assert_array_equal(result, np.repeat(grey.reshape(2, 4, 3, 1), 3, axis=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "y_test not in the file, which has x_train, y_train, x_test. It needs"),
        ({"x_test": np.zeros((2, 4, 3, 3))}, r"x_test has dtype float64; expected uint8.*images \* 255"),
        (
            {"x_test": np.zeros((2, 3, 4, 5), np.uint8)},
            r"x_test has shape \(2, 3, 4, 5\); .*Channels come last",
        ),
        ({"x_test": np.zeros((0, 4, 3, 3), np.uint8)}, r"x_test has shape \(0, .*at least one image"),
        ({"x_test": np.zeros((2, 5, 3, 3), np.uint8)}, r"shape \(4, 3, 3\), x_test of shape \(5, 3, 3\)"),
        ({"y_test": np.array([0.0, 1.0])}, "y_test has dtype float64"),
        ({"y_test": np.array([0, -1])}, "expected 2 whole numbers from 0"),
        ({"y_test": np.array([0, 1, 1])}, r"shape \(3,\); expected 2 whole numbers"),
        (
            {"y_train": np.array([0, 20_000_000, 1, 1, 0])},
            r"label of image 1 in y_train is 20,000,000.*at most 100,000",
        ),
        (
            {"y_test": np.array([2**63 + 5, 0], np.uint64)},
            r"label of image 0 in y_test is 9,223,372,036,854,775,813.*numpy.unique",
        ),
    ],
)
def test_npz_messages(tmp_path, changes, message):
    save_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(DataError, match=rf"a\.npz.*{message}"):
        decode_npz(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"junk" * 100,
        lambda data: b"",
        lambda data: data.replace(b"NUMPY", b"NUMPX"),
    ],
)
def test_a_damaged_npz(tmp_path, harm):
    path = tmp_path / "a.npz"
    save_npz(path)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DataError, match=r"a\.npz cannot be read: .*Copy or make it again"):
        decode_npz(path)
