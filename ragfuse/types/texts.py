"""Replacement of invalid characters, and partial matches at the end of a growing text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

log = logging.getLogger("ragfuse.text")


def whole_text(text: str, what: str = "") -> str:
    """Replace NULs and lone surrogates by U+FFFD, and surrogate pairs by the encoded character.

    PDF and JSON readers produce such characters. UTF-8 and tokenizers reject surrogates, XML
    rejects NUL. All other characters stay. All input passes through this function: files, HTTP,
    frameworks, PML, the command line.

    Args:
        text: The text.
        what: The name of the text in the warning about a replacement. "" means no warning.

    Returns:
        The text after the replacements, or the same object if nothing is replaced.
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
            "%s has invalid characters (NUL, lone surrogates), each replaced by U+FFFD.",
            whole_text(what),
        )
    return whole


def whole_value(value: Any, what: str) -> Any:
    """Apply `whole_text` to a value's strings, including keys. Warnings call the value `what`."""
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
    """Return how many characters at the end of `text` may be the beginning of one of `words`."""
    sizes = range(min(len(text), max(map(len, words), default=0) - 1), 0, -1)
    return next((size for size in sizes if any(word.startswith(text[-size:]) for word in words)), 0)
