"""An index of known runs of token ids that finds them in a prompt: whole, cut, edited, or written another way.

A prompt is tokenised as a whole, so the first and last token of a text in it may merge with its neighbours, and a text
that was wrapped, escaped, numbered or shortened on its way into the prompt agrees only in parts. A match is always a
run of equal ids.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ragfuse.errors import InputError, SettingsError
from ragfuse.process.fork import ForkLock
from ragfuse.text.span_anchors import Anchors, Array, grams, mixed
from ragfuse.text.span_runs import MIN_RUN_TOKENS, Search

MIN_ALTERED_TOKENS = 32
"""Default for the least tokens of an altered span that must agree."""
MAX_SPANS = 1 << 18
"""Default for the most spans that are known at once."""
_LARGEST = (1 << 31) - 1
_LARGEST_ARENA = (1 << 32) - 1
"""Tokens that can be told apart by a place."""
_BATCH = 1 << 18
"""The most added tokens that wait before they are indexed."""
SHARED = 24
"""Consecutive equal tokens by which `KnownSpans.sharing` counts a span as sharing text with other ids."""
_ENTRY = 240
"""Estimated bytes of Python objects per span."""

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class KnownSpan:
    """A run of token ids, its text and where it came from."""

    tokens: tuple[int, ...]
    text: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens lo:hi of a prompt, which are `span.tokens[row : row + hi - lo]`."""

    lo: int
    hi: int
    span: KnownSpan
    row: int


