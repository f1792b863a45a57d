"""What went wrong in a run: the workers' records of their errors, and the report made of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import linecache
import os
import re
import signal
import site
import sysconfig
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.sharedmem import LEFT_EXIT

MAX_LINES = 12
MAX_FRAMES = 5

# What gloo, nccl and the stores say on a process whose peer has gone: a consequence, never the cause.
PEER_GONE = (
    "closed by peer",
    "reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "Application timeout caused pair closure",
    "Failed to recv, got 0 bytes",
    "[c10d]",
)
# The frames of these say nothing to the user: launching, and the libraries below the user's code.
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SAVED_EXIT = 75
_LOADER_HEAD = re.compile(r"^Caught (\w+) in DataLoader worker process (\d+)\.")
_TRACEBACK_LINE = re.compile(r'^  File "(.*)", line (\d+), in (.*)$')
# An error that is noticed this soon after a death is taken for its consequence.
_CONSEQUENCE_S = 1.0


@dataclass(frozen=True)
class Frame:
    """One line of a traceback. ``source`` is empty if the text of the line cannot be had."""

    file: str
    line: int
    function: str
    source: str
    is_user: bool


@dataclass(frozen=True)
class Record:
    """What a worker writes about the error that ends it.

    Attributes:
        rank: its rank.
        time: when, as ``time.time()``.
        kind: the class of the exception.
        message: its text.
        frames: the last frames of the traceback, the innermost last.
        traceback: the whole traceback as Python prints it.
        exit_code: the code that the worker exits with.
        secondary: whether it is the consequence of another worker's end.
    """

    rank: int
    time: float
    kind: str
    message: str
    frames: tuple[Frame, ...]
    traceback: str
    exit_code: int
    secondary: bool


@dataclass(frozen=True)
class First:
    """The first failure of a run: a worker's record, or a death without one."""

    rank: int
    time: float
    exit_code: int
    record: Record | None = None


def record(error: BaseException, rank: int) -> Record:
    """Return the record of an exception that ends the worker ``rank``."""
    kind, message = type(error).__name__, _text_of(error)
    frames = _frames(error)
    secondary = is_consequence(error)
    code = exit_code_of(error)
    if code == _SAVED_EXIT:
        secondary = True  # it saved its state because another one failed, or because it was told to stop
    loading = _from_loader(message)
    if loading is not None:
        kind, message, inner = loading
        frames = (*[frame for frame in frames if frame.is_user], *inner)[-MAX_FRAMES:]
    return Record(
        rank=rank,
        time=time.time(),
        kind=kind,
        message=message,
        frames=frames,
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        exit_code=code,
        secondary=secondary,
    )


def is_consequence(error: BaseException) -> bool:
    """Return whether an error says that a peer has gone, so that its cause is another process."""
    return isinstance(error, RuntimeError | OSError) and any(text in _text_of(error) for text in PEER_GONE)


def _text_of(error: BaseException) -> str:
    """Return an exception's text, also of a class whose ``__str__`` fails."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its __str__ raises {type(broken).__name__})"


def _from_loader(message: str) -> tuple[str, str, tuple[Frame, ...]] | None:
    """Return what failed in a worker of torch's DataLoader: class, text, the user's frames.

    torch raises the error again in the process that reads, with the worker's traceback as its text.

    Args:
        message: the text of any exception.

    Returns:
        None if it is of another kind.
    """
    lines = message.splitlines()
    head = _LOADER_HEAD.match(lines[0]) if lines else None
    starts = [i for i, line in enumerate(lines) if line.endswith("raceback (most recent call last):")]
    if head is None or not starts:
        return None
    entries = [
        (i, found)
        for i, line in enumerate(lines[starts[-1] :], starts[-1])
        if (found := _TRACEBACK_LINE.match(line))
    ]
    if not entries:
        return None
    frames = tuple(
        Frame(found[1], int(found[2]), found[3], _source(lines, i + 1), True)
        for i, found in entries
        if is_user(found[1])
    )
    end = entries[-1][0] + 1
    text = next((lines[i:] for i in range(end, len(lines)) if not lines[i].startswith(" ")), [])
    first, *more = text or [head[1]]
    kind, _, words = first.partition(": ")
    where = f"(in DataLoader worker {head[2]})"
    return kind.rpartition(".")[2], "\n".join([f"{words} {where}".strip(), *more]).rstrip(), frames


def _source(lines: list[str], i: int) -> str:
    """Return line ``i`` of a traceback if it is the text of a line of code."""
    is_code = i < len(lines) and lines[i].startswith("    ") and not _TRACEBACK_LINE.match(lines[i])
    return lines[i].strip() if is_code else ""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, EvenstepError):
        return error.exit_code
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def file_name(rank: int) -> str:
    """Return the name of the file with a rank's record."""
    return f"failure-{rank}.json"


