"""Encodings of long texts: made while other threads run, and asked only for the characters that are wanted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from tokenizers import Encoding, Tokenizer

from ragfuse.process.fork import at_fork

Chars = tuple[int, int]
"""Characters lo:hi of a text."""
RELEASE_GIL_CHARS = 4096
"""Characters of a text, or ids, from which on other threads of Python run meanwhile."""


def encoding_of(tokenizer: Tokenizer, text: str) -> Encoding:
    """A text's encoding. A long one is encoded as a batch, which lets other threads run: `encode` does not."""
    if len(text) < RELEASE_GIL_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids. Of many it is told as of a batch, as `encoding_of` does."""
    if len(ids) < RELEASE_GIL_CHARS:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode_batch([ids], skip_special_tokens=False)[0])


class _Parallelism:
    """Turns the tokenizers' threads off in forked children, where there are none; unless the user has decided.

    The library does so by itself, and prints a warning of five lines.
    """

    NAME = "TOKENIZERS_PARALLELISM"

    def __init__(self) -> None:
        self._is_ours = False
        at_fork(self)

    def pause(self) -> None:
        """As any owner."""
        self._is_ours = self.NAME not in os.environ
        if self._is_ours:
            os.environ[self.NAME] = "false"

    def resume(self) -> None:
        """As any owner."""
        if self._is_ours:
            os.environ.pop(self.NAME, None)

    def renew(self) -> None:
        """As any owner."""


_PARALLELISM = _Parallelism()


@dataclass(frozen=True, slots=True)
class Offsets(Sequence[Chars]):
    """The characters of tokens `lo:hi` of an encoding, looked up one by one: of a long text few are ever asked for.

    by: added to each; least: no character stands before it.
    """

    encoding: Encoding
    lo: int
    hi: int
    by: int = 0
    least: int = 0

    @classmethod
    def of(cls, encoding: Encoding) -> Offsets:
        """All of an encoding's."""
        return cls(encoding, 0, len(encoding))

    def behind(self, n: int) -> Offsets:
        """As they are where the first `n` characters are none of the text."""
        return replace(self, by=self.by - n)

    def moved(self, by: int) -> Offsets:
        """As they are in a text in which this one begins at `by`."""
        return replace(self, by=self.by + by, least=self.least + by)

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
        return max(self.least, lo + self.by), max(self.least, hi + self.by)