class KnownSpans:
    """An index of known spans that finds them in a prompt. Thread-safe; adding or discarding takes microseconds.

    A span is found where it stands whole, with or without its first and last token. An altered span is found by runs of
    at least 4 equal tokens, in its order, with gaps of at most 16 tokens on either side, if they add up to `altered`
    tokens; each run is a match. Where several spans match, the longest match wins.

    The time of `find` depends on the length of the prompt only: of spans with the same beginning, and of alignments in
    a repetitive prompt, only a few are tried.

    Args:
        shortest: The least tokens of a span that can be found.
        altered: The least tokens of an altered span that must agree.
        most: The most spans; those matched or added the longest time ago are evicted.
        most_tokens: The most tokens of all spans together.
    """

    def __init__(
        self,
        shortest: int = 8,
        altered: int = MIN_ALTERED_TOKENS,
        most: int = MAX_SPANS,
        most_tokens: int = _LARGEST_ARENA,
    ) -> None:
        if shortest < MIN_RUN_TOKENS + 2 or altered < shortest or most < 1:
            raise SettingsError(
                f"shortest is {shortest}, altered {altered}, most {most}; wanted shortest from {MIN_RUN_TOKENS + 2} "
                "on, altered not below it, and most from 1 on."
            )
        self._shortest, self._altered, self._most, self._most_tokens = shortest, altered, most, most_tokens
        self._lock = ForkLock(self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        """Forget all spans."""
        self._numbers: dict[bytes, int] = {}  # digest of a span's ids -> its number, matched longest ago first
        self._digests: list[bytes | None] = []  # by number; None: discarded
        self._words: list[tuple[str, str]] = []  # text and source, by number
        self._arena = np.zeros(1024, np.int32)
        self._starts = np.zeros(1025, np.int64)  # of each number, and where the next one will be
        self._alive = np.zeros(1024, bool)
        self._taken = 0  # numbers that are in the anchors
        self._dead = 0  # tokens of discarded spans
        self._word_bytes = 0
        self._anchors = Anchors(self._shortest)
        self._compared = 0  # ids that the last `find` compared

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, tokens: Ids) -> bool:
        ids = _within(tokens)
        return int(ids.min(initial=0)) >= 0 and _digest(ids) in self._numbers

    @property
    def nbytes(self) -> int:
        """Estimated bytes in memory: ids, anchors, texts and Python objects."""
        with self._lock:
            arrays = self._arena.nbytes + self._starts.nbytes + self._alive.nbytes + self._anchors.nbytes
            return arrays + self._word_bytes + _ENTRY * len(self._digests)

    def add(self, tokens: Ids, text: str = "", source: str = "") -> None:
        """Add a span, so that it is found from now on; for a known span, update text and source if given.

        Raises:
            InputError: An id is negative or too large.
        """
        ids = _within(tokens)
        if int(ids.min(initial=0)) < 0:
            raise InputError(
                f"Token ids are whole numbers from 0 to {_LARGEST:,}; found others in a span of {len(ids)}. Give ids "
                "as the tokenizer made them."
            )
        if not len(ids):
            return
        digest = _digest(ids)
        with self._lock:
            number = self._numbers.pop(digest, None)
            if number is not None:
                self._numbers[digest] = number
                old = self._words[number]
                self._say(number, (text or old[0], source or old[1]))
                return
            while self._numbers and (len(self) >= self._most or self._tokens + len(ids) > self._most_tokens):
                self._drop(next(iter(self._numbers)))
            self._append(ids, digest, (text, source))
            if self._end - int(self._starts[self._taken]) >= _BATCH:
                self._take_in()

    def discard(self, tokens: Ids) -> None:
        """Forget a span; ids that are not known are no error."""
        ids = _within(tokens)
        if int(ids.min(initial=0)) < 0:
            return
        digest = _digest(ids)
        with self._lock:
            if digest in self._numbers:
                self._drop(digest)

    def sharing(self, ids: Ids, source: str) -> list[KnownSpan]:
        """Return all spans of a source that share `SHARED` consecutive tokens with the given ids.

        Unlike `find` it is exhaustive: it reads all known spans and misses none.
        """
        wanted = _within(ids)
        if len(wanted) < SHARED:
            return []
        with self._lock:
            starts, end = self._starts[: len(self._digests) + 1], self._end
            there = np.isin(grams(mixed(self._arena[:end]), SHARED), grams(mixed(wanted), SHARED))
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(there)])
            first = starts[:-1].clip(0, len(there))
            last = np.maximum(first, (starts[1:] - SHARED + 1).clip(0, len(there)))
            shares = (before[last] > before[first]) & self._alive[: len(self._digests)]
            numbers = np.flatnonzero(shares)
            return [
                KnownSpan(tuple(self._arena[starts[at] : starts[at + 1]].tolist()), *self._words[at])
                for at in numbers.tolist()
                if self._words[at][1] == source
            ]

    def find(self, ids: Ids) -> list[Match]:
        """Return the matches of known spans in ids, left to right and without overlap."""
        prompt = _within(ids)
        with self._lock:
            self._take_in()
            self._compared = 0
            if len(prompt) < self._shortest - 2 or not self._numbers:
                return []
            at, place = self._anchors.find(prompt)
            starts = self._starts[: self._taken + 1]
            number = np.searchsorted(starts, place, "right") - 1
            alive = np.flatnonzero(self._alive[number])
            search = Search(
                prompt, self._arena, starts[:-1], starts[1:], self._shortest, self._altered, self._anchors.gram
            )
            found = search.find(at[alive], place[alive], number[alive])
            self._compared = search.compared
            return self._matches(prompt, found)

    def _matches(self, prompt: Array, found: Iterable[tuple[int, int, int, int]]) -> list[Match]:
        spans: dict[int, KnownSpan] = {}
        matches = []
        for lo, hi, number, place in found:
            if not (prompt[lo:hi] == self._arena[place : place + hi - lo]).all():
                continue  # should never happen, but a wrong row would give a wrong answer
            start, end = int(self._starts[number]), int(self._starts[number + 1])
            if number not in spans:
                spans[number] = KnownSpan(tuple(self._arena[start:end].tolist()), *self._words[number])
            matches.append(Match(lo, hi, spans[number], place - start))
        for number in spans:
            digest = self._digests[number]
            if digest is not None:
                self._numbers[digest] = self._numbers.pop(digest)
        return matches

    # what is kept

    @property
    def _end(self) -> int:
        return int(self._starts[len(self._digests)])

    @property
    def _tokens(self) -> int:
        return self._end - self._dead

    def _append(self, ids: Array, digest: bytes, words: tuple[str, str]) -> None:
        number, start = len(self._digests), self._end
        self._arena = _roomy(self._arena, start + len(ids))
        self._starts, self._alive = _roomy(self._starts, number + 2), _roomy(self._alive, number + 1)
        self._arena[start : start + len(ids)] = ids
        self._starts[number + 1] = start + len(ids)
        self._alive[number] = True
        self._numbers[digest] = number
        self._digests.append(digest)
        self._words.append(("", ""))
        self._say(number, words)

    def _say(self, number: int, words: tuple[str, str]) -> None:
        self._word_bytes += sum(map(_size, words)) - sum(map(_size, self._words[number]))
        self._words[number] = words

    def _drop(self, digest: bytes) -> None:
        number = self._numbers.pop(digest)
        self._say(number, ("", ""))
        self._digests[number], self._alive[number] = None, False
        self._dead += int(self._starts[number + 1] - self._starts[number])
        if self._dead > max(1 << 16, self._tokens):
            self._compact()

    def _take_in(self) -> None:
        """Index the spans that were added since the last call."""
        first, last = self._taken, len(self._digests)
        if first == last:
            return
        base, sizes = int(self._starts[first]), np.diff(self._starts[first : last + 1])
        sizes[~self._alive[first:last]] *= -1
        self._anchors.add(self._arena[base : self._end], base, sizes)
        self._taken = last

    def _compact(self) -> None:
        """Free the memory of discarded spans. The others keep their order, so anchors need not be sorted again."""
        self._take_in()
        count = len(self._digests)
        starts, alive = self._starts[: count + 1], self._alive[:count]
        sizes = np.where(alive, np.diff(starts), 0)
        begun = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

        def moved(places: Array) -> Array:
            number = np.searchsorted(starts, places, "right") - 1
            gone: Array = np.where(alive[number], places - starts[number] + begun[number], -1)
            return gone

        self._anchors.move(moved)
        kept = np.flatnonzero(alive)
        self._arena = _roomy(self._arena[: self._end][np.repeat(alive, np.diff(starts))], 1024)
        self._digests = [self._digests[number] for number in kept]
        self._words = [self._words[number] for number in kept]
        self._starts = _roomy(np.append(begun[:-1][kept], begun[-1]), 1025)
        self._alive = _roomy(np.ones(len(kept), bool), 1024)
        renumbered = np.cumsum(alive) - 1
        self._numbers = {digest: int(renumbered[number]) for digest, number in self._numbers.items()}
        self._taken, self._dead = len(kept), 0


def _within(tokens: Ids) -> Array:
    """Return ids as int32, with -1 for invalid ids."""
    wide = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.zeros(0, np.int64)
    if len(wide) and (int(wide.min()) < 0 or int(wide.max()) > _LARGEST):
        wide = np.where((wide < 0) | (wide > _LARGEST), -1, wide)
    return wide.astype(np.int32)


def _digest(ids: Array) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _roomy(array: Array, size: int) -> Array:
    """Return an array of at least this size; one that must grow gets at least half as much again."""
    if len(array) >= size:
        return array
    larger = np.zeros(max(size, len(array) + len(array) // 2), array.dtype)
    larger[: len(array)] = array
    return larger


def _size(text: str) -> int:
    return sys.getsizeof(text) if text else 0
