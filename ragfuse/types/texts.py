"""Rules for texts: which characters none holds, and a partial match at the end of a growing one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

log = logging.getLogger("ragfuse.text")


def whole_text(text: str, what: str = "") -> str:
    """Return the text with U+FFFD for each NUL and each half of a surrogate pair; two halves become
    their character.

    Readers of PDF and JSON produce both. Neither UTF-8 nor a tokenizer accepts a half, nor XML a
    NUL. All other characters stay. Texts are read like this at every door: files, HTTP, the
    frameworks, PML, the command line.

    Args:
        text: The text.
        what: Where something is replaced, a warning names the text like this; "": there is no
            warning.

    Returns:
        The text; the same object where nothing is replaced.
    """
    whole = text.replace("\0", "\ufffd")
    try:
        whole.encode()
    except UnicodeEncodeError:
        whole = whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if whole == text:
        return text
    if what:
        log.warning(
            "%s has invalid characters (NUL, lone surrogates); each is replaced by U+FFFD.",
            whole_text(what),
        )
    return whole


def whole_value(value: Any, what: str) -> Any:
    """Apply `whole_text` to all texts in a value, keys too; `what` names it in warnings."""
    if isinstance(value, str):
        return whole_text(value, what)
    if isinstance(value, Mapping):
        return {whole_value(name, what): whole_value(each, what) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole_value(each, what) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        return replace(value, **whole_value(parts, what))
    return value


def partial_match(text: str, words: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin one of these words."""
    sizes = range(min(len(text), max(map(len, words), default=0) - 1), 0, -1)
    return next((size for size in sizes if any(word.startswith(text[-size:]) for word in words)), 0)
