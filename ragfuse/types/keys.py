"""Keys of KV entries: digests of the model, the token ids, and the preceding tokens."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

FORMAT_VERSION = 2
"""Version of the format of all stored data. A new version turns old entries into misses."""
_KEY = re.compile(r"[0-9A-Za-z_.~-]{4,300}")
Encoded = Literal["alone", "prefix", "filler"]
Kind = Literal["fresh", "chunk", "prefix", "module", "history"]


def digest(*parts: str | bytes) -> str:
    """Return the BLAKE3 digest of length-prefixed parts, as 32 hex digits."""
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest(length=16)


def token_digest(tokens: Sequence[int]) -> str:
    """Return the digest of token ids, which are hashed as little-endian int32."""
    return digest("tokens", struct.pack(f"<{len(tokens)}i", *tokens))


def filler_context(context: str) -> str:
    """Add "~" to the digest of a context. The mark means that the context ends with filler text."""
    return f"~{context}"


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key under which the KV of a run of tokens is stored. Equal keys mean equal KV.

    The key consists of digests that are the same in every process.

    Args:
        model: Digest of weights, dtype, RoPE settings, tokenizer, drift, format version and the
            tenant's salt.
        tokens: Digest of the token ids.
        context: What preceded the run during encoding: "" for nothing, or a digest of exactly the
            preceding tokens. `filler_context` marks contexts that end with filler text.
        layout: "" if the run was encoded at positions 0..n-1, else a digest of the positions.
    """

    model: str
    tokens: str
    context: str = ""
    layout: str = ""

    @property
    def encoded(self) -> Encoded:
        """What preceded the run during encoding: nothing ("alone"), a "prefix" or "filler" text."""
        if not self.context:
            return "alone"
        return "filler" if self.context.startswith(filler_context("")) else "prefix"

    def __str__(self) -> str:
        return ".".join((self.model, self.tokens, self.context or "-", self.layout or "-"))

    @classmethod
    def parse(cls, text: str) -> ChunkKey:
        """Return the key whose `str()` is `text`. Raise ValueError if `text` is not a key."""
        parts = ["" if part == "-" else part for part in text.split(".")]
        if not _KEY.fullmatch(text) or len(parts) != 4 or not parts[0] or not parts[1]:
            raise ValueError(
                f"Not a chunk key: {text!r} (a key has four parts: model.tokens.context.layout)"
            )
        return cls(*parts)
