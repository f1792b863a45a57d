"""Image files in a folder or an archive, and arrays in an .npz file, decoded.

An archive is read as a stream; nothing of it is unpacked to disk, and a member's path is never used as one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import lzma
import os
import struct
import sys
import tarfile
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from evenstep import world
from evenstep.data.cache import SPLITS, Decoded, Rows
from evenstep.errors import DataError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
OTHER_ENDINGS = (
    ".tif",
    ".tiff",
    ".gif",
    ".jfif",
    ".jpe",
    ".jp2",
    ".heic",
    ".heif",
    ".avif",
    ".ppm",
    ".pgm",
    ".pbm",
    ".tga",
)
"""Of images that are not read, which is told."""
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2")
ARCHIVE_ENDINGS = (*TAR_ENDINGS, ".zip")
_LAYOUT = "train/<class>/*.jpg (or .jpeg, .png, .bmp, .webp) and test/<class>/*.jpg"
MAX_CLASSES = 100_000
"""More classes are taken for labels that are something else: ids, hashes, times."""
_EXPECTED = f"Expected {_LAYOUT}, perhaps inside one folder."
_BATCH = 256
_END_BYTES = 1 << 16
_ORIENTATION = 0x0112
"""The number of the EXIF tag that says how the camera was held."""


@dataclass(frozen=True, order=True)
class Member:
    """An image file: its split, class and name, and the folder around ``train`` and ``test``, if any."""

    split: str
    label: str
    name: str
    prefix: str = ""

    @property
    def path(self) -> str:
        """The path inside the folder or archive."""
        return "/".join(part for part in (self.prefix, self.split, self.label, self.name) if part)


Read = Callable[[], bytes]


def _same(data: bytes) -> bytes:
    return data


def member(path: str, where: str) -> Member | None:
    """Return the image file that a path inside ``where`` names, or None if it is something else.

    Raises:
        DataError: the path is absolute or leads out of the archive.
    """
    parts = [part for part in PurePosixPath(path).parts if part != "."]
    if path.startswith("/") or ".." in parts:
        raise DataError(
            f"{where}: the member {path!r} points outside of the archive. Such an archive is damaged or made "
            "to do harm, so nothing of it is used. Pack it again."
        )
    if not path.lower().endswith(IMAGE_ENDINGS) or any(part.startswith((".", "__MACOSX")) for part in parts):
        return None
    first = 0 if parts[0] in SPLITS else 1
    if len(parts) < first + 3 or parts[first] not in SPLITS:
        return None
    return Member(parts[first], parts[first + 1], "/".join(parts[first + 2 :]), "/".join(parts[:first]))


def count_left_out(path: str, left_out: Counter[str]) -> None:
    """Count a file that is no member, if it is an image, under the reason for which it is left out.

    Args:
        path: as for :func:`member`, which returned None for it.
        left_out: how many there are for each reason.
    """
    parts = PurePosixPath(path).parts
    if any(part.startswith((".", "__MACOSX")) for part in parts if part != "."):
        return
    ending = PurePosixPath(path).suffix.lower()
    if ending in IMAGE_ENDINGS:
        left_out["in no folder of a class"] += 1
    elif ending in OTHER_ENDINGS:
        left_out[f"with the ending {ending}"] += 1


def _note(left_out: Counter[str]) -> str | None:
    if not left_out:
        return None
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
    return f"images left out: {reasons}. {_EXPECTED}"


def read_folder(folder: Path, left_out: Counter[str]) -> Iterator[tuple[Member, Read]]:
    """Yield the image files of a folder, sorted."""
    for image, path in sorted(_images(folder, left_out)):
        yield image, path.read_bytes


def _files(folder: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        parts = Path(os.fsdecode(error.filename)).relative_to(folder).parts
        if _may_hold_images(folder, parts):
            raise error

    for directory, _, names in os.walk(folder, followlinks=True, onerror=unreadable):
        for name in names:
            yield Path(directory, name)


def _may_hold_images(folder: Path, parts: tuple[str, ...]) -> bool:
    """Return whether a folder that cannot be read may hold images of the data set; see :func:`member`.

    Disks and servers have folders that belong to others: ``lost+found``, ``#recycle``, ``@eaDir``.
    """
    if any(part.startswith((".", "__MACOSX")) for part in parts) or parts[-1:] == ("lost+found",):
        return False
    if not parts or not {*parts[:2]}.isdisjoint(SPLITS):
        return True
    # It might be the folder around train and test, if that is nowhere else.
    return len(parts) == 1 and not any(
        os.path.isdir(folder / around / "train") for around in ("", *os.listdir(folder))
    )


def _images(folder: Path, left_out: Counter[str] | None = None) -> Iterator[tuple[Member, Path]]:
    """Yield the image files of a folder, in no order; count those that are left out."""
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        image = member(name, str(folder))
        if image is not None:
            yield image, path
        elif left_out is not None:
            count_left_out(name, left_out)


def state_of(path: Path) -> str:
    """Return a text that changes when a file, or any image in a folder, changes, and that no other path has.

    Name, size and time of change do not tell files apart: archives keep the times of what they unpack, and
    arrays of equal shape have equal sizes. So it has the resolved path, the files' numbers on the disk and
    the times of their last change of state, which no program sets back; of a single file also its first and
    last bytes, where a .zip and an .npz have the checksums of their members. A chmod is a change
    of state, so after one the images are decoded again.
    """
    path = path.resolve()
    is_folder = path.is_dir()
    lines = [os.fspath(path)]
    for file in sorted(file for _, file in _images(path)) if is_folder else [path]:
        status = file.stat()
        name = file.relative_to(path).as_posix() if is_folder else file.name
        # Not st_dev: on NFS, btrfs and overlays it belongs to the mount, and is another after the next one.
        numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        lines.append("\t".join([name, *map(str, numbers)]))
    if not is_folder:
        lines.append(_ends(path))
    return "\n".join(lines)


def _ends(path: Path) -> str:
    """Return a sha256 of the first and the last bytes of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def read_zip(path: Path, left_out: Counter[str]) -> Iterator[tuple[Member, Read]]:
    """Yield the image files of a .zip, sorted."""
    with zipfile.ZipFile(path) as archive:
        found = []
        for info in archive.infolist():
            if info.is_dir():
                continue
            if (image := member(info.filename, str(path))) is None:
                count_left_out(info.filename, left_out)
            else:
                found.append((image, info))
        for image, info in sorted(found, key=lambda pair: pair[0]):
            data = archive.read(info)
            yield image, functools.partial(_same, data)


