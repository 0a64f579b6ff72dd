"""Keys of KV entries: digests of the model, the token ids, and what these attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from blake3 import blake3

FORMAT_VERSION = 2
"""Version of everything that is written: keys, headers, profiles. A change makes old entries misses."""
Encoded = Literal["alone", "prefix", "filler"]


def digest(*parts: str | bytes) -> str:
    """BLAKE3 over length-prefixed parts, 32 hex digits: the same in every process and on every machine."""
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest(length=16)


def whole_text(text: str) -> str:
    """The text without halves of characters (lone surrogates): U+FFFD stands for each, two that are one become it.

    Readers of PDF and JSON hand such out, and neither UTF-8 nor a tokenizer can take them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def token_digest(tokens: Sequence[int]) -> str:
    """Digest of token ids, written as little-endian int32."""
    return digest("tokens", torch.tensor(list(tokens), dtype=torch.int32).numpy().astype("<i4").tobytes())


def filler_context(context: str) -> str:
    """The context of a run encoded behind `context` (a token digest, "": nothing) and then other text."""
    return f"~{context}"


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """What counts as the same KV. Digests only: no position, no process-local value.

    `model` covers weights, dtype, rope settings, tokenizer, drift, format version and the tenant's salt; `tokens` the
    ids; `context` what the run attended to before itself: "" nothing, a token digest just those tokens,
    `filler_context` of either those and then other text. `layout` is "" for positions 0..n-1, else a digest of them.
    """

    model: str
    tokens: str
    context: str = ""
    layout: str = ""

    @property
    def encoded(self) -> Encoded:
        """In what company, in one word."""
        if not self.context:
            return "alone"
        return "filler" if self.context.startswith(filler_context("")) else "prefix"

    def __str__(self) -> str:
        return ".".join((self.model, self.tokens, self.context or "-", self.layout or "-"))

    @classmethod
    def parse(cls, text: str) -> ChunkKey:
        """The key whose `str()` is `text`; ValueError if it is none."""
        parts = ["" if part == "-" else part for part in text.split(".")]
        if len(parts) != 4 or not parts[0] or not parts[1]:
            raise ValueError(f"Not a chunk key: {text!r} (wanted model.tokens.context.layout)")
        return cls(*parts)
