"""The parts of the book that are read from the code: settings, commands, a page for every public
name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon.docstring import GoogleDocstring

HAYSTACK = "haystack_integrations.components.generators.ragfuse"
PACKAGES = ("ragfuse", "langchain_ragfuse", "llama_index.llms.ragfuse", HAYSTACK)
MADE = Path(__file__).resolve().parents[1] / "api" / "made"
PYDANTIC = "model_config, model_fields, model_computed_fields, model_post_init"


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", lambda app: write_pages(MADE))
    app.connect("missing-reference", resolve)
    app.connect("doctree-read", lambda app, page: draw_dashes(page))
    for name, whole in {
        "_consume_inline_attribute": _whole_attribute,
        "_consume_returns_section": _whole_returns,
    }.items():
        setattr(GoogleDocstring, name, whole)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def draw_dashes(page: nodes.document) -> None:
    """Sphinx puts two hyphens behind a parameter's name, for smart quotes to turn into a dash."""
    for text in [*page.findall(nodes.Text)]:
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def _whole_attribute(parser: Any) -> tuple[str, list[str]]:
    """The docstring of a field: types stand in the code, so what precedes a colon is none."""
    lines = parser._dedent(parser._consume_to_end())
    return "", parser.__class__(lines, parser._config).lines()


def _whole_returns(parser: Any, preprocess_types: bool = False) -> list[tuple[str, str, list[str]]]:
    """The same for a section "Returns"."""
    lines = parser._dedent(parser._consume_to_next_section())
    return [("", "", parser.__class__(lines, parser._config).lines())] if lines else []


# settings


def settings_table() -> str:
    """Every setting: its name, variable, type, default and what it means."""
    from ragfuse.settings import PREFIX, Settings

    lines = ["| setting | variable | default | what it is |", "| --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        description = _cell(field.description or "")
        lines.append(
            f"| `{name}` | `{PREFIX}{name.upper()}` | {_default(name, field)} | {description} |"
        )
    return "\n".join(lines)


def _default(name: str, field: Any) -> str:
    from ragfuse.types.sizes import capacity_text

    if name == "home":
        return "the user's cache folder"
    if name == "prices":
        return ", ".join(f"{kind} {price:g}" for kind, price in field.default.model_dump().items())
    value = field.get_default(call_default_factory=True)
    if name.endswith("_bytes") and isinstance(value, int):
        return capacity_text(value)
    if value in (None, "", ()):
        return "none"
    return f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


# commands


def commands() -> str:
    """Every command of the command line: how it is called, what it does, its arguments and
    options.
    """
    return "\n\n".join(_command(path, command) for path, command in walk(root()))


def root() -> Any:
    """The whole command line as one click command."""
    import typer.main

    from ragfuse.cli.main import app

    return typer.main.get_command(app)


def walk(group: Any, path: tuple[str, ...] = ("ragfuse",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a group, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, (*path, name))
        elif not command.hidden:
            yield (*path, name), command


def _command(path: tuple[str, ...], command: Any) -> str:
    words = " ".join(path)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = " ".join([words, *(["[OPTIONS]"] if options else []), *map(_metavar, arguments)])
    parts = [f"## {words}", _prose(command.help or ""), f"```text\n{usage}\n```"]
    rows = [(f"`{_metavar(one)}`", _prose(one.help or ""), "") for one in arguments]
    rows += [(_flags(one), _prose(one.help or ""), _shown(one)) for one in options]
    if rows:
        table = [
            "| | | default |",
            "| --- | --- | --- |",
            *(f"| {a} | {_bar(b)} | {c} |" for a, b, c in rows),
        ]
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def _metavar(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def _flags(option: Any) -> str:
    return ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))


def _shown(option: Any) -> str:
    return "; ".join(part for part in (_unset(option), _range(option)) if part)


def _unset(option: Any) -> str:
    if isinstance(option.show_default, str):
        return _prose(option.show_default)
    value = option.default
    if value in (None, "", False, (), []) or callable(value):
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(f"`{each}`" for each in values)


def _range(option: Any) -> str:
    least, most = option.min, option.max
    if least is not None and most is not None:
        return f"from {least:g} to {most:g}"
    return (
        f"at least {least:g}"
        if least is not None
        else f"at most {most:g}"
        if most is not None
        else ""
    )


def _prose(text: str) -> str:
    """Escape Markdown's signs, but not those inside code, nor the backticks around it."""
    parts = re.split("(`[^`]*`)", " ".join(text.split()))
    return "".join(
        each if each[:1] == "`" else re.sub(r"([*<\[`])", r"\\\1", each) for each in parts
    )


def _bar(text: str) -> str:
    return text.replace("|", "\\|")


# public names


def public_names(package: str) -> list[str]:
    """What a package shows."""
    return list(import_module(package).__all__)


def write_pages(folder: Path) -> list[str]:
    """One page for every public name of the three packages; pages of names that are gone go too."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        f"{package}.{name}.md": _page(package, name)
        for package in PACKAGES
        for name in public_names(package)
    }
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return list(pages)


def _page(package: str, name: str) -> str:
    value = getattr(import_module(package), name)
    directive = _directive(value)
    lines = [f".. currentmodule:: {package}", "", f".. {directive}:: {name}"]
    if directive != "autofunction":
        lines += ["   :members:", f"   :exclude-members: {PYDANTIC}"]
    body = "\n".join(lines)
    return f"# {name}\n\n`from {package} import {name}`\n\n```{{eval-rst}}\n{body}\n```\n"


def _directive(value: Any) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, Exception) else "autoclass"
    return "autofunction" if callable(value) else "autodata"


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Link a public name to its page; signatures name it by the module that defines it. Other names
    have no page and no link.
    """
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    for package in PACKAGES:
        if name in public_names(package):
            domain = env.domains.python_domain
            full = f"{package}.{name}"
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, text)
    return text


MARKS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"settings": settings_table, "commands": commands}
)
"""What `python -m docs.made` writes, by the page that has it."""
