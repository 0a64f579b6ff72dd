"""Which characters no text holds, and what stands for them: one rule for all doors of ragfuse."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("ragfuse.text")


def whole_text(text: str, what: str = "") -> str:
    """Return the text with U+FFFD for each NUL and each half of a surrogate pair; two halves become their character.

    Readers of PDF and JSON produce both. Neither UTF-8 nor a tokenizer accepts a half, nor XML a NUL. All other
    characters stay. Texts are read like this at every door: files, HTTP, the frameworks, PML, the command line.

    Args:
        text: The text.
        what: Where something is replaced, a warning names the text like this; "": there is no warning.

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
            "%s has characters that no text holds (NUL, or half a surrogate pair); each is replaced by U+FFFD.",
            whole_text(what),
        )
    return whole


def whole_value(value: Any, what: str) -> Any:
    """Return a value of JSON with all texts in it, keys too, as `whole_text` does.

    Args:
        value: Texts, numbers, lists and mappings. One that holds itself is returned as it is.
        what: How a warning names it.
    """
    try:
        return _whole(value, what)
    except RecursionError:  # whoever writes it as JSON refuses it
        return value


def _whole(value: Any, what: str) -> Any:
    if isinstance(value, str):
        return whole_text(value, what)
    if isinstance(value, Mapping):
        return {_whole(name, what): _whole(each, what) for name, each in value.items()}
    return [_whole(each, what) for each in value] if isinstance(value, list | tuple) else value