def read_tar(path: Path, left_out: Counter[str]) -> Iterator[tuple[Member, Read]]:
    """Yield the image files of a .tar, compressed or not, in the archive's order."""
    with tarfile.open(path) as archive:
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all of them
            if info.isdir():
                continue
            if (image := member(info.name, str(path))) is None:
                count_left_out(info.name, left_out)
                continue
            if not info.isfile():
                raise DataError(
                    f"{path}: {image.path} is a link or a device, not a file. Links are not followed, and "
                    "without it this would be another data set. Pack again with tar --dereference "
                    "--hard-dereference."
                )
            file = archive.extractfile(info)
            assert file is not None
            data = file.read()
            yield image, functools.partial(_same, data)
    if path.name.lower().endswith(".tar"):
        _check_end_of_tar(path)


def _check_end_of_tar(path: Path) -> None:
    # tarfile takes a file cut off between two members for a whole one; compressed ones raise by themselves.
    with path.open("rb") as file:
        file.seek(-512, os.SEEK_END)
        if file.read().strip(b"\0"):
            raise tarfile.ReadError("the end-of-archive block is missing")


def decode_files(path: Path, work: Path, *, quiet: bool) -> Decoded:
    """Decode all images of a folder or an archive.

    Images become RGB: a grey one gets three equal channels, transparency is dropped. Samples are in the order
    of class and name, so a folder and an archive of it give the same data set.

    Args:
        path: the folder or archive.
        work: a directory for a temporary file.
        quiet: show no progress bar.

    Raises:
        DataError: names the archive and the member.
    """
    members: list[Member] = []
    left_out: Counter[str] = Counter()
    shape: tuple[int, ...] | None = None
    scratch = work / "scratch"
    with scratch.open("wb") as file:
        for image, pixels in _progress(_decoded(path, left_out), quiet):
            if shape is not None and pixels.shape != shape:
                raise DataError(
                    f"{path}: {image.path} has {_size(pixels.shape)} pixels, but {members[0].path} has "
                    f"{_size(shape)} (width x height). A batch needs images of one size; bring all to one "
                    "size first, or write a Dataset that does (--data module:callable)."
                )
            shape = pixels.shape
            members.append(image)
            file.write(pixels.tobytes())
    note = _note(left_out)
    if shape is None:
        what = f". {_EXPECTED}" if note is None else f"; {note}"
        raise DataError(f"{path}: no images found{what} Check --data.")
    images = np.memmap(scratch, mode="r", dtype=np.uint8, shape=(len(members), *shape))
    return dataclasses.replace(_sorted(path, members, images), note=note)


