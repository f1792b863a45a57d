"""What the README and the pages in docs say is true of this version."""

import ast
import difflib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from evenstep import cli, options
from evenstep.bench import command as bench
from evenstep.errors import CheckpointError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
IDS = {"argvalues": PAGES, "ids": lambda page: page.name}


def blocks(page, *kinds):
    return [match for match in FENCE.finditer(page.read_text()) if match["kind"] in kinds]


def lines_of(block):
    """The command lines of a block, with those that go on after a backslash in one piece."""
    return re.sub(r"\\\n\s*", "", block["text"]).splitlines()


def command_lines():
    """Every ``evenstep ...`` of the pages that is meant to be right: (page, words)."""
    for page in PAGES:
        right = [block for block in blocks(page, "sh") if not (block["mark"] or "").startswith("exit 2")]
        lines = [line for block in right for line in lines_of(block)]
        text = FENCE.sub("", page.read_text())
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
        for line in lines:
            if "evenstep" not in line:  # other code, which need not be a command
                continue
            words = shlex.split(line, comments=True)
            if words[:1] == ["torchrun"] and "evenstep" in words:
                words = words[words.index("evenstep") :]
            if words[:1] == ["evenstep"] and len(words) > 1:
                yield page.name, words[1:]


def anchors(page):
    """What a link may name in a page: its headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.*?)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "examples").rglob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            missing.append(link)
    assert not missing


def test_every_page_is_in_the_navigation_of_the_site():
    text = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", text, re.M | re.S)
    shown = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    docs = ROOT / "docs"
    there = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    assert len(shown) == len(set(shown))
    assert {*shown, "index"} == there, "put each page of docs into a toctree of docs/index.md"


@pytest.mark.parametrize("page", **IDS)
def test_python_is_python_and_copies_are_equal(page):
    for block in blocks(page, "python"):
        ast.parse(block["text"])
        kind, _, path = (block["mark"] or "").partition(": ")
        if kind == "file":
            assert block["text"] == (page.parent / path).read_text(), f"{page.name} and {path} differ"
    for block in blocks(page, "diff"):
        old, new = ((page.parent / path) for path in block["mark"].removeprefix("diff: ").split())
        lines = difflib.unified_diff(
            old.read_text().splitlines(),
            new.read_text().splitlines(),
            old.name,
            new.name,
            lineterm="",
            n=2,
        )
        assert block["text"].splitlines() == list(lines), f"{page.name}: the diff is out of date"


def test_the_pages_show_the_examples_and_six_new_lines():
    marks = {block["mark"] for page in PAGES for block in blocks(page, "python", "diff")}
    assert "file: examples/own_loop.py" in marks
    assert "file: ../examples/talk.py" in marks
    (diff,) = blocks(ROOT / "docs" / "quickstart.md", "diff")
    added = [line for line in diff["text"].splitlines() if re.match(r"\+(?!\+\+)\s*\S", line)]
    assert len(added) == 6
    assert "+import evenstep" in added


@pytest.mark.parametrize(
    ("page", "words"), [pytest.param(*found, id=" ".join(found[1])) for found in command_lines()]
)
def test_command_lines_are_right(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    command, flags = words[0], words[1:]
    assert command in (*cli.COMMANDS, "--help", "--version"), page
    if "--help" in flags:
        return
    if command == "eval":
        options.parse_eval(flags)
    elif command == "config":
        assert flags[0] == "show"
        options.parse([word for word in flags[1:] if word != "--toml"])
    elif command == "train" and "--resume" in flags:
        with pytest.raises(CheckpointError):  # every flag is right, and there is nothing to resume
            options.parse(flags)
    elif command == "train":
        options.parse(flags)
    elif command == "bench":
        bench.parse(flags)


def test_what_is_generated_is_up_to_date():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    # Words only: another version of tyro may draw other lines and break them elsewhere.
    written = re.findall(r"[\w-]{2,}", (ROOT / "docs" / "cli.md").read_text())
    assert written == re.findall(r"[\w-]{2,}", generate["cli_page"]()), "run make docs"
    text = (ROOT / "README.md").read_text()
    assert generate["readme"](text) == text, "run make docs"


def test_a_new_module_gets_a_line_in_the_readme_and_a_removed_one_loses_it():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    text = (ROOT / "README.md").read_text()
    changed = re.sub(r"  step\.py .*\n", "  gone.py            a module of yesterday\n", text)
    again = generate["readme"](changed)
    assert "gone.py" not in again
    assert re.search(r"^  step\.py +the training step: the one function", again, re.M)


def test_the_lines_of_the_tree_are_short_and_alike():
    tree = re.search(r"```text\nsrc/evenstep/\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    roles = dict(line.split(maxsplit=1) for line in tree.splitlines())
    assert [name for name, role in roles.items() if len(role) >= 70] == []
    assert [name for name, role in roles.items() if re.match(r"[A-Z][a-z]*\b", role)] == []


def test_every_row_has_its_section():
    text = (ROOT / "docs" / "from-a-ddp-script.md").read_text()
    assert [int(number) for number in re.findall(r"^## (\d+)\. ", text, re.M)] == list(range(1, 25))