def write_record(directory: str | Path, record: Record) -> None:
    """Write a worker's record into the private directory of the run."""
    path = Path(directory) / file_name(record.rank)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf8")
    os.replace(temporary, path)


def read_records(directory: str | Path) -> list[Record]:
    """Return the records in the directory, by rank."""
    records = []
    for path in Path(directory).glob("failure-*.json"):
        values = json.loads(path.read_text(encoding="utf8"))
        values["frames"] = tuple(Frame(**frame) for frame in values["frames"])
        records.append(Record(**values))
    return sorted(records, key=lambda record: record.rank)


def first_failure(
    records: Iterable[Record], exits: Mapping[int, int], deaths: Mapping[int, float] | None = None
) -> First | None:
    """Return the failure that the others follow from.

    That is the earliest error of a worker's own, or the earliest death without a record. Errors that tell of
    a lost peer, exit code 75 and deaths by SIGTERM (with which the workers left over are stopped) are taken
    only if there is nothing else.

    Args:
        records: the workers' records.
        exits: exit codes of the ranks that did not finish, -N for a death by signal N.
        deaths: when the ranks ended, as ``time.time()``.
    """
    deaths = deaths or {}
    by_rank = {record.rank: record for record in records}
    found = [First(r.rank, r.time, r.exit_code, r) for r in by_rank.values() if not r.secondary]
    silent = [
        First(rank, deaths.get(rank, float("inf")) - (_CONSEQUENCE_S if code < 0 else 0), _shell_code(code))
        for rank, code in exits.items()
        if rank not in by_rank
    ]
    found += [death for death in silent if death.exit_code not in (128 + signal.SIGTERM, LEFT_EXIT)]
    found = found or [First(r.rank, r.time, r.exit_code, r) for r in by_rank.values()] + silent
    return min(found, key=lambda failure: (failure.time, failure.rank), default=None)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def report(
    records: Iterable[Record],
    exits: Mapping[int, int],
    deaths: Mapping[int, float] | None = None,
    *,
    world_size: int | None = None,
    log_path: str | Path | None = None,
    out_of_memory: bool = False,
) -> str:
    """Return at most 12 lines that say what went wrong, the first failure first.

    Args:
        records: the workers' records.
        exits: exit codes by rank, -N for a death by signal N.
        deaths: when the ranks ended, as ``time.time()``.
        world_size: how many workers there were; by default those in ``records`` and ``exits``.
        log_path: the log file of the rank that failed first.
        out_of_memory: whether the kernel killed a process for memory during the run.
    """
    records = list(records)
    first = first_failure(records, exits, deaths)
    if first is None:
        return "a worker failed, and left no word of why."
    ranks = set(range(world_size)) if world_size else {r.rank for r in records} | set(exits)
    tail = _others(first, records, ranks)
    if out_of_memory and first.record is not None:
        tail.append("during the run the kernel killed a process because memory ran out (`dmesg` tells which)")
    if log_path is not None:
        tail.append(f"log: {log_path}")
    if first.record is None:
        return "\n".join([_death(first, out_of_memory), *tail])
    message = first.record.message.splitlines() or [""]
    head = [f"rank {first.rank} failed: {first.record.kind}: {message[0]}".rstrip(": ")]
    frames = [line_of(frame) for frame in first.record.frames]
    room = MAX_LINES - len(head) - len(frames) - len(tail)
    more = message[1:]
    if len(more) > room:
        more = [*more[: max(0, room - 1)], "..."][:room]
    return "\n".join([*head, *(f"  {line}" for line in more), *frames, *tail])


