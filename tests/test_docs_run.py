"""The commands and the Python in the README and the pages run, and print what the pages say.

A block of commands runs as it stands, in a directory of its own, with flags that make it short (``SHORT``). A
comment in front of a block says what else is to be known:

    <!-- not run: why -->      it is not run
    <!-- exit 5 -->            its last command ends with this code
    <!-- prints -->            in front of a block of text: what the commands before it print; ``...``
                               stands for what is left out, and a number for any other

The flags of several ``evenstep train`` lines go into one run where they do not contradict each other: a run
costs seconds, and the pages have dozens.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import textwrap

import pytest
import torch
from PIL import Image

from evenstep import cli
from test_docs import IDS, ROOT, blocks, lines_of

# What makes a command short; a flag that the line has itself is left as it is.
TRAIN = {"--data": "digits", "--steps": "2", "--threads": "1", "--device": "cpu"}
SHORT = {
    "train": TRAIN,
    "eval": {"--device": "cpu"},
    "verify": {**TRAIN, "--hash-seeds": "none"},
    "doctor": {"--no-bandwidth": None},
}
# watch goes on until Ctrl-C, and bench measures for a minute: test_watch.py and test_bench.py run them.
ELSEWHERE = ("bench", "watch")
# CIFAR-10 would have to be downloaded, and resnet9 takes minutes without a GPU.
INSTEAD = {"cifar10": "digits", "resnet9": "net"}
# What a user has in the directory.
FILES = {
    "mymodels.py": "from evenstep.models import Net as net",
    "mydata.py": """
        from evenstep.data import digits

        def make():
            return digits.load()
        """,
    "mytraining.py": """
        import torch
        import evenstep
        from evenstep.data import digits

        def main(world):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
            state = evenstep.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in evenstep.Loader(digits.load()[0], 64).batches(state, steps=2):
                evenstep.train_step(state, batch, evenstep.cross_entropy())
        """,
    "my_project/__init__.py": "",
    "my_project/models.py": "from evenstep.models import Net as MyModel",
    "my_project/data.py": "from mydata import make as make_data",
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", "COLUMNS": "120"}


def flags_of(words):
    """``{flag: its values}`` of the words after the command; those before the first flag are under ``""``."""
    found, flag = {}, ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found[flag] = [value] if value else []
        else:
            found.setdefault(flag, []).append(word)
    return found


def words_of(flags):
    return [word for flag, values in flags.items() for word in ([flag] if flag else []) + values]


def short(command, flags):
    """The flags of a line, and those that make it short."""
    instead = {
        name: other for name, other in INSTEAD.items() if name != "resnet9" or "--batchnorm" not in flags
    }
    flags = {flag: [instead.get(value, value) for value in values] for flag, values in flags.items()}
    ends_by_itself = {"--smoke-test", "--steps"} & flags.keys()
    for flag, value in SHORT.get(command, {}).items():
        # They are those of the run, or of the loop of one's own.
        is_kept = {"--resume", "--main"} & flags.keys() and flag in ("--data", "--threads")
        if flag not in flags and not (flag == "--steps" and ends_by_itself) and not is_kept:
            flags[flag] = [] if value is None else [value]
    return flags


def is_plain(words):
    """Whether a line is a training of its own, which needs nothing of other lines and leaves them nothing."""
    return words[:2] == ["evenstep", "train"] and not {"--run-dir", "--resume", "--config"} & set(words)


def merged(lines):
    """Command lines of ``evenstep train``: the flags of all lines in as few runs as may be."""
    runs = []
    for words in lines:
        flags = flags_of(words[2:])
        flags.setdefault("--recipe", [])  # its options go with no other line's
        fits = [run for run in runs if all(run.get(flag, values) == values for flag, values in flags.items())]
        if not fits:
            runs.append({})
        (fits or runs)[-1 if not fits else 0].update(flags)
    for run in runs:
        if not run["--recipe"]:
            del run["--recipe"]
    return [["evenstep", "train", *words_of(run)] for run in runs]


def run(line, code=0):
    """Run a command line in the current directory and return all that it prints."""
    words = shlex.split(line, comments=True)
    if words[0] == "evenstep" and words[1] in ELSEWHERE:
        return ""
    if words[0] == "evenstep" and not re.search(r"[|<>&;]", line):
        rest = words_of(short(words[1], flags_of(words[2:])))
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            found = cli.main([words[1], *rest])
        printed = stream.getvalue()
    else:
        done = subprocess.run(
            ["bash", "-ec", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found, printed = done.returncode, done.stdout
    assert found == code, f"{line}: exit code {found}\n{printed}"
    return printed


def plain(text):
    """Text without its line breaks, numbers and paths, which differ from machine to machine."""
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "0", text)
    text = re.sub(r"\d[\d.,:]*\d|\d", "0", text)
    return " ".join(text.split())


def lacking(expected, printed):
    """The first part of ``expected``, between two ``...``, that ``printed`` does not have in this order."""
    rest = plain(printed)
    for part in filter(None, re.split(r"\s*\.\.\.\s*", plain(expected))):
        _, found, rest = rest.partition(part)
        if not found:
            return part
    return None


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with what the pages' commands name: modules of one's own, an archive."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    shutil.copy(ROOT / "examples" / "faults.py", tmp_path)
    for split in ("train", "test"):
        for i in range(12):
            path = tmp_path / "cifar10-jpg" / split / ("cat", "dog")[i % 2] / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (20 * i, 80, 200 - 10 * i)).save(path)
    with tarfile.open(tmp_path / "cifar10-jpg.tar.xz", "w:xz") as archive:
        for split in ("train", "test"):
            archive.add(tmp_path / "cifar10-jpg" / split, split)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    before, threads = set(sys.modules), torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {
            path.partition("/")[0].removesuffix(".py") for path in (*FILES, "faults.py")
        }:
            del sys.modules[name]


def jobs(page):
    """What a page has to run, in order: [(lines, the exit code of the last, what they print or None)]."""
    found = []
    for block in blocks(page, "sh", "text"):
        mark = block["mark"] or ""
        if block["kind"] == "text":
            if mark == "prints":
                assert found, f"{page.name}: nothing ran before {block['text'][:60]!r}"
                found[-1] = (*found[-1][:2], block["text"])
            continue
        if mark.startswith("not run"):
            assert re.fullmatch(r"not run: \w.*", mark), f"{page.name}: say why: {mark!r}"
            continue
        code = re.fullmatch(r"exit (\d+)", mark)
        assert mark == "" or code, f"{page.name}: unknown mark {mark!r}"
        lines = [line for line in lines_of(block) if shlex.split(line, comments=True)]
        found.append((lines, int(code[1]) if code else 0, None))
    return found


def make_runs(lines):
    """Make runs/first and runs/second if a page looks at them and does not make them itself."""
    for name in ("runs/first", "runs/second"):
        looking = [line for line in lines if name in line]
        if looking and not looking[0].startswith("evenstep train"):
            run(f"evenstep train --smoke-test --run-dir {name} --quiet")


def trainings():
    """The trainings of all pages that stand alone, in as few runs as may be."""
    lines = [
        line
        for page in IDS["argvalues"]
        for lines, code, text in jobs(page)
        if not (code or text)
        for line in lines
    ]
    return merged([words for line in lines if is_plain(words := shlex.split(line, comments=True))])


@pytest.mark.slow
@pytest.mark.parametrize("words", trainings(), ids=range(len(trainings())))
def test_the_trainings_run(words, directory):
    run(shlex.join(words_of(flags_of(words) | {"--steps": ["2"]})))


@pytest.mark.slow
@pytest.mark.parametrize("page", **IDS)
def test_the_other_commands_run(page, directory):
    """Those of a page in order, without the trainings above."""
    todo = jobs(page)
    make_runs([line for lines, _, _ in todo for line in lines])
    for lines, code, expected in todo:
        if expected is None and code == 0:
            lines = [line for line in lines if not is_plain(shlex.split(line, comments=True))]
        printed = "".join(run(line, code if line is lines[-1] else 0) for line in lines)
        part = lacking(expected, printed) if expected else None
        assert part is None, f"{page.name}: not printed: {part!r}, but\n{printed}"


@pytest.mark.parametrize("page", **IDS)
def test_the_python_runs(page, directory):
    """What replaces a piece of a hand-written script runs; the old piece begins "# by hand", and does not."""
    model = torch.nn.Linear(2, 2)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": torch.utils.data.TensorDataset(torch.randn(128, 2), torch.zeros(128, dtype=torch.long)),
        "loss": lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    }
    exec("import torch\nimport evenstep", names)
    for block in blocks(page, "python"):
        mark = block["mark"] or ""
        if mark.startswith(("file: ", "runs: ")) or block["text"].startswith("# by hand"):
            continue  # test_docs.py and test_examples.py look after these
        if re.fullmatch(r"not run: \w.*", mark):
            continue
        assert mark == "", f"{page.name}: unknown mark {mark!r}"
        exec(block["text"], names)


def test_files_of_examples_are_run_by_tests():
    shown = {
        block["mark"].removeprefix("file: ")
        for page in IDS["argvalues"]
        for block in blocks(page, "python")
        if (block["mark"] or "").startswith("file: ")
    }
    tests = "".join(
        path.read_text() for path in (ROOT / "tests").glob("test_*.py") if path.name != "test_docs.py"
    )
    assert not [path for path in shown if path.rpartition("/")[2] not in tests]


def test_a_text_that_is_not_printed_is_found():
    printed = "evenstep: error: batch_size 4 is smaller\nthan lanes 8: see /a/b"
    assert lacking("batch_size 2 is smaller than lanes 16:", printed) is None
    assert lacking("error: ... than lanes 8", printed) is None
    assert lacking("than lanes 8 ... batch_size", printed) == "batch_size"
    assert lacking("batch_size 4 is larger", printed) == "batch_size 0 is larger"
