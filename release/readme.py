"""The README's programs as one script that runs beside nothing but what was installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tests.docs.blocks import Block

HUB = re.compile(r'"Qwen/[\w.-]+"')
"""A model that the README names for example; the embedded one takes its place, which needs no download."""
EMBEDDED = '"smollm2-135m-reader"'
DOCUMENTS = (
    "The harbour of Port Elling was dug in 1847 by sailors who had lost their ship in a winter storm.",
    "The lighthouse of Port Elling is painted green, because red paint was too dear in the year it was built.",
    "Behind the hills lies a valley that is known for its walnuts; every October the village holds a fair.",
)
"""Texts of documents, which a reader of the README would have."""
SETTINGS = {"RAGFUSE_MAX_TOKENS": "8", "RAGFUSE_DTYPE": "float32"}
"""Settings of the script: answers are short, as what they say is not looked at."""


def script(found: Iterable[Block], documents: Sequence[str]) -> str:
    """Return the Python blocks of a page as one program that says after each that it ran.

    Args:
        found: The blocks of the page, in order; those that are marked as not run are left out.
        documents: Texts that the script names TEXTS.
    """
    parts = [f"import os\nos.environ.update({SETTINGS!r})\nTEXTS = {list(documents)!r}\n"]
    for block in found:
        if block.language == "python" and not block.not_run:
            code = HUB.sub(EMBEDDED, "\n".join(filter(None, (block.first, block.code))))
            parts.append(f"{code}\nprint('ran: line {block.line}', flush=True)\n")
    return "\n".join(parts)
