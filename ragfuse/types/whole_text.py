"""Which characters no text holds, and what stands for them: one rule for all doors of ragfuse."""

from __future__ import annotations


def whole_text(text: str) -> str:
    """Return the text with U+FFFD for each NUL and each half of a surrogate pair; two halves become their character.

    Readers of PDF and JSON produce both. Neither UTF-8 nor a tokenizer accepts a half, nor XML a NUL. All other
    characters stay. Texts are read like this at every door: files, HTTP, the frameworks, PML, the command line.
    """
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