def oom_kills() -> int:
    """Return how many processes of this control group the kernel killed for memory; 0 if unknown."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _death(first: First, out_of_memory: bool) -> str:
    if first.exit_code <= 128:
        return (
            f"rank {first.rank} left with exit code {first.exit_code} before its main returned (os._exit in "
            "the code, or in a library)."
        )
    number = first.exit_code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hints = {
        "SIGKILL": "killed by hand or by the kernel because memory ran out; `dmesg` tells",
        "SIGSEGV": "invalid memory access in native code; the log or stderr shows where",
        "SIGBUS": "shared memory ran out, or a memory-mapped file was cut; look at `df -h /dev/shm`",
        "SIGABRT": "native code gave up; stderr shows its last words",
    }
    hint = hints.get(name)
    if name == "SIGKILL" and out_of_memory:
        hint = (
            "the kernel killed it because memory ran out: use fewer processes, a smaller batch or more memory"
        )
    return f"rank {first.rank} was killed by {name}" + (f" ({hint})." if hint else ".")


def headline(first: First) -> str:
    """Return in a few words what went wrong first, such as ``rank 1 died (signal 9)``."""
    if first.record is not None:
        return f"rank {first.rank} failed ({first.record.kind})"
    if first.exit_code > 128:
        return f"rank {first.rank} died (signal {first.exit_code - 128})"
    return f"rank {first.rank} left with exit code {first.exit_code}"


def _others(first: First, records: list[Record], ranks: set[int]) -> list[str]:
    if first.record is None:
        same: set[int] = set()
    else:
        alike = (first.record.kind, first.record.message)
        same = {r.rank for r in records if (r.kind, r.message) == alike and r.rank != first.rank}
    own = {r.rank: r for r in records if not r.secondary and r.rank != first.rank and r.rank not in same}
    lines = [f"the same error on {ranks_in_words({first.rank, *same})}"] if same else []
    for rank, other in sorted(own.items())[:2]:
        text = (other.message.splitlines() or [""])[0]
        lines.append(f"later, rank {rank}: {other.kind}: {text}"[:200])
    stopped = ranks - {first.rank} - same - set(sorted(own)[:2])
    if stopped:
        lines.append(f"{ranks_in_words(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped")
    return lines


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, ``ranks 0 and 1``, ``ranks 0, 1 and 3``; ``ranks 0-3`` for four or more in a row."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    parts: list[str] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            run = numbers[start:i]
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 3 else [str(number) for number in run]
            start = i
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"ranks {parts[0]}"


def line_of(frame: Frame) -> str:
    """Return a frame as an indented line: file, line, function, and the text of the line if it can be had."""
    source = frame.source or linecache.getline(frame.file, frame.line).strip()
    return f"  {short(frame.file)}:{frame.line} in {frame.function}" + (f": {source}" if source else "")


def short(file: str) -> str:
    """Return the path from the working directory, if it is in there."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):
        return file
    return file if relative.startswith("..") else relative


def _frames(error: BaseException) -> tuple[Frame, ...]:
    """Return the user's last frames, and where in a library the error came from, if it did."""
    frames = [
        Frame(entry.filename, entry.lineno or 0, entry.name, entry.line or "", is_user(entry.filename))
        for entry in traceback.extract_tb(error.__traceback__)
        if not is_own(entry.filename) and "<frozen" not in entry.filename
    ]
    users = [frame for frame in frames if frame.is_user]
    if users and not frames[-1].is_user:
        return (*users[-(MAX_FRAMES - 1) :], frames[-1])
    return tuple(users[-MAX_FRAMES:])


def is_own(file: str) -> bool:
    """Return whether a file of a traceback is evenstep's."""
    return file.startswith(_OWN)


def is_user(file: str) -> bool:
    """Return whether a file of a traceback is the user's: not evenstep's, not Python's, not a library's."""
    return not (is_own(file) or "<frozen" in file or file.startswith(_libraries()))


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(path.rstrip(os.sep) + os.sep for path in paths if path)
