"""Tokenising of long texts without blocking other Python threads, and lazy lookup of character offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from tokenizers import Encoding, Tokenizer

Chars = tuple[int, int]
"""Characters lo:hi of a text."""
RELEASE_GIL_CHARS = 4096
"""Texts of at least this many characters, or ids, are processed with the GIL released."""


def encoding_of(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode a text. A long one is encoded as a batch of one, because only that releases the GIL."""
    if len(text) < RELEASE_GIL_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids, special tokens included. Many ids are decoded as a batch of one, which releases the GIL."""
    if len(ids) < RELEASE_GIL_CHARS:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode_batch([ids], skip_special_tokens=False)[0])


@dataclass(frozen=True, slots=True)
class Offsets(Sequence[Chars]):
    """The character offsets of tokens lo:hi of an encoding, looked up on access, since few are needed of a long text.

    Args:
        encoding: The encoding.
        lo: First token.
        hi: The token after the last.
        shift: Added to each offset.
        minimum: Smallest offset; smaller ones are raised to it.
    """

    encoding: Encoding
    lo: int
    hi: int
    shift: int = 0
    minimum: int = 0

    @classmethod
    def of(cls, encoding: Encoding) -> Offsets:
        """Return the offsets of all tokens of an encoding."""
        return cls(encoding, 0, len(encoding))

    def behind(self, n: int) -> Offsets:
        """Return the offsets without the first `n` characters of the encoded text, which are not part of the text."""
        return replace(self, shift=self.shift - n)

    def moved(self, shift: int) -> Offsets:
        """Return the offsets in a longer text in which this one begins at character `shift`."""
        return replace(self, shift=self.shift + shift, minimum=self.minimum + shift)

    def __len__(self) -> int:
        return self.hi - self.lo

    @overload
    def __getitem__(self, at: int) -> Chars: ...

    @overload
    def __getitem__(self, at: slice) -> Offsets: ...

    def __getitem__(self, at: int | slice) -> Chars | Offsets:
        if isinstance(at, slice):
            lo, hi, _ = at.indices(len(self))
            return replace(self, lo=self.lo + lo, hi=self.lo + max(lo, hi))
        row = self.lo + at if at >= 0 else self.hi + at
        if not self.lo <= row < self.hi:
            raise IndexError(at)
        lo, hi = self.encoding.token_to_chars(row) or (0, 0)
        return max(self.minimum, lo + self.shift), max(self.minimum, hi + self.shift)
