"""Whether every internal link of the built book leads somewhere: `python -m docs.check
docs/_build/html`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src"}


class Page(HTMLParser):
    """What one page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every tag."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in LINKS and LINKS[tag] in given:
            self.links.append(given[LINKS[tag]])


def broken(folder: Path) -> Iterator[tuple[str, str]]:
    """(page, link) of every link that leads nowhere."""
    pages = {
        path.resolve(): Page(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.html"))
    }
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = target.is_file() or (target / "index.html").is_file()
            anchors = pages[target].anchors if target in pages else None
            if not found or (
                parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors
            ):
                yield path.relative_to(folder.resolve()).as_posix(), link


if __name__ == "__main__":
    wrong = list(broken(Path(sys.argv[1])))
    for page, link in wrong:
        print(f"{page}: {link} leads nowhere")
    sys.exit(1 if wrong else 0)
