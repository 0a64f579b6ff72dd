"""What the documentation tells people to type works: programs run, commands parse, packages have
their names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from docs._ext.book_reference import root
from ragfuse import Settings
from tests.docs.blocks import OURS, PAGES, ROOT, Block, blocks, commands, is_there, rewrite
from tests.kits.tiny import CHUNKS

PYTHON = {
    page: found for page in PAGES if (found := [b for b in blocks(page) if b.language == "python"])
}
SHELL = {page: found for page in PAGES if (found := list(commands(page)))}
TARGETS = re.findall(
    r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
)
HUB = re.compile(r'"Qwen/[\w.-]+"')


@pytest.fixture
def settings_of_docs(
    varied_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """What a program that sets nothing gets: the tiny model, an empty store, short answers."""
    given = {
        "model": varied_path,
        "dtype": "float32",
        "store": tmp_path / "store",
        "home": tmp_path,
        "max_tokens": 8,
    }
    for name, value in given.items():
        monkeypatch.setenv(f"RAGFUSE_{name.upper()}", str(value))
    monkeypatch.chdir(tmp_path)
    from llama_index.core import Settings as Global

    before = Global._embed_model, Global._llm
    yield monkeypatch
    Global._embed_model, Global._llm = before


def is_program(block: Block) -> bool:
    """A README of a sibling shows lines out of their surroundings; such a block is run if it says
    what stands first.
    """
    return not block.not_run and (not block.page.startswith("integrations/") or bool(block.first))


RUN = [
    page for page, found in PYTHON.items() if page != "README.md" and any(map(is_program, found))
]
"""The pages whose programs run; `python -m docs.readme --check` runs the README's on the embedded
model.
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_programs_of_a_page_run_and_print_what_it_says(
    page: str,
    settings_of_docs: pytest.MonkeyPatch,
    varied_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "TEXTS": list(CHUNKS)}
    said, wrong = "", list[tuple[Block, str]]()
    for block in blocks(page):
        if block.printed and block.code != said:
            wrong.append((block, said))
        if block.language == "python":
            runs = is_program(block) and not block.missing
            said = run(block, names, varied_path) if runs else ""
    if request.config.getoption("--rewrite", default=False):
        for block, said in reversed(wrong):
            rewrite(block, said)
    for block, said in wrong:
        assert block.code == said, f"{page}:{block.line}: write it anew with --rewrite"


def run(block: Block, names: dict[str, Any], model: Path) -> str:
    """What a program prints, over the names that those before it left."""
    with redirect_stdout(StringIO()) as out:
        for code in (block.first, block.code):
            code = HUB.sub(repr(str(model)), code)
            exec(compile("\n" * block.line + code, block.page, "exec"), names)
    return out.getvalue()


@pytest.mark.parametrize("page", PYTHON)
def test_every_block_is_python_and_imports_what_there_is(page: str) -> None:
    for block in PYTHON[page]:
        assert not (block.not_run and block.needs), (
            f"{page}:{block.line} is left out and waits as well"
        )
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and node.module in OURS and not block.missing:
                wrong = [
                    alias.name
                    for alias in node.names
                    if not is_there(f"{node.module}.{alias.name}")
                ]
                assert not wrong, f"{page}:{block.line} imports {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL)
def test_every_command_is_understood(page: str) -> None:
    for line, words in SHELL[page]:
        words = words[1:] if words[0] == "export" else words
        while words and re.match(r"[A-Z_]+=", words[0]):
            name = words.pop(0).partition("=")[0]
            setting = name.removeprefix("RAGFUSE_").lower()
            assert not name.startswith("RAGFUSE_") or setting in Settings.model_fields, (
                f"{page}:{line}: {name}"
            )
        if words and words[0] == "ragfuse":
            understood(words[1:], f"{page}:{line}")
        elif words and words[0] == "make":
            wanted = [word for word in words[1:] if "=" not in word]
            assert set(wanted) <= set(TARGETS), f"{page}:{line}: make {wanted}"


def understood(words: list[str], where: str) -> None:
    """The command is there and takes these words."""
    command, path = root(), ["ragfuse"]
    while hasattr(command, "commands"):
        if words[0].startswith("--"):
            break
        assert words[0] in command.commands, f"{where}: no command {words[0]}"
        path.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context(" ".join(path), list(words))
    except Exception as error:
        raise AssertionError(f"{where}: {' '.join(path)} does not take {words}: {error}") from error


def test_every_command_named_in_prose_is_there() -> None:
    named = re.compile(r"`ragfuse ([a-z][^`]*)`((?:,?\s(?:(?:and|or)\s)?`[a-z]+`)*)")
    fenced = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    ours = root()
    wrong = [
        (page, text, others)
        for page, path in PAGES.items()
        for text, others in named.findall(fenced.sub("", path.read_text(encoding="utf-8")))
        if absent(ours, text.split(), re.findall(r"`(\w+)`", others))
    ]
    assert wrong == []


def absent(command: Any, words: list[str], others: list[str]) -> list[str]:
    """What is none of: commands, their options, and further commands of the same group."""
    ours = group = command
    while words and words[0] in getattr(command, "commands", {}):
        group, command = command, command.commands[words[0]]
        words = words[1:]
    has = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    gone = [word for word in words if word.startswith("--") and word not in has]
    if hasattr(command, "commands"):
        return gone + words[:1]
    return gone + [name for name in others if group is not ours and name not in group.commands]


def test_nobody_is_told_to_install_a_strangers_package() -> None:
    strange = re.compile(r"pip3? install[^`\n]*(?<![\w-])ragfuse(?![\w-])")
    assert strange.search("pip install -U ragfuse")
    assert strange.search("pip install 'ragfuse[redis]'")
    assert not strange.search("pip install 'ragfuse-kv[redis]' langchain-ragfuse")
    assert [
        page for page, path in PAGES.items() if strange.search(path.read_text(encoding="utf-8"))
    ] == []
