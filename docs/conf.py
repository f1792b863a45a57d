"""The site of these pages, for Sphinx: ``make site`` builds it into site/ and takes a warning for an error.

The reference comes from the docstrings. Links to files beside docs (examples, benchmarks) become downloads.
The finished site is searched for anything that a browser would load from the network.
"""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

project = "evenstep"
author = "the evenstep authors"
release = version = "0.1.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["**/*.py"]

html_theme = "furo"
html_title = "evenstep"
html_copy_source = False
html_show_sphinx = False

# The anchors of headings, as GitHub makes them.
myst_heading_anchors = 4

autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Where HTML makes a browser load something by itself; a link that a reader may follow is none of these.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
HARMLESS = {"canonical", "prev", "next", "alternate"}


class Loads(HTMLParser):
    """Collects what a browser would load from elsewhere to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an address with a host."""
        given = dict(attrs)
        address = given.get(LOADING.get(tag, ""), "") or ""
        kinds = set((given.get("rel") or "").split())
        if re.match(r"(https?:)?//", address) and not kinds & HARMLESS:
            self.found.append(address)


def loads_from_elsewhere(site: Path) -> list[str]:
    """Return what the pages and styles of a site would load from the network, as ``page: address``."""
    found = []
    for path in sorted(site.rglob("*.html")):
        parser = Loads()
        parser.feed(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: {address}" for address in parser.found]
    for path in sorted(site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        addresses = re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", text)
        found += [f"{path.relative_to(site)}: {address}" for address in addresses]
    return found


def check(app: Sphinx, problem: Exception | None) -> None:
    """Refuse a site that would load something from the network."""
    found = loads_from_elsewhere(Path(app.outdir)) if problem is None else []
    if found:
        raise SphinxError("the site would load from the network: " + "; ".join(found))


def offer(app: Sphinx, page: str, source: list[str]) -> None:
    """Make links to Markdown beside docs downloads, as Sphinx makes those to other files by itself."""
    ups = "../" * (page.count("/") + 1)
    link = rf"\[([^\]]+)\]\(({re.escape(ups)}[\w./-]+\.md)\)"
    source[0] = re.sub(
        link, lambda found: f"{{download}}`{found[1].replace('`', '')} <{found[2]}>`", source[0]
    )


def shorten(app: Sphinx, what: str, name: str, value: Any, *_: Any) -> tuple[str, None] | None:
    """Leave out the signature of a class with many fields: they are listed below it, each with its text."""
    is_long = what == "class" and dataclasses.is_dataclass(value) and len(dataclasses.fields(value)) > 8
    return ("", None) if is_long else None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    texts: dict[str, list[str]] = {}

    def keep(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        if what in ("attribute", "data", "property"):
            texts[name] = list(lines)

    def put_back(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        lines[:] = texts.pop(name, lines)

    # Napoleon, in between, takes what stands before a colon for the type of an attribute.
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", put_back, priority=600)
    app.connect("autodoc-process-signature", shorten)
    app.connect("source-read", offer)
    app.connect("build-finished", check)
