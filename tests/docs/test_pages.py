"""The pages of the book hold what is there: links, names of functions and tests, pictures,
tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import made, matrix
from docs._ext import book_files
from docs.pictures import draw
from tests.docs.blocks import PAGES, ROOT

LINK = re.compile(r"(?<!\\)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def links(page: str) -> list[tuple[str, str]]:
    text = FENCED.sub("", PAGES[page].read_text(encoding="utf-8"))
    return [
        (name, target) for name, target in LINK.findall(text) if not re.match(r"[a-z]+:", target)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_heading(page: str) -> None:
    for name, target in links(page):
        place, _, anchor = target.partition("#")
        path = (PAGES[page].parent / place).resolve() if place else PAGES[page]
        assert path.exists(), f"{page}: [{name}]({target})"
        assert path.is_relative_to(ROOT), f"{page}: [{name}]({target})"
        if anchor:
            assert anchor in anchors(path), f"{page}: [{name}]({target})"


def anchors(path: Path) -> list[str]:
    """Of every heading, as git hosts make them."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


NAMED = [
    (page, name.strip("`"), (PAGES[page].parent / target).resolve())
    for page in PAGES
    for name, target in links(page)
    if name.startswith("`") and target.endswith(".py")
]


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _, _ in NAMED))
def test_every_function_and_test_that_is_named_is_there(page: str) -> None:
    gone = [
        f"{name} in {path.name}"
        for of, name, path in NAMED
        if of == page and not book_files.line_of(path, name)
    ]
    assert gone == []


# pictures


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_committed_picture_is_what_the_code_draws(name: str) -> None:
    assert (draw.HERE / f"{name}.svg").read_text(encoding="utf-8") == draw.PICTURES[name]().svg()


def test_pictures_follow_the_themes_of_the_book() -> None:
    css = "".join((ROOT / "docs" / "_static" / "book.css").read_text(encoding="utf-8").split())
    for which, theme in enumerate(("light", "dark")):
        assert f'body[data-theme="{theme}"]svg.rf{{{draw.style(which)}}}' in css


# what is read from the code


@pytest.mark.parametrize("page", made.PAGES, ids=lambda page: page.stem)
def test_pages_of_the_repository_have_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == made.whole(page), (
        "Write them anew: python -m docs.made"
    )


# the table of families


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma2-softcap-window", marks=pytest.mark.slow),
        "smollm3-some-nope",
        "gpt2",
        "llama-dynamic",
        "jamba",
    ],
)
def test_a_familys_row_is_what_comes_out(name: str) -> None:
    assert matrix.row(name) in matrix.PAGE.read_text(encoding="utf-8").splitlines()


def test_every_family_has_a_row() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| `", matrix.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*matrix.FAMILIES, *matrix.REFUSED, *matrix.HYBRIDS]
    assert matrix.PAGE.read_text(encoding="utf-8").startswith(matrix.HEAD)


# internal links
