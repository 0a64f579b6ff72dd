"""The code blocks of the documentation, and the marks that stand before them.

`<!-- first: CODE -->` is run before a block and not shown. `<!-- needs: NAME -->` lets a block wait
for public names that are not there yet. `<!-- not run: REASON -->` leaves it out. `<!-- printed
-->` stands before what the program above it prints; `pytest -m slow tests/docs/test_blocks.py
--rewrite` writes that anew.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BOOK = sorted(
    path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "made"} & set(path.parts)
)
READMES = [
    ROOT / "README.md",
    *sorted((ROOT / "integrations").glob("*/README.md")),
    ROOT / "training" / "README.md",
]
PAGES = MappingProxyType({path.relative_to(ROOT).as_posix(): path for path in [*BOOK, *READMES]})
FENCE = re.compile(
    r"((?:<!-- (?:(?:first|needs|not run):.*?|printed )-->\s*)*)^( *)```(\w*)\n(.*?)^\2```$",
    re.MULTILINE | re.DOTALL,
)
HAYSTACK = "haystack_integrations.components.generators.ragfuse"
OURS = ("ragfuse", "langchain_ragfuse", "llama_index.llms.ragfuse", HAYSTACK)
PRINTED = "<!-- printed -->"
MARK = re.compile(r"<!-- (first|needs|not run):(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, line, language, code, and what its marks say."""

    page: str
    line: int
    language: str
    code: str
    first: str = ""
    needs: tuple[str, ...] = ()
    not_run: str = ""
    printed: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that it waits for."""
        return tuple(name for name in self.needs if not is_there(name))


def blocks(page: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = PAGES[page].read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        marks = dict(MARK.findall(match[1]))
        line = text.count("\n", 0, match.start(3)) + 1
        code = re.sub(rf"^{match[2]}", "", match[4], flags=re.MULTILINE)
        needs = tuple(marks.get("needs", "").split())
        first, not_run = marks.get("first", "").strip(), marks.get("not run", "").strip()
        yield Block(page, line, match[3], code, first, needs, not_run, PRINTED in match[1])


def rewrite(block: Block, printed: str) -> None:
    """Let a block say what its program prints; the blocks behind it move."""
    lines = PAGES[block.page].read_text(encoding="utf-8").splitlines(keepends=True)
    stop = block.line + block.code.count("\n")
    lines[block.line : stop] = [printed]
    PAGES[block.page].write_text("".join(lines), encoding="utf-8")


def is_there(name: str) -> bool:
    """Whether a public name exists: of ragfuse, or of a package that is named."""
    package = next((ours for ours in OURS if name.startswith(f"{ours}.")), "")
    found: Any = import_module(package or "ragfuse")
    name = name.removeprefix(f"{package}.")
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def commands(page: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of every shell command of a page, comments left out; assignments stand
    first.
    """
    for block in blocks(page):
        if block.language in ("", "bash") and not block.not_run:
            joined = block.code.replace("\\\n", " ")
            for number, line in enumerate(joined.splitlines()):
                if line.startswith(("ragfuse ", "RAGFUSE_", "export ", "pip ", "make ")):
                    yield block.line + number + 1, shlex.split(line, comments=True)
