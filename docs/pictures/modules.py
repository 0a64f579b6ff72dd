"""The picture of a schema's positions, from the schema and the prompt that the guide begins
with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from zlib import crc32

from kit import HERE, Picture

from ragfuse.schemas.bind import bind
from ragfuse.schemas.layout import ModulePosition, SchemaLayout, Wrapping, lay_out
from ragfuse.schemas.pml import parse_prompt, parse_schema
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.prompt import Prompt

GUIDE = HERE.parent / "guides" / "pml.md"
LEFT, TOP, ROW, HIGH = 130, 84, 34, 26
NAMES = {"": "own text"}


def positions() -> Picture:
    """Where the modules of a schema stand, and what a prompt takes of them."""
    layout, bound = _example()
    places = list(_walk(layout.root))
    spans = [(segment.start, segment.stop) for segment in bound.segments]
    last = max(layout.n_positions, spans[-1][1])
    p = Picture(860, TOP + ROW * len(places) + 166)
    scale = (p.width - LEFT - 24) / last
    p.words(24, 34, "A schema says where everything may stand", 15, bold=True)
    p.words(
        24,
        58,
        "A token is a word here. The modules of a union begin at one position; it takes its longest"
        " one's room.",
        12,
        "soft",
    )
    for row, place in enumerate(places):
        y = TOP + row * ROW
        p.words(LEFT - 12, y + 18, NAMES.get(place.path, place.name), 12.5, at="end")
        p.line((LEFT, y + HIGH + 4), (LEFT + last * scale, y + HIGH + 4), fill="hint")
        for part in place.ranges:
            x, width = LEFT + part.start * scale, len(part.tokens) * scale - 1.5
            if part.param:
                p.box(x, y, width, HIGH, "", edge="soft")
                p.words(x + width / 2, y + 17, part.param, 11, "soft", at="middle")
            else:
                p.box(x, y, width, HIGH, "reused")
    y = TOP + ROW * len(places) + 34
    p.words(
        24,
        y - 14,
        "A prompt takes what it imports from there, and computes the rest",
        15,
        bold=True,
    )
    p.words(LEFT - 12, y + 24, "the prompt", 12.5, at="end")
    p.box(LEFT, y + 6, last * scale - 1.5, HIGH, "hint")
    for start, stop in spans:
        kind = next(each.kind for each in bound.segments if each.start == start)
        p.box(
            LEFT + start * scale,
            y + 6,
            (stop - start) * scale - 1.5,
            HIGH,
            "fresh" if kind == "fresh" else "reused",
        )
    p.legend(
        24,
        y + 66,
        ("reused", "encoded once, with the schema"),
        ("fresh", "new: computed"),
        ("hint", "empty positions"),
        gap=16,
    )
    p.words(
        24,
        y + 98,
        "What is not imported leaves its positions empty, and so does what an argument leaves of"
        " its room:",
        12,
        "soft",
    )
    p.words(
        24,
        y + 116,
        "nothing that was encoded moves, whichever modules a prompt takes and in whatever order it"
        " names them.",
        12,
        "soft",
    )
    return p


def _example() -> tuple[SchemaLayout, Prompt]:
    page = GUIDE.read_text(encoding="utf-8")
    schema, prompt = (
        re.search(rf"<{tag} .*?</{tag}>", page, re.DOTALL) for tag in ("schema", "prompt")
    )
    if schema is None or prompt is None:
        raise ValueError(f"{GUIDE.name} shows no schema or no prompt.")
    wrapping = Wrapping(("<s>", "</s>"), ("<s>", "</s>"), ("<s>", "</s>"), ask="<s>")
    layout = lay_out(parse_schema(schema[0]), _words, placeholder=0, wrapping=wrapping)
    key = ChunkKey("model", token_digest(()), "", "")
    return layout, bind(parse_prompt(prompt[0]), layout, _words, lambda run: key)


def _words(text: str, special: bool) -> list[int]:
    return [crc32(word.encode()) >> 1 for word in re.findall(r"\s*\w+|\s*<.*?>|\s*\W", text)]


def _walk(place: ModulePosition) -> Iterator[ModulePosition]:
    yield place
    for inner in place.places:
        yield from _walk(inner)
