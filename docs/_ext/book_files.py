"""What the book takes from the repository around it: linked files as pages, notebooks, pictures as
part of the page.

A link to a file of the repository works where the text is read there; here it leads to a page that
shows the file, and a link whose words name a function or class of that file leads to its line.
Nothing is written outside the output but copies of the notebooks, which git ignores.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
FILES = "files"
PAGES = {"CONTRIBUTING.md": "contributing", "SECURITY.md": "security", "CHANGELOG.md": "changelog"}
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".yml": "yaml", ".lua": "lua"}
NAME = re.compile(r"`?([A-Za-z_][\w.]*)(?:\(\))?`?")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect(
        "builder-inited", lambda app: copy_notebooks(ROOT / "notebooks", DOCS / "notebooks")
    )
    app.connect("doctree-resolved", inline_pictures)
    app.connect("doctree-resolved", settle_links)
    app.connect("html-collect-pages", file_pages)
    app.add_transform(LinkToFile)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": False}


def copy_notebooks(source: Path, target: Path) -> list[str]:
    """Copies of all notebooks, whose links to files hold from there; the names of those that are
    there now.
    """
    found = {path.name: path for path in sorted(source.glob("*.ipynb"))}
    for old in target.glob("*.ipynb"):
        if old.name not in found:
            old.unlink()
    for name, path in found.items():
        text = (
            path.read_text(encoding="utf-8")
            .replace("](../docs/", "](../")
            .replace("](../../", "](../../../")
        )
        if not (target / name).exists() or (target / name).read_text(encoding="utf-8") != text:
            (target / name).write_text(text, encoding="utf-8")
    return list(found)


def line_of(path: Path, name: str) -> int:
    """The line on which a function or class (`Fusion.choose`) of a Python file begins; 0 where
    there is none.
    """
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 0
    for part in name.split("."):
        node = next((node for node in body if _named(node) == part), None)
        if node is None:
            return 0
        line, body = node.lineno, getattr(node, "body", [])
    return line


def _named(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign):
        return next((target.id for target in node.targets if isinstance(target, ast.Name)), "")
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", "")


class LinkToFile(SphinxTransform):
    """Links to files and folders of the repository, which would be downloads, lead to pages that
    show them.
    """

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """Once for every page."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for node in list(self.document.findall(addnodes.download_reference)):
            path = (here / node["reftarget"]).resolve()
            if node["reftarget"].startswith("/"):
                path = (DOCS / node["reftarget"].lstrip("/")).resolve()
            if path.is_relative_to(ROOT) and path.suffix in LANGUAGES:
                node.replace_self(_reference(self.env, path, node))
        for node in list(self.document.findall(addnodes.pending_xref)):
            path = _outside(here, node)
            if path is not None:
                node.replace_self(_reference(self.env, path, node))


def _outside(here: Path, node: nodes.Element) -> Path | None:
    """The folder, or the text outside the book, that a link means; None where it means something
    else.
    """
    target = (here / node["reftarget"]).resolve()
    if not target.is_relative_to(ROOT) or node["reftype"] != "myst":
        return None
    text = target.with_name(f"{target.name}.md")
    if node.get("refdomain") == "doc" and text.is_file() and not text.is_relative_to(DOCS):
        return text
    return target if target.is_dir() else None


def settle_links(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Now that it is known where pages lie, links to files lead there."""
    for node in doctree.findall(nodes.reference):
        if "book_file" in node:
            page, _, anchor = node["book_file"].partition("#")
            del node["book_file"]
            node["refuri"] = app.builder.get_relative_uri(docname, page) + (anchor and f"#{anchor}")


def _reference(env: BuildEnvironment, path: Path, node: nodes.Element) -> nodes.reference:
    page, anchor = _page(env, path), ""
    name = NAME.fullmatch(node.astext())
    if name and path.suffix == ".py":
        line = line_of(path, name[1])
        anchor = f"#L{line}" if line else ""
    return nodes.reference("", "", *node.children, internal=True, book_file=page + anchor)


def _page(env: BuildEnvironment, path: Path) -> str:
    """The page of a file or folder; that of a file is made at the end."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if not hasattr(env, "book_files"):
        env.book_files = {}
    env.book_files[f"{FILES}/{name}"] = path
    return f"{FILES}/{name}"


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for every file and folder that a link leads to."""
    for page, path in sorted(getattr(app.env, "book_files", {}).items()):
        name = html.escape(path.relative_to(ROOT).as_posix())
        body = _listing(path) if path.is_dir() else _shown(app, path)
        yield page, {"title": name, "body": f"<h1>{name}</h1>\n{body}"}, "page.html"


def _listing(path: Path) -> str:
    names = sorted(f"{item.name}/" if item.is_dir() else item.name for item in path.iterdir())
    return (
        "<ul>" + "".join(f"<li><code>{html.escape(name)}</code></li>" for name in names) + "</ul>"
    )


def _shown(app: Sphinx, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    block = app.builder.highlighter.highlight_block(text, LANGUAGES[path.suffix], linenos=False)
    lines = block.split("\n")
    marked = [f'<span id="L{number}"></span>{line}' for number, line in enumerate(lines[:-1], 1)]
    if marked:  # the first line holds the opening tags
        before, tag, after = lines[0].partition("<pre>")
        marked[0] = f'{before}{tag}<span id="L1"></span>{after}'
    return "\n".join([*marked, *lines[-1:]])


def inline_pictures(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Our pictures become part of the page, so that they follow its light and dark."""
    if app.builder.format != "html":
        return
    for node in list(doctree.findall(nodes.image)):
        path = DOCS / node["uri"]
        if path.suffix == ".svg" and path.parent.name == "pictures":
            svg = path.read_text(encoding="utf-8")
            alt = html.escape(node.get("alt", ""), quote=True)
            svg = svg.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)
            node.replace_self(nodes.raw("", f'<div class="picture">{svg}</div>', format="html"))
