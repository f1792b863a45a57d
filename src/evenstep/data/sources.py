"""The data sets that ``--data`` can name: where they come from, and how a worker opens them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.config import SOURCES
from evenstep.data import cache
from evenstep.data.cache import FORMAT, Decoded, ImageArrays, Rows
from evenstep.data.images import ARCHIVE_ENDINGS, decode_files, decode_npz, state_of
from evenstep.errors import ConfigError, DataError, MachineError, did_you_mean
from evenstep.objects import import_object

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_CIFAR10_FOLDER = "cifar-10-batches-py"
_CIFAR10_FILES = ("batches.meta", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_PROBE_S = 5.0
"""How long ``auto`` waits for an answer of the network before it takes the digits."""
_STALL_S = 30.0
"""How long a download may stand still."""

Directory = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Source:
    """An open data set.

    Attributes:
        name: ``cifar10``, ``digits``, the file's name, or ``module:callable``.
        train: ImageArrays, or the user's torch Dataset.
        test: as ``train``; None where the user's data have none.
        classes: the names of the classes in the order of the labels; None if they are not known.
        note: what the user must be told about the choice of data; None if there is nothing.
    """

    name: str
    train: Any
    test: Any
    classes: tuple[str, ...] | None
    note: str | None = None


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` found.

    Attributes:
        spec: what all workers should open: for ``auto`` the source that it stands for on this machine.
        name: as in Source.
        directory: the cache directory, or None if the source has none.
        note: what the user must be told about the choice of data, or about files that are left out.
    """

    spec: str
    name: str
    directory: Path | None = None
    note: str | None = None


def prepare(spec: str, *, data_dir: Directory, cache_dir: Directory | None, quiet: bool = False) -> Prepared:
    """Download and decode what ``spec`` needs, so that workers only open it.

    With a warm cache it takes milliseconds and imports neither torch nor Pillow. The user's
    ``module:callable`` is not called here.

    Args:
        spec: ``auto``, ``cifar10``, ``digits``, a folder, an archive, an .npz file, or ``module:callable``.
        data_dir: where cifar10 is looked for and downloaded to.
        cache_dir: where decoded images are kept; None for ``cache.default_cache_dir()``.
        quiet: show no progress bar.

    Returns:
        What there is, for ``open_source`` in the workers.

    Raises:
        ConfigError: ``spec`` names nothing that there is.
        DataError: the data are damaged or cannot be downloaded.
        MachineError: the cache cannot be written.
    """
    if spec == "auto":
        return _prepare_auto(data_dir=data_dir, cache_dir=cache_dir, quiet=quiet)
    if spec == "digits":
        return Prepared(spec, spec)
    if spec == "cifar10":
        return Prepared(spec, spec, _cifar10(Path(data_dir), cache_dir, quiet))
    path = Path(spec).expanduser()
    if path.exists():
        return _prepare_path(spec, path, cache_dir, quiet)
    if ":" in spec:
        return Prepared(spec, spec)
    raise ConfigError(
        f"data {spec!r} is neither {', '.join(SOURCES)} nor a file or folder that exists."
        f"{did_you_mean(spec, SOURCES)} Give --data one of these, the path of a folder, an archive "
        f"({', '.join(ARCHIVE_ENDINGS)}) or an .npz file, or module:callable."
    )


def open_source(spec: str, *, data_dir: Directory, cache_dir: Directory | None) -> Source:
    """Open a data set in a worker; prepare it first if that was not done.

    Images are memory-mapped, so they are in memory once however many processes there are. Give the ``spec``
    that :func:`prepare` returned: ``auto`` may mean another source on another machine.

    Args:
        spec: as for :func:`prepare`.
        data_dir: as for :func:`prepare`.
        cache_dir: as for :func:`prepare`.

    Returns:
        The two splits and the names of the classes.

    Raises:
        ConfigError: as :func:`prepare`; or ``module:callable`` does not return data sets.
        DataError: as :func:`prepare`.
        MachineError: as :func:`prepare`.
    """
    prepared = prepare(spec, data_dir=data_dir, cache_dir=cache_dir, quiet=True)
    if prepared.directory is None and prepared.spec == "digits":
        from evenstep.data import digits

        train, test = digits.load()
    elif prepared.directory is None:
        return _user_source(prepared.spec)
    else:
        train, test = cache.open_arrays(prepared.directory)
    # What there is to say of the files of --data was said when they were prepared.
    note = prepared.note if spec == "auto" else None
    return Source(prepared.name, train, test, train.classes, note)


def _prepare_path(spec: str, path: Path, cache_dir: Directory | None, quiet: bool) -> Prepared:
    ending = next((e for e in (*ARCHIVE_ENDINGS, ".npz") if path.name.lower().endswith(e)), "")
    if not path.is_dir() and not ending:
        raise ConfigError(
            f"data {spec!r} is a file with an unknown ending. Give --data a folder, an .npz file, or an "
            f"archive that ends in one of {', '.join(ARCHIVE_ENDINGS)}."
        )
    try:
        spec.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the path of the data {spec!r} is not in UTF-8, so no config file can hold it. Rename it, or "
            "give a link to it."
        ) from None
    name = path.resolve().name.removesuffix(ending)

    def decode(work: Path) -> Decoded:
        return decode_npz(path) if ending == ".npz" else decode_files(path, work, quiet=quiet)

    try:
        key = _key(state_of(path))
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}: {error.strerror}. Without it this would be another data "
            "set. Correct its permissions, or remove it (a link that leads nowhere, too)."
        ) from error
    directory = cache.cached(_word(name), key, cache_dir, decode)
    note = cache.note(directory)
    return Prepared(spec, name, directory, note and f"data {spec}: {note}")


