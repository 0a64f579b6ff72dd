"""Write the tables of settings and commands into their pages: `python -m docs.made`.

The repository has the pages as they are read, so that they are complete in a clone, too; a test
holds them against the code.
"""

from __future__ import annotations

from pathlib import Path

from docs._ext.book_reference import MARKS

PAGES = tuple(Path(__file__).resolve().parent / f"{name}.md" for name in MARKS)


def whole(page: Path) -> str:
    """Return a page with what is made for it behind its mark."""
    text = page.read_text(encoding="utf-8")
    mark = f"<!-- made: {page.stem} -->\n"
    head, found, _ = text.partition(mark)
    if not found:
        raise ValueError(
            f"{page.name} has no line {mark.strip()!r}; put it where the table belongs."
        )
    return f"{head}{mark}\n{MARKS[page.stem]().strip()}\n"


def main() -> None:
    """Write both pages."""
    for page in PAGES:
        page.write_text(whole(page), encoding="utf-8")
        print(f"Written: {page.name}")


if __name__ == "__main__":
    main()
