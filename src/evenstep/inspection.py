"""The command ``evenstep checkpoint``: list the checkpoints of a run, verify them, export their weights."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.errors import CheckpointError, ConfigError, did_you_mean
from evenstep.files import json_text
from evenstep.flags import scan_flags, wants_help
from evenstep.manifest import MANIFEST, step_of
from evenstep.rundir import newest_whole

if TYPE_CHECKING:
    from evenstep.checkpoint import CheckpointInfo

HELP = """\
usage: evenstep checkpoint ls RUN [--json]
       evenstep checkpoint verify RUN-or-CHECKPOINT
       evenstep checkpoint export RUN-or-CHECKPOINT --output FILE [--average] [--force]

  ls       list the checkpoints of a run: step, epoch, score (* is the best), size, date, state
  verify   read every file and compare its SHA-256; exit code 4 if something is damaged
  export   write the weights (of a run: of its newest whole checkpoint) as one plain state_dict file

flags of ls:
  --json         print one JSON object

flags of export:
  --output FILE  .safetensors, or .pt, .pth, .bin for torch.load(FILE, weights_only=True)
  --average      the moving average of the weights (of a run with --ema-decay)
  --force        replace FILE if it is there
"""

# The flags of each action, and whether they are switches.
ACTIONS: dict[str, dict[str, bool]] = {
    "ls": {"json": True},
    "verify": {},
    "export": {"output": False, "average": True, "force": True},
}


@dataclass(frozen=True)
class _Asked:
    action: str
    path: Path
    flags: dict[str, Any]


def run(argv: Sequence[str]) -> int:
    """Run ``evenstep checkpoint`` and return its exit code.

    Args:
        argv: the words after ``checkpoint``.

    Raises:
        ConfigError: a word or a flag is wrong.
        CheckpointError: there is no checkpoint, or an exported one is damaged.
    """
    if wants_help(argv):
        sys.stdout.write(HELP)
        return 0
    asked = _parse(argv)
    if asked.action == "ls":
        return _list(asked)
    if asked.action == "verify":
        return _verify(asked)
    return _export(asked)


def _parse(argv: Sequence[str]) -> _Asked:
    action = argv[0] if argv else ""
    if action not in ACTIONS:
        raise ConfigError(
            f"evenstep checkpoint: {action!r} is no action.{did_you_mean(action, ACTIONS)} Choose one of "
            f"{', '.join(ACTIONS)}; `evenstep checkpoint --help` says what they do."
        )
    prog = f"evenstep checkpoint {action}"
    keys = ACTIONS[action]
    words: list[str] = []
    flags: list[str] = []
    takes_value = False
    for word in argv[1:]:
        is_flag = word.startswith("--")
        (flags if is_flag or takes_value else words).append(word)
        takes_value = is_flag and keys.get(word.removeprefix("--").replace("-", "_")) is False
    found = scan_flags(flags, keys, prog)
    if len(words) != 1:
        raise ConfigError(
            f"{prog} takes one directory, and got {len(words)}: {' '.join(words) or '(none)'}. Give the "
            "directory of a run, such as runs/NAME, or of a checkpoint in it (ls: of a run)."
        )
    if action == "export" and "output" not in found:
        raise ConfigError(f"{prog} needs --output FILE, such as --output weights.safetensors.")
    return _Asked(action, Path(words[0]), found)


def _is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, perhaps a damaged one, and not a run: a run may have any name."""
    if (path / "checkpoints").is_dir():
        return False
    return step_of(path) >= 0 or (path / MANIFEST).is_file()


def _infos(run_dir: Path) -> list[CheckpointInfo]:
    from evenstep import checkpoint

    infos = checkpoint.ls(run_dir)
    if not infos:
        what = "has no checkpoint" if run_dir.is_dir() else "is not there"
        raise CheckpointError(
            f"the run directory {run_dir} {what}. Give the directory that evenstep train was given as "
            "--run-dir, such as runs/NAME."
        )
    return infos


def _list(asked: _Asked) -> int:
    infos = _infos(asked.path)
    scored = [(info.score, info.step) for info in infos if info.score is not None]
    best = max(scored)[1] if scored else None
    rows: list[dict[str, Any]] = [
        {
            "step": info.step,
            "epoch": info.meta.get("epoch"),
            "score": info.score,
            "best": info.step == best,
            "bytes": info.num_bytes,
            "date": _date(info.path),
            "state": "ok" if info.problem is None else "damaged",
            "problem": info.problem,
            "path": str(info.path),
        }
        for info in infos
    ]
    if asked.flags.get("json"):
        _say(json_text({"run_dir": str(asked.path), "checkpoints": rows}))
        return 0
    table = [("step", "epoch", "score", "size", "date", "state")]
    table += [
        (
            f"{row['step']:,}",
            "-" if row["epoch"] is None else str(row["epoch"]),
            "-" if row["score"] is None else f"{row['score']:.4f}{'*' if row['best'] else ' '}",
            _size(row["bytes"]),
            str(row["date"] or "-").replace("T", " ")[:19],
            row["state"] if row["problem"] is None else f"damaged: {row['problem']}",
        )
        for row in rows
    ]
    wide = [max(len(line[column]) for line in table) for column in range(5)]
    for line in table:
        aligned = [f"{text:>{width}}" for text, width in zip(line[:5], wide, strict=True)]
        _say("  ".join([*aligned, line[5]]))
    return 0


def _date(path: Path) -> str | None:
    """Return when a checkpoint was written, in local time with its offset."""
    try:
        written = (path / "manifest.json").stat().st_mtime
    except OSError:
        return None
    return datetime.datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds")


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _verify(asked: _Asked) -> int:
    from evenstep import checkpoint

    paths = [asked.path] if _is_checkpoint(asked.path) else [info.path for info in _infos(asked.path)]
    num_damaged = 0
    for path in paths:
        problems = checkpoint.verify(path)
        _say(f"{path}: {'damaged' if problems else 'ok'}")
        for problem in problems:
            sys.stderr.write(f"{problem}\n")
        num_damaged += bool(problems)
    return CheckpointError.exit_code if num_damaged else 0


def _export(asked: _Asked) -> int:
    from evenstep.export import export

    path: Path | None = asked.path
    if not _is_checkpoint(asked.path):
        _infos(asked.path)
        path = newest_whole(asked.path)
        if path is None:
            raise CheckpointError(
                f"all checkpoints in {asked.path} are damaged; `evenstep checkpoint verify {asked.path}` "
                "says how. Train again, or put the files back."
            )
    assert path is not None
    output = asked.flags["output"]
    average = bool(asked.flags.get("average"))
    count = export(path, output, average=average, force=bool(asked.flags.get("force")))
    _say(f"{output}: {count} tensors of {path}{', moving average' if average else ''}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
