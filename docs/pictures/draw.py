"""The book's pictures: `python docs/pictures/draw.py` writes each as an SVG file beside
this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from kit import HERE, Picture, style
from modules import positions

__all__ = ["HERE", "PICTURES", "style"]


def prompt() -> Picture:
    """What a RAG prompt is made of and what of it is reused."""
    p = Picture(860, 330)
    p.words(24, 34, "One prompt, from left to right", 15, bold=True)
    parts = [
        ("instruction", 96, "exact", ()),
        ("chunk C", 150, "exact", ()),
        ("chunk A", 150, "reused", (6, 18, 64, 71, 120)),
        ("chunk F", 150, "reused", (6, 30, 37, 88, 96, 131)),
        ("chunk K", 150, "fresh", ()),
        ("question", 96, "fresh", ()),
    ]
    x, middles = 24.0, []
    for name, width, fill, rows in parts:
        p.box(x, 62, width - 4, 54, fill)
        for row in rows:
            p.box(x + row, 62, 5, 54, "again", round_=0)
        p.words(x + (width - 4) / 2, 136, name, 13, at="middle")
        middles.append(x + (width - 4) / 2)
        x += width
    said = [
        ("as it is", "an earlier prompt", "began so"),
        ("as it is", "stood right behind", "it before, too"),
        ("reused, turned", "keys are moved to", "where it stands now"),
        ("reused, turned", "a few rows are", "recomputed"),
        ("computed", "met for the first time:", "kept after the answer"),
        ("computed", "always new", ""),
    ]
    for middle, (head, one, two) in zip(middles, said, strict=True):
        p.line((middle, 146), (middle, 164), fill="line")
        p.words(middle, 182, head, 12.5, at="middle", bold=True)
        p.words(middle, 201, one, 11.5, "soft", at="middle")
        p.words(middle, 217, two, 11.5, "soft", at="middle")
    p.line((24, 244), (836, 244), fill="line")
    p.legend(
        24,
        274,
        ("exact", "equal to full prefill"),
        ("reused", "taken from the store"),
        ("again", "recomputed: rows that matter across chunks"),
        ("fresh", "computed"),
        gap=24,
    )
    p.words(
        24,
        306,
        "Chunks may come in any order, whole or altered, and nobody has to say where they are.",
        12,
        "soft",
    )
    return p


COLUMNS = (("exact", 5), ("reused", 14), ("reused", 14), ("fresh", 5))
DEEP = (1, 2, 5, 6, 11, 14, 15, 19, 20, 25)


def layers() -> Picture:
    """A fused prefill layer by layer, by `hkvd`."""
    p = Picture(860, 470)
    p.words(24, 34, "A fused prefill, layer by layer (policy hkvd)", 15, bold=True)
    cell, left, top = 12, 118, 92
    x = float(left)
    for name, (_, count) in zip(("exact", "chunk A", "chunk F", "question"), COLUMNS, strict=True):
        p.words(x + count * cell / 2, 76, name, 12, "soft", at="middle")
        x += count * cell
    chosen = [5 + row for row in DEEP]
    plans = [
        ("layer 0", set(range(5, 33)), "all rows of blended chunks"),
        ("layer 1", set(range(5, 33)), "K and V of all, held against the store"),
        ("layer 2", set(chosen), "only those that differ most go on"),
        ("layer 3", set(chosen[:3] + chosen[4:9]), ""),
        ("...", set(chosen[:2] + chosen[5:9]), "fewer in each, ranked anew"),
        ("layer N-2", {chosen[1], chosen[5], chosen[7], chosen[8]}, ""),
        ("layer N-1", {chosen[5], chosen[7], chosen[8]}, "attention of the last row alone"),
    ]
    for number, (name, again, note) in enumerate(plans):
        y = top + number * 38
        p.words(left - 14, y + 20, name, 12.5, at="end")
        column = 0
        for kind, count in COLUMNS:
            for _ in range(count):
                fill = "again" if column in again else kind
                p.box(left + column * cell, y, cell - 1.5, 28, fill, round_=2)
                column += 1
        p.words(left + 38 * cell + 16, y + 19, note, 12, "soft")
        if number == 1:
            for column in chosen:
                p.box(left + column * cell, y, cell - 1.5, 28, "", edge="ink", round_=2)
    bottom = top + 7 * 38 + 14
    p.arrow((left + 37.4 * cell, bottom - 8), (left + 37.4 * cell, bottom + 18))
    p.words(left + 37.4 * cell, bottom + 34, "first token", 12, at="middle", bold=True)
    p.legend(
        24,
        bottom + 34,
        ("exact", "read as it is"),
        ("reused", "read"),
        ("again", "recomputed"),
        ("fresh", "new"),
        gap=10,
    )
    p.words(
        24,
        bottom + 64,
        "Every computed row sees all earlier positions: cached rows and fresh ones lie in one"
        " buffer,",
        12,
        "soft",
    )
    p.words(
        24,
        bottom + 82,
        "into which each layer's fresh K and V are scattered. Nothing of the model's own code is"
        " replaced.",
        12,
        "soft",
    )
    return p


def overlap() -> Picture:
    """Loading hidden behind recomputing, and how the controller raises the ratio."""
    p = Picture(860, 430)
    p.words(24, 34, "Layers are read while others are fused", 15, bold=True)
    _lane(
        p,
        64,
        "read where it is used",
        [
            ("load", 62, "0"),
            ("again", 40, "0"),
            ("load", 62, "1"),
            ("again", 40, "1"),
            ("load", 62, "2"),
            ("again", 40, "2"),
            ("load", 62, "3"),
            ("again", 40, "3"),
        ],
    )
    p.words(24, 128, "read ahead", 12.5)
    x = 190.0
    for width, text in ((62, "0"), (124, "1 2"), (62, "3")):
        p.label(x, 112, width - 3, 24, text, "load")
        x += width
    starts = (252, 376, 416, 456)
    for number, start in enumerate(starts):
        p.label(start, 142, 37, 24, str(number), "again")
    p.words(24, 158, "  and fused", 12.5)
    p.arrow((600, 82), (618, 82))
    p.words(624, 86, "first token", 12, bold=True)
    p.arrow((496, 154), (514, 154))
    p.words(520, 158, "first token, faster", 12, bold=True)
    p.legend(
        190,
        196,
        ("load", "reading layers, in steps that grow: 1, 2, 4, ..."),
        ("again", "fusing them"),
    )
    p.line((24, 218), (836, 218), fill="line")
    p.words(24, 248, "What is left idle can be used: the loading controller's ratio", 15, bold=True)
    for y, name, rows in (
        (270, "least ratio that is safe", 26),
        (318, "ratio that loading hides", 58),
        (366, "one step more", 74),
    ):
        p.words(24, y + 14, name, 12.5)
        for number in range(5):
            p.box(230 + number * 62, y, 59, 15, "load", round_=3)
            p.box(
                230 + (number + 1) * 62 + max(0, rows - 62) * number,
                y + 18,
                rows - 3,
                15,
                "again",
                round_=3,
            )
        end = 230 + 5 * 62 + rows + max(0, rows - 62) * 4
        p.arrow((end, y + 26), (end + 16, y + 26))
    p.words(640, 292, "the model waits for the tier", 12, "soft")
    p.words(640, 340, "closer for nothing: taken", 12, bold=True)
    p.words(700, 388, "later: not taken", 12, "soft")
    return p


def _lane(p: Picture, y: float, name: str, steps: list[tuple[str, float, str]]) -> None:
    p.words(24, y + 22, name, 12.5)
    x = 190.0
    for fill, width, text in steps:
        p.label(x, y + 6, width - 3, 24, text, fill)
        x += width


def tiers() -> Picture:
    """Where the KV lies, and which way it goes."""
    p = Picture(860, 366)
    p.words(24, 34, "Where the KV lies", 15, bold=True)
    places = [
        ("GPU memory", "on a GPU", "exact"),
        ("memory", "of this process", "exact"),
        ("disk", "shared by processes", "reused"),
        ("Redis", "shared by machines", "load"),
        ("bucket", "S3 and the like", "load"),
    ]
    for number, (name, whose, fill) in enumerate(places):
        x = 24 + number * 166
        p.box(x, 92, 148, 76, fill)
        p.words(x + 74, 126, name, 14, at="middle", bold=True)
        p.words(x + 74, 146, whose, 11.5, at="middle")
    p.arrow((24, 72), (836, 72))
    p.words(24, 64, "asked first", 11.5, "soft")
    p.words(836, 64, "slower, larger, cheaper", 11.5, "soft", at="end")
    y = 222
    p.words(24, y - 18, "a beginning", 12.5, bold=True)
    p.words(
        180, y - 18, "of prompts, as earlier ones had it: into memory, and nowhere else", 12, "soft"
    )
    p.words(24, y + 8, "a new chunk", 12.5, bold=True)
    p.words(
        180,
        y + 8,
        "into memory at once; then to the cheapest slow tier whose loading hides, once this machine"
        " was measured",
        12,
        "soft",
    )
    p.words(24, y + 34, "a read", 12.5, bold=True)
    p.words(
        180,
        y + 34,
        "every layer is checked; a chunk that was read whole stays in memory",
        12,
        "soft",
    )
    p.words(24, y + 60, "used often", 12.5, bold=True)
    p.words(180, y + 60, "copied to a faster tier that has room, after the answer", 12, "soft")
    p.words(24, y + 86, "full or too old", 12.5, bold=True)
    p.words(180, y + 86, "least recently used first; pinned entries never", 12, "soft")
    p.words(24, y + 112, "down or damaged", 12.5, bold=True)
    p.words(
        180,
        y + 112,
        "costs one timeout, never an answer: what cannot be read is computed",
        12,
        "soft",
    )
    return p


def boundaries() -> Picture:
    """How a chunk is known: four ways."""
    p = Picture(860, 436)
    p.words(24, 34, "How a chunk is known", 15, bold=True)
    p.words(836, 34, "reused from", 12, "soft", at="end")
    rows = [
        (
            "1",
            "given",
            "a content block, a Piece, Ask.documents, a server's documents",
            "the 2nd question",
        ),
        ("2", "ingested", "ingest, RagFuseIndexer, KVPrecompute", "the 1st question"),
        (
            "3",
            "retrieved",
            "a retriever of LangChain or LlamaIndex returned it",
            "the 2nd question",
        ),
        (
            "4",
            "learnt",
            "two prompts held this passage; anywhere, the server too",
            "the 3rd question",
        ),
        ("", "the rest", "instructions are the beginning of prompts; the question is new", ""),
    ]
    for number, (sign, name, what, note) in enumerate(rows):
        y = 50 + number * 42
        p.label(24, y, 30, 32, sign, ("exact", "exact", "reused", "reused", "fresh")[number], 14)
        p.words(70, y + 21, name, 13, bold=True)
        p.words(190, y + 21, what, 12.5)
        p.words(836, y + 21, note, 12, "soft", at="end")
    p.line((24, 268), (836, 268), fill="line")
    p.words(24, 296, "A message as the chain wrote it", 12.5, "soft")
    pieces = [
        ("Use only the passages.", 176, "exact"),
        ("The harbour was dug in 1847 by ...", 236, "reused"),
        ("The lighthouse is green, ...", 196, "reused"),
        ("Who dug it?", 100, "fresh"),
    ]
    x = 24.0
    for number, (text, width, fill) in enumerate(pieces):
        p.box(x, 310, width, 40, fill)
        p.words(x + width / 2, 335, text, 12, at="middle")
        x += width + 28
        if number < len(pieces) - 1:
            p.words(x - 14, 335, "\\n\\n", 11, "soft", at="middle")
    for number, text in enumerate(
        (
            (
                "The prompt is tokenised as a whole, as without ragfuse; known chunks are found among"
                " its token ids."
            ),
            (
                "Numbered, indented, escaped, cut or edited: what agrees id by id is reused, the rest"
                " is computed."
            ),
            "No document can forge a mark, and nothing that differs is taken for the same.",
        )
    ):
        p.words(24, 380 + number * 20, text, 12, "soft")
    return p


def entries() -> Picture:
    """The one entry of a chunk, and what of a prompt it serves."""
    p = Picture(860, 348)
    p.words(24, 34, "A chunk is encoded once, behind filler text", 15, bold=True)
    p.words(24, 76, "encoded", 13, bold=True)
    p.label(190, 56, 214, 34, "256 tokens of other text", "hint", 11.5)
    p.label(408, 56, 160, 34, "chunk", "reused")
    p.words(586, 78, "what stands before is cut off again", 12.5, "soft")
    p.words(
        190,
        114,
        "A text's first tokens are special to a model; a chunk encoded as if it stood first brings"
        " that along.",
        12,
        "soft",
    )
    p.line((24, 136), (836, 136), fill="line")
    parts = ("instruction", "first chunk", "second", "third", "question")
    for y, name, fills in (
        (158, "the first time", ("exact", "reused", "reused", "reused", "fresh")),
        (224, "begun so again", ("exact", "exact", "reused", "reused", "fresh")),
    ):
        p.words(24, y + 22, name, 13, bold=True)
        for x, text, fill in zip((190, 320, 450, 580, 710), parts, fills, strict=True):
            p.label(x, y, 126, 34, text, fill)
    p.arrow((383, 194), (383, 222))
    p.words(394, 213, "encoded exactly behind the instruction, after the answer", 12, "soft")
    p.legend(
        190,
        286,
        ("exact", "the prompt's beginning, as it is"),
        ("reused", "the chunk's one entry"),
        ("fresh", "computed"),
        gap=24,
    )
    p.words(
        24,
        324,
        "The same entry serves every prompt, whatever it begins with, and wherever in it the chunk"
        " stands.",
        12,
        "soft",
    )
    return p


PICTURES: MappingProxyType[str, Callable[[], Picture]] = MappingProxyType(
    {one.__name__: one for one in (prompt, layers, overlap, tiers, boundaries, entries, positions)}
)

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