def _key(state: str) -> str:
    # Names of files are bytes; what of them is no UTF-8 Python has as surrogates.
    return hashlib.sha256(f"{FORMAT}\n{state}".encode(errors="surrogateescape")).hexdigest()


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:60] or "data"


def _prepare_auto(*, data_dir: Directory, cache_dir: Directory | None, quiet: bool) -> Prepared:
    problem = "" if _has_cifar10(Path(data_dir)) else _unreachable(CIFAR10_URL)
    if not problem:
        try:
            return Prepared("cifar10", "cifar10", _cifar10(Path(data_dir), cache_dir, quiet))
        except (DataError, MachineError) as error:
            if _has_cifar10(Path(data_dir)):
                raise
            problem = f"it cannot be downloaded ({error.__cause__ or error})"
    note = (
        f"CIFAR-10 is not in {os.fspath(data_dir)!r} and {problem}: using the small built-in digits instead "
        "(1,442 training images). Accuracies are not comparable with CIFAR-10. --data cifar10 makes this an "
        "error; --data digits takes them without this note."
    )
    return Prepared("digits", "digits", None, note)


def _has_cifar10(data_dir: Path) -> bool:
    return all((data_dir / _CIFAR10_FOLDER / name).is_file() for name in _CIFAR10_FILES)


def _unreachable(url: str) -> str:
    """Return why a URL does not answer within a few seconds, or an empty string if it does."""
    import urllib.request

    answers = [f"{url.split('/')[2]} does not answer within {_PROBE_S:.0f} s"]

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_PROBE_S):
                answers.append("")
        except (OSError, ValueError) as error:
            answers.append(f"{url.split('/')[2]} cannot be reached ({getattr(error, 'reason', error)})")

    # In a thread, because a time-out of a socket does not limit how long a name server may take.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return answers[-1]


def _cifar10(data_dir: Path, cache_dir: Directory | None, quiet: bool) -> Path:
    if not _has_cifar10(data_dir):
        _download_cifar10(data_dir, quiet)
    state = "\n".join(state_of(data_dir / _CIFAR10_FOLDER / name) for name in _CIFAR10_FILES)
    return cache.cached("cifar10", _key(state), cache_dir, lambda _: _decode_cifar10(data_dir))


def _download_cifar10(data_dir: Path, quiet: bool) -> None:
    """Download CIFAR-10 with torchvision; of several processes one downloads and the others wait."""
    from filelock import FileLock

    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / "cifar10.lock"):
            if _has_cifar10(data_dir):
                return
            from torchvision.datasets import CIFAR10

            hidden = contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext()
            with hidden, _socket_timeout(_STALL_S):
                CIFAR10(os.fspath(data_dir), download=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise DataError(
            f"cannot download CIFAR-10 to {data_dir}: {error}. Put the files of {CIFAR10_URL} into "
            f"{data_dir / _CIFAR10_FOLDER} (--data-dir names the place), or use the built-in --data digits."
        ) from error


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _decode_cifar10(data_dir: Path) -> Decoded:
    from torchvision.datasets import CIFAR10

    try:
        train, test = (CIFAR10(os.fspath(data_dir), train=is_train) for is_train in (True, False))
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DataError(
            f"the CIFAR-10 files in {data_dir / _CIFAR10_FOLDER} are damaged: {error}. Remove that folder; "
            "it is downloaded again."
        ) from error
    rows = [Rows(split.data, np.arange(len(split.data)), np.array(split.targets)) for split in (train, test)]
    return Decoded(tuple(train.classes), train=rows[0], test=rows[1])


def _user_source(spec: str) -> Source:
    make: Callable[[], Any] = import_object(spec, what="data", flag="--data")
    if not callable(make):
        raise ConfigError(
            f"--data {spec} is {type(make).__name__}, which cannot be called. Give a function without "
            "arguments that returns (train, test)."
        )
    made = make()
    if isinstance(made, dict) and {"train", "test"} <= made.keys():
        train, test, classes = made["train"], made["test"], made.get("classes")
    elif isinstance(made, tuple | list) and len(made) == 2:
        (train, test), classes = made, None
    else:
        content = f" with the keys {', '.join(map(str, made))}" if isinstance(made, dict) else ""
        raise ConfigError(
            f"--data {spec} returned {type(made).__name__}{content}; expected (train, test), or a dict with "
            "train and test (and, if you like, classes)."
        )
    for split, dataset in (("train", train), *(() if test is None else (("test", test),))):
        if not isinstance(dataset, ImageArrays) and not _is_dataset(dataset):
            raise ConfigError(
                f"--data {spec}: {split} is {type(dataset).__name__}, not a dataset. Return a torch Dataset "
                "with __len__ and __getitem__, or an IterableDataset; not a DataLoader: evenstep makes the "
                "batches."
            )
    classes = getattr(train, "classes", None) if classes is None else classes
    return Source(spec, train, test, tuple(str(name) for name in classes) if classes else None)


def _is_dataset(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    )
