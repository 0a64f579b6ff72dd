"""How a text that is not found in a prompt was changed on its way into it, in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

EDGE_CHARS = 40
"""Letters by which a text's beginning or end is known again."""
MAX_COMPARED_TEXTS = 32
"""Texts that are looked for: each takes as long as reading the prompt some times."""


def altered(prompt: str, texts: Sequence[str]) -> str:
    """Say what was done to those of the texts that stand in the prompt otherwise than they are; "" where none does.

    Only the first `MAX_COMPARED_TEXTS` texts are looked for.
    """
    squashed, found, texts = " ".join(prompt.split()), Counter[str](), texts[:MAX_COMPARED_TEXTS]
    for text in texts:
        text = text.strip()
        if len(text) < EDGE_CHARS or text in prompt:
            continue
        escaped = (json.dumps(text, ensure_ascii=plain)[1:-1] for plain in (True, False))
        if any(each in prompt for each in escaped):
            found["escaped as JSON"] += 1
        elif " ".join(text.split()) in squashed:
            found["with other white space"] += 1
        elif text[:EDGE_CHARS] in prompt or text[-EDGE_CHARS:] in prompt:
            found["cut"] += 1
    return ", ".join(f"{count} of {len(texts)} {how}" for how, count in found.items())
