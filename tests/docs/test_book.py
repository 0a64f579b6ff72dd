"""The book builds without a warning, every internal link of it leads somewhere, and every public
name has its entry.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

from docs._ext.book_reference import PACKAGES
from docs.check import Page, broken
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow

SIBLINGS = ("langchain-ragfuse", "llama-index-llms-ragfuse", "haystack-ragfuse")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HTML, built as `make docs` does it."""
    out = tmp_path_factory.mktemp("book")
    siblings = [str(ROOT / "integrations" / name) for name in SIBLINGS]
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "sphinx", "-b", "html", "-E", "-q", "-W", "--keep-going", "-n", "docs"],
            str(out),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *siblings])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_internal_link_leads_somewhere(book: Path) -> None:
    assert list(broken(book)) == []
    assert len(list(book.rglob("*.html"))) > 50


def test_every_public_name_has_its_entry_and_page(book: Path) -> None:
    found = InventoryFile.loads((book / "objects.inv").read_bytes(), uri="").data
    names = {
        name: item.uri
        for kind, items in found.items()
        if kind.startswith("py:")
        for name, item in items.items()
    }
    for package in PACKAGES:
        for name in import_module(package).__all__:
            page = names[f"{package}.{name}"].partition("#")[0]
            assert page == f"api/made/{package}.{name}.html"


def test_a_link_to_a_function_leads_to_its_line(book: Path) -> None:
    page = Page((book / "papers" / "cacheblend.html").read_text(encoding="utf-8"))
    target = next(link for link in page.links if "fusor.py.html#L" in link)
    assert (
        target.rpartition("#")[2]
        in Page((book / "papers" / target.partition("#")[0]).read_text("utf-8")).anchors
    )
