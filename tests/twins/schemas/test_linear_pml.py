"""PML is read, laid out and bound in work that grows with its text alone, whatever is written
there.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest

from ragfuse.errors import PMLError
from ragfuse.schemas.bind import bind
from ragfuse.schemas.layout import lay_out
from ragfuse.schemas.pml import parse_prompt, parse_schema
from tests.kits.layouts import key_of
from tests.kits.operations import MOST_GROWTH, lines

SCHEMAS: dict[str, Callable[[int], str]] = {
    "modules": lambda n: "".join(f'<module name="m{i}">text</module>' for i in range(n)),
    "modules in a union": lambda n: (
        "<union>" + "".join(f'<module name="m{i}">t</module>' for i in range(n)) + "</union>"
    ),
    "parameters": lambda n: "".join(f'a<parameter name="p{i}" len="2"/>' for i in range(n)),
    "texts between comments": lambda n: "a<!-- b -->" * n,
}


@pytest.mark.parametrize("make", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_schema_is_read_and_laid_out_in_linear_work(make):
    def work(n: int) -> int:
        text = f'<schema name="s">{make(n)}a</schema>'
        return lines(lambda: lay_out(parse_schema(text), encode, 0))

    assert work(800) <= MOST_GROWTH * work(100)


PROMPTS: dict[str, Callable[[int], str]] = {
    "imports and texts": lambda n: "".join(f"<m{i}/>text " for i in range(n)),
    "arguments": lambda n: "".join(f'<m{i} p="a"/>' for i in range(n)),
    "one module again and again": lambda n: "<m0/>" * n,
    "unknown modules": lambda n: "".join(f"<x{i}/>" for i in range(n)),
    "elements that never end": lambda n: "<m0>" * n,
}


@pytest.mark.parametrize("make", PROMPTS.values(), ids=PROMPTS.keys())
def test_a_prompt_is_read_and_bound_in_linear_work(make):
    def work(n: int) -> int:
        modules = "".join(
            f'<module name="m{i}">text<parameter name="p" len="2"/></module>' for i in range(n)
        )
        layout = lay_out(parse_schema(f'<schema name="s">{modules}</schema>'), encode, 0)
        text = f'<prompt schema="s">{make(n)}</prompt>'

        def ask() -> None:
            with suppress(PMLError):
                bind(parse_prompt(text), layout, encode, key_of)

        return lines(ask)

    assert work(800) <= MOST_GROWTH * work(100)


def encode(text: str, special: bool = False) -> list[int]:
    return [1] * (len(text) // 4 + 1)
