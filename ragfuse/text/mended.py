"""Texts as ragfuse takes them at each door, with a warning where a character was replaced.

Which characters are is decided in `types.whole_text`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ragfuse.types.whole_text import whole_text

log = logging.getLogger("ragfuse.text")


def mended(text: str, what: str) -> str:
    """Return a text as `whole_text` does; log a warning that names it by `what` where that replaces something."""
    whole = whole_text(text)
    if whole is not text:
        _warn(what)
    return whole


def mended_value(value: Any, what: str) -> Any:
    """Return a value with all texts in it, keys too, as `whole_text` does; the same one if nothing is replaced.

    Args:
        value: Texts, numbers, lists, mappings and dataclasses. One that holds itself is returned as it is.
        what: How a warning, one for the whole value, names it.
    """
    try:
        whole = _whole(value)
    except RecursionError:  # whoever writes it as JSON refuses it
        return value
    if whole is not value:
        _warn(what)
    return whole


def _warn(what: str) -> None:
    log.warning(
        "%s has characters that no text holds (NUL, or half a surrogate pair); each is replaced by U+FFFD.",
        whole_text(what),
    )


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Mapping):
        pairs = [(_whole(name), _whole(each)) for name, each in value.items()]
        is_same = all(a is c and b is d for (a, b), (c, d) in zip(value.items(), pairs, strict=True))
        return value if is_same else dict(pairs)
    if isinstance(value, list | tuple):
        items = [_whole(each) for each in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        parts = _whole(given)
        return value if parts is given else replace(value, **parts)
    return value
