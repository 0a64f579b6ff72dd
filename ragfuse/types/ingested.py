"""The totals of an ingest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ingested:
    """The totals of an ingest.

    Args:
        chunks: Chunks processed.
        encoded: Those that were encoded and stored now.
        tokens: Tokens of the encoded chunks.
        nbytes: Bytes of their KV.
        seconds: Time since the start.
        of: Number of chunks in all; None: unknown.
        short: Those that are too short to be stored.
        left_out: Sources of texts that are longer than the model reads; they are not counted
            elsewhere.
    """

    chunks: int = 0
    encoded: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    of: int | None = None
    short: int = 0
    left_out: tuple[str, ...] = ()

    def plus(self, tokens: int, nbytes: int, seconds: float, is_short: bool = False) -> Ingested:
        """Return the totals after one more chunk; `nbytes` of new KV, 0 if it was stored before or
        is too short.
        """
        new = bool(nbytes)
        found = (
            self.chunks + 1,
            self.encoded + new,
            self.tokens + new * tokens,
            self.nbytes + nbytes,
        )
        return Ingested(*found, seconds, self.of, self.short + is_short, self.left_out)
