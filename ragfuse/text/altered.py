"""Describes how a prompt contains texts in a changed form, which are therefore not found as chunks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

EDGE_CHARS = 40
"""Characters of a text's beginning or end by which a part of it is recognised."""
MAX_COMPARED_TEXTS = 32
"""The most texts that are searched; each needs several searches of the prompt."""


def altered(prompt: str, texts: Sequence[str]) -> str:
    """Describe how the prompt changed texts: escaped as JSON, with other white space, or cut; "" if none is changed.

    Only the first `MAX_COMPARED_TEXTS` texts are searched, and only those of at least `EDGE_CHARS` characters.
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