def _guarded(path: Path, members: Iterator[tuple[Member, Read]]) -> Iterator[tuple[Member, Read]]:
    """Pass the members on, and turn what goes wrong in reading the archive into a DataError."""
    last = "before the first image"
    try:
        for image, read in members:
            yield image, read
            last = f"after {image.path}"
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, last, error) from error
    except (EOFError, RuntimeError, OSError) as error:  # cut off, encrypted, unreadable
        raise _damaged(path, last, error) from error


def _damaged(path: Path, last: str, error: Exception) -> DataError:
    what = (str(error) or type(error).__name__).splitlines()[0].strip(" :")
    return DataError(
        f"{path} cannot be read {last}: {what}. A data set with a part missing would be another data set, "
        "so nothing of it is used. Copy or download it again."
    )


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]}"


def _decoded(path: Path, left_out: Counter[str]) -> Iterator[tuple[Member, np.ndarray]]:
    """Yield each image with its pixels, uint8 (H, W, 3), decoded in threads, in the order of reading."""
    reader = read_folder if path.is_dir() else read_zip if path.name.lower().endswith(".zip") else read_tar
    members = _guarded(path, reader(path, left_out))
    threads = min(4, world.num_cores())
    waiting: deque[Future[list[tuple[Member, np.ndarray]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(itertools.islice(members, _BATCH)):
            waiting.append(pool.submit(_decode_batch, path, batch))
            if len(waiting) > 2 * threads:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def _decode_batch(path: Path, batch: list[tuple[Member, Read]]) -> list[tuple[Member, np.ndarray]]:
    return [(image, _decode(path, image, read)) for image, read in batch]


def _decode(path: Path, image: Member, read: Read) -> np.ndarray:
    from PIL import Image

    data = b""
    try:
        data = read()
        with Image.open(io.BytesIO(data)) as file:
            return np.asarray(_rgb(file))
    except Exception as error:
        raise DataError(
            f"{path}: cannot decode {image.path} ({len(data):,} bytes): {error}. A data set with a hole "
            "would be another data set. Replace this image, or remove it."
        ) from error


def _rgb(file: Any) -> Any:
    """Return an open image of Pillow upright and in RGB, 8 bits a channel.

    Cameras store how they were held (EXIF). Of 16 bits the upper eight are taken, as Pillow does for colours;
    by itself it makes all values above 255 white.

    Raises:
        ValueError: the values have no range that is known.
    """
    upright = _upright(file)
    # Older versions of Pillow open a grey PNG of 16 bits as 32 bits.
    if upright.mode.startswith("I;16") or (upright.mode == "I" and file.format == "PNG"):
        from PIL import Image

        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
    if upright.mode in ("I", "F"):
        raise ValueError(f"it has 32 bits a pixel (mode {upright.mode}); save it with 8 or 16 bits")
    return upright.convert("RGB")


def _upright(file: Any) -> Any:
    """Return an open image of Pillow turned as its EXIF says; as it is, where that cannot be read.

    ``ImageOps.exif_transpose`` fails where the EXIF is damaged, which viewers and datasets do not mind: the
    pixels are whole.
    """
    from PIL import Image

    file.load()
    try:
        orientation = file.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, struct.error, ValueError, TypeError, KeyError, OSError):
        return file
    turn = Image.Transpose
    turns = {
        2: turn.FLIP_LEFT_RIGHT,
        3: turn.ROTATE_180,
        4: turn.FLIP_TOP_BOTTOM,
        5: turn.TRANSPOSE,
        6: turn.ROTATE_270,
        7: turn.TRANSVERSE,
        8: turn.ROTATE_90,
    }
    return file.transpose(turns[orientation]) if orientation in turns else file


def _progress(items: Iterable[Any], quiet: bool) -> Iterable[Any]:
    from tqdm import tqdm

    hidden = quiet or not sys.stderr.isatty()
    return tqdm(items, desc="decoding images", unit=" images", disable=hidden, leave=False, mininterval=0.5)


def _sorted(path: Path, members: list[Member], images: np.ndarray) -> Decoded:
    image, count = Counter(members).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"{path}: {image.path} is in it {count} times. It is not clear which one is meant. Pack it again "
            "with each image once."
        )
    prefixes = sorted({image.prefix for image in members})
    if len(prefixes) > 1:
        raise DataError(
            f"{path}: train and test folders in more than one place: {prefixes[0] or '.'!r} and "
            f"{prefixes[1]!r}. It is not clear which data set is meant. Keep one."
        )
    classes = {split: {image.label for image in members if image.split == split} for split in SPLITS}
    pairs = (("train", "test"), ("test", "train"))
    for split, other in pairs:
        if not classes[split]:
            raise DataError(f"{path}: there are images in {other}, but none in {split}. Expected {_LAYOUT}.")
    if classes["train"] != classes["test"]:
        only = {split: ", ".join(sorted(classes[split] - classes[other])) or "none" for split, other in pairs}
        raise DataError(
            f"{path}: the classes of train and test differ: only in train: {only['train']}; only in test: "
            f"{only['test']}. A class's number is its place among all classes, so both need the same folders."
        )
    names = tuple(sorted(classes["train"]))
    number = {label: i for i, label in enumerate(names)}
    splits = []
    for split in SPLITS:
        rows = sorted((i for i, image in enumerate(members) if image.split == split), key=members.__getitem__)
        labels = np.array([number[members[i].label] for i in rows], dtype=np.int64)
        splits.append(Rows(images, np.array(rows, dtype=np.int64), labels))
    return Decoded(names, train=splits[0], test=splits[1])


def decode_npz(path: Path) -> Decoded:
    """Read the arrays of an .npz file.

    It has ``x_train, y_train, x_test, y_test``: images uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3); labels
    whole numbers from 0, (N,) or (N, 1). Grey images get three equal channels.

    Raises:
        DataError: the file is damaged, or an array is missing or is not as said above.
    """
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a whole .npz file (a zip archive of arrays)")
        with path.open("rb") as raw, np.load(raw) as file:  # np.load does not close a damaged file itself
            missing = [name for name in names if name not in file.files]
            if missing:
                raise DataError(
                    f"{path}: {', '.join(missing)} not in the file, which has "
                    f"{', '.join(file.files) or 'nothing'}. It needs x_train, y_train, x_test and y_test; "
                    "save it with numpy.savez(path, x_train=..., y_train=...)."
                )
            arrays = {name: np.asarray(file[name]) for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Copy or make it again.") from error
    images = {split: _npz_images(path, f"x_{split}", arrays[f"x_{split}"]) for split in SPLITS}
    if images["train"].shape[1:] != images["test"].shape[1:]:
        raise DataError(
            f"{path}: x_train has images of shape {images['train'].shape[1:]}, x_test of shape "
            f"{images['test'].shape[1:]}. A model takes images of one size; bring all to one size."
        )
    labels = {
        split: _npz_labels(path, f"y_{split}", arrays[f"y_{split}"], len(images[split])) for split in SPLITS
    }
    num_classes = max(int(labels[split].max()) for split in SPLITS) + 1
    train, test = (Rows(images[split], np.arange(len(images[split])), labels[split]) for split in SPLITS)
    return Decoded(tuple(str(i) for i in range(num_classes)), train, test)


def _npz_images(path: Path, name: str, images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8:
        raise DataError(
            f"{path}: {name} has dtype {images.dtype}; expected uint8, values 0 to 255. Floats in 0..1 are "
            "not rounded silently: save (images * 255).round().astype('uint8')."
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise DataError(
            f"{path}: {name} has shape {images.shape}; expected (N, H, W), (N, H, W, 1) or (N, H, W, 3) "
            "with at least one image. Channels come last."
        )
    return np.repeat(images, 3, axis=3) if images.shape[3] == 1 else images


def _npz_labels(path: Path, name: str, labels: np.ndarray, num_images: int) -> np.ndarray:
    flat = labels.reshape(-1) if labels.shape == (num_images, 1) else labels
    if flat.dtype.kind not in "iu" or flat.shape != (num_images,) or int(flat.min()) < 0:
        raise DataError(
            f"{path}: {name} has dtype {labels.dtype} and shape {labels.shape}; expected {num_images} whole "
            "numbers from 0, one per image."
        )
    most = int(flat.max())  # before the cast, which may make it negative
    if most >= MAX_CLASSES:
        raise DataError(
            f"{path}: the label of image {int(flat.argmax())} in {name} is {most:,}. Labels are numbers of "
            "classes from 0, and the model gets an output for each number up to the largest; at most "
            f"{MAX_CLASSES:,} are allowed. Number the classes from 0, for example with "
            "numpy.unique(labels, return_inverse=True)."
        )
    return flat.astype(np.int64)
