"""Prompts over schemas: the paper's uses in our own words (Prompt Cache 5.6), and documents of data
sets as modules.

The uses lie as PML beside the data sets that come along. A document's case is made as the
benchmarks' other prompts are worded; its passages are modules, its question is new text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from ragfuse_bench.options import USES
from ragfuse_bench.quality.cases import Packing, read_cases
from ragfuse_bench.quality.run import drawn

from ragfuse.calibration.case import NEW_TOKENS, PROMPT_TEXTS, Case, Task
from ragfuse.schemas.nodes import (
    Import,
    Item,
    Module,
    PMLPrompt,
    Role,
    Schema,
    TextNode,
)
from ragfuse.schemas.pml import NO_TEXT, parse_prompt, parse_schema

USE_TOKENS = 64


@dataclass(frozen=True)
class ModuleCase:
    """A prompt over a schema. answers: the known ones, () where there are none; dataset: "" for a
    use of our own.
    """

    name: str
    schema: Schema
    request: PMLPrompt
    answers: tuple[str, ...] = ()
    task: Task = "answer"
    max_tokens: int = USE_TOKENS
    dataset: str = ""


def uses(names: Sequence[str] = USES) -> list[ModuleCase]:
    """The uses of these names."""
    return [_use(name) for name in names]


def _use(name: str) -> ModuleCase:
    folder = files("ragfuse_bench") / "sets"
    schema, prompt = (f"pml_{name}{end}.xml" for end in ("", "_ask"))
    read = [(folder / file).read_text("utf-8") for file in (schema, prompt)]
    return ModuleCase(name, parse_schema(read[0], schema), parse_prompt(read[1], prompt))


def documents(names: Sequence[str], limit: int, packing: Packing) -> Iterator[ModuleCase]:
    """At most `limit` questions (0: all) of each data set, drawn from a seed, with their passages
    as modules.
    """
    for name in names:
        yield from (of_documents(case) for case in drawn(read_cases(name, packing), limit))


def of_documents(case: Case) -> ModuleCase:
    """A case whose chunks are modules of one message; what is asked stands behind the last one, in
    that message.
    """
    before, after = (_plain(text) for text in PROMPT_TEXTS[case.task])
    asked = f"{case.question}\n\n" if case.task == "summary" and case.question else case.question
    modules = [
        Module(f"document-{number}", (TextNode(_plain(text)),))
        for number, text in enumerate(case.chunks, 1)
    ]
    items: list[Item] = [TextNode(before)]
    for number, module in enumerate(modules):
        items += [TextNode("\n\n"), module] if number else [module]
    name = f"{case.dataset}-{case.id}"
    imports = [Import(module.name) for module in modules]
    request = PMLPrompt(name, (*imports, TextNode(after.replace("{question}", _plain(asked)))))
    schema = Schema(name, (Role("user", tuple(items)),))
    return ModuleCase(
        name, schema, request, case.answers, case.task, NEW_TOKENS[case.task], case.dataset
    )


def long_schema(name: str, modules: Sequence[str]) -> Schema:
    """A schema of these texts as modules of one message."""
    items: list[Item] = [TextNode("Read these notes.\n\n")]
    for number, text in enumerate(modules, 1):
        items += [Module(f"notes-{number}", (TextNode(_plain(text)),)), TextNode("\n\n")]
    return Schema(name, (Role("user", tuple(items)),))


def over_all(schema: Schema, modules: int, question: str) -> PMLPrompt:
    """A prompt that imports the first so many modules of a `long_schema` and asks in a message of
    its own.
    """
    imports = [Import(f"notes-{number}") for number in range(1, modules + 1)]
    return PMLPrompt(schema.name, (*imports, Role("user", (TextNode(question),))))


def _plain(text: str) -> str:
    """Without what XML cannot hold."""
    return NO_TEXT.sub("", text)
