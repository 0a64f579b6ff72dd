"""An index of known runs of token ids that finds them in a prompt: whole, cut, edited, or written another way.

A prompt is tokenised as a whole, so the first and last token of a text in it may merge with its neighbours, and a text
that was wrapped, escaped, numbered or shortened on its way into the prompt agrees only in parts. A match is always a
run of equal ids.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ragfuse.text.span_anchors import Anchors, Array, grams, hashed_ids
from ragfuse.text.span_runs import MAX_GAP_TOKENS, Search

MIN_ALTERED_TOKENS = 32
"""Default for the least tokens of an altered span that must agree."""
MAX_SPANS = 1 << 18
"""Default for the most spans that are known at once."""
_BATCH = 1 << 18
"""The most added tokens that wait before they are indexed."""
SHARED_TOKENS = 24
"""Consecutive equal tokens by which `KnownSpans.sharing` counts a span as sharing text with other ids."""
COVERED_SHARE = 0.9
"""If stored spans cover at least this share of a match of a span that is only given, they are used instead."""

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class KnownSpan:
    """A run of token ids, its text and where it came from."""

    tokens: tuple[int, ...]
    text: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """A place where a known span was found: tokens lo:hi of the prompt equal `span.tokens[row : row + hi - lo]`."""

    lo: int
    hi: int
    span: KnownSpan
    row: int


class KnownSpans:
    """An index of known spans (token ids of chunks) that finds them in a prompt.

    An unaltered span is found as a whole, with or without its first and last token. An altered span is found in parts:
    runs of at least 4 equal tokens in the same order, at most 16 tokens apart in the prompt and in the span. The runs
    must have `min_altered_tokens` tokens together; each is a match of its own. Where several spans match, the longest
    match wins; a span that is only given with a question gives way to stored ones that cover most of it.

    The time of `find` depends only on the length of the prompt: among spans with the same beginning, and among
    alignments in a repetitive prompt, only a few are tried. Thread-safe; adding or discarding takes microseconds.

    Args:
        min_tokens: The least tokens of a span that can be found.
        min_altered_tokens: The least tokens of an altered span that must agree.
        max_spans: The most spans; those matched or added the longest time ago are evicted.
    """

    def __init__(
        self,
        min_tokens: int = 8,
        min_altered_tokens: int = MIN_ALTERED_TOKENS,
        max_spans: int = MAX_SPANS,
    ) -> None:
        self._min_tokens, self._min_altered_tokens = min_tokens, min_altered_tokens
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._numbers: dict[bytes, int] = {}  # digest of a span's ids -> its number, matched longest ago first
        self._digests: list[bytes | None] = []  # by number; None: discarded
        self._labels: list[tuple[str, str]] = []  # text and source, by number
        self._arena = np.zeros(1024, np.int32)
        self._starts = np.zeros(1025, np.int64)  # of each number, and where the next one will be
        self._alive = np.zeros(1024, bool)
        self._stored = np.zeros(1024, bool)
        self._n_indexed = 0  # spans whose anchors are indexed, the first ones by number
        self._n_discarded_tokens = 0
        self._anchors = Anchors(self._min_tokens)
        self._compared = 0  # ids that the last `find` compared

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, tokens: Ids) -> bool:
        return _digest(_as_ids(tokens)) in self._numbers

    def add(self, tokens: Ids, text: str = "", source: str = "", is_stored: bool = True) -> None:
        """Add a span, so that it is found from now on; a known one keeps the text and source that it has.

        Args:
            tokens: Its token ids.
            text: Its text; "": unknown.
            source: Where it came from.
            is_stored: Its KV is stored, or will be; otherwise it was only given with a question.
        """
        ids = _as_ids(tokens)
        if not len(ids):
            return
        digest = _digest(ids)
        with self._lock:
            number = self._numbers.pop(digest, None)
            if number is not None:
                self._numbers[digest] = number
                self._stored[number] |= is_stored
                label = self._labels[number]
                self._labels[number] = label[0] or text, label[1] or source
                return
            if len(self) >= self._max_spans:
                self._drop(next(iter(self._numbers)))
            self._append(ids, digest, (text, source), is_stored)
            if self._end - int(self._starts[self._n_indexed]) >= _BATCH:
                self._index_added()

    def discard(self, tokens: Ids) -> None:
        """Forget a span; ids that are not known are no error."""
        digest = _digest(_as_ids(tokens))
        with self._lock:
            if digest in self._numbers:
                self._drop(digest)

    def sharing(self, ids: Ids, source: str) -> list[KnownSpan]:
        """Return all spans of a source that share `SHARED_TOKENS` consecutive tokens with the given ids.

        Unlike `find` it is exhaustive: it reads all known spans and misses none.
        """
        wanted = _as_ids(ids)
        if len(wanted) < SHARED_TOKENS:
            return []
        with self._lock:
            starts, end = self._starts[: len(self._digests) + 1], self._end
            wanted_grams = grams(hashed_ids(wanted), SHARED_TOKENS)
            is_shared = np.isin(grams(hashed_ids(self._arena[:end]), SHARED_TOKENS), wanted_grams)
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_shared)])
            first = starts[:-1].clip(0, len(is_shared))
            last = np.maximum(first, (starts[1:] - SHARED_TOKENS + 1).clip(0, len(is_shared)))
            shares = (before[last] > before[first]) & self._alive[: len(self._digests)]
            numbers = np.flatnonzero(shares)
            return [
                KnownSpan(tuple(self._arena[starts[at] : starts[at + 1]].tolist()), *self._labels[at])
                for at in numbers.tolist()
                if self._labels[at][1] == source
            ]

    def find(self, ids: Ids, given: Collection[str] | None = None) -> list[Match]:
        """Return the matches of known spans in ids, left to right and without overlap.

        Args:
            ids: The ids.
            given: Texts of the spans that count although they are not stored; None: all count.
        """
        prompt = _as_ids(ids)
        with self._lock:
            self._index_added()
            self._compared = 0
            if len(prompt) < self._min_tokens - 2 or not self._numbers:
                return []
            at, place = self._anchors.find(prompt)
            starts = self._starts[: self._n_indexed + 1]
            number = np.searchsorted(starts, place, "right") - 1
            counts = self._alive[number]
            if given is not None:
                asked = [each for each in np.unique(number) if self._labels[each][0] in given]
                counts &= self._stored[number] | np.isin(number, asked)
            groups = [np.flatnonzero(counts & (self._stored[number] == each)) for each in (True, False)]
            stored, offered = (
                self._matches(prompt, self._search(prompt, at[rows], place[rows], number[rows])) for rows in groups
            )
            return _chosen(stored, offered, self._min_altered_tokens) if offered else stored

    def _search(self, prompt: Array, at: Array, place: Array, number: Array) -> Iterable[tuple[int, int, int, int]]:
        if not len(at):
            return ()
        starts = self._starts[: self._n_indexed + 1]
        search = Search(
            prompt, self._arena, starts[:-1], starts[1:], self._min_tokens, self._min_altered_tokens, self._anchors.gram
        )
        found = search.find(at, place, number)
        self._compared += search.compared
        return found

    def _matches(self, prompt: Array, found: Iterable[tuple[int, int, int, int]]) -> list[Match]:
        spans: dict[int, KnownSpan] = {}
        matches = []
        for lo, hi, number, place in found:
            if not (prompt[lo:hi] == self._arena[place : place + hi - lo]).all():
                continue  # should never happen, but a wrong row would give a wrong answer
            start, end = int(self._starts[number]), int(self._starts[number + 1])
            if number not in spans:
                spans[number] = KnownSpan(tuple(self._arena[start:end].tolist()), *self._labels[number])
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

    def _append(self, ids: Array, digest: bytes, label: tuple[str, str], is_stored: bool) -> None:
        number, start = len(self._digests), self._end
        self._arena = _with_capacity(self._arena, start + len(ids))
        self._starts, self._alive = _with_capacity(self._starts, number + 2), _with_capacity(self._alive, number + 1)
        self._stored = _with_capacity(self._stored, number + 1)
        self._arena[start : start + len(ids)] = ids
        self._starts[number + 1] = start + len(ids)
        self._alive[number], self._stored[number] = True, is_stored
        self._numbers[digest] = number
        self._digests.append(digest)
        self._labels.append(label)

    def _drop(self, digest: bytes) -> None:
        number = self._numbers.pop(digest)
        self._labels[number] = "", ""
        self._digests[number], self._alive[number] = None, False
        self._n_discarded_tokens += int(self._starts[number + 1] - self._starts[number])
        if self._n_discarded_tokens > max(1 << 16, self._end // 2):
            self._compact()

    def _index_added(self) -> None:
        """Index the spans that were added since the last call."""
        first, last = self._n_indexed, len(self._digests)
        if first == last:
            return
        base, sizes = int(self._starts[first]), np.diff(self._starts[first : last + 1])
        sizes[~self._alive[first:last]] *= -1
        self._anchors.add(self._arena[base : self._end], base, sizes)
        self._n_indexed = last

    def _compact(self) -> None:
        """Free the memory of discarded spans. The others keep their order, so anchors need not be sorted again."""
        self._index_added()
        count = len(self._digests)
        starts, alive = self._starts[: count + 1], self._alive[:count]
        sizes = np.where(alive, np.diff(starts), 0)
        new_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

        def moved(places: Array) -> Array:
            number = np.searchsorted(starts, places, "right") - 1
            new_places: Array = np.where(alive[number], places - starts[number] + new_starts[number], -1)
            return new_places

        self._anchors.move(moved)
        kept = np.flatnonzero(alive)
        self._arena = _with_capacity(self._arena[: self._end][np.repeat(alive, np.diff(starts))], 1024)
        self._digests = [self._digests[number] for number in kept]
        self._labels = [self._labels[number] for number in kept]
        self._starts = _with_capacity(np.append(new_starts[:-1][kept], new_starts[-1]), 1025)
        self._alive = _with_capacity(np.ones(len(kept), bool), 1024)
        self._stored = _with_capacity(self._stored[:count][kept], 1024)
        renumbered = np.cumsum(alive) - 1
        self._numbers = {digest: int(renumbered[number]) for digest, number in self._numbers.items()}
        self._n_indexed, self._n_discarded_tokens = len(kept), 0


def _chosen(stored: Sequence[Match], given: Sequence[Match], least: int) -> list[Match]:
    """Return matches of stored and of given spans without overlap; each are sorted and without overlap in themselves.

    If runs of at least `least` tokens of stored spans cover less than `COVERED_SHARE` of a match of a given one, this
    has its tokens and they keep the rest, of which parts of less than `least` tokens beside it are left out; else they
    have them.
    """
    preferred = list[Match]()
    for match, others in _beside(given, stored):
        long = [each for each in others if each.hi - each.lo >= least]  # shorter runs may be of a similar text
        covered = sum(min(each.hi, match.hi) - max(each.lo, match.lo) for each in long)
        if covered < COVERED_SHARE * (match.hi - match.lo):
            preferred.append(match)
    near = [replace(match, lo=match.lo - MAX_GAP_TOKENS, hi=match.hi + MAX_GAP_TOKENS) for match in preferred]
    rest = list[Match]()
    for (match, beside), (_, others) in zip(_beside(stored, near), _beside(stored, preferred), strict=True):
        is_whole = not others and match.hi - match.lo >= len(match.span.tokens) - 2
        ends, begins = [match.lo, *(each.hi for each in others)], [*(each.lo for each in others), match.hi]
        for lo, hi in zip(ends, begins, strict=True):
            if is_whole or hi - lo >= least or not beside:
                rest.append(replace(match, lo=lo, hi=hi, row=match.row + lo - match.lo))
    return sorted([*preferred, *rest], key=lambda match: match.lo)


def _beside(matches: Sequence[Match], others: Sequence[Match]) -> Iterator[tuple[Match, Sequence[Match]]]:
    """Yield each match with the others that overlap it."""
    first = 0
    for match in matches:
        while first < len(others) and others[first].hi <= match.lo:
            first += 1
        last = first
        while last < len(others) and others[last].lo < match.hi:
            last += 1
        yield match, others[first:last]


def _as_ids(tokens: Ids) -> Array:
    return np.asarray(tokens, np.int32)


def _digest(ids: Array) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _with_capacity(array: Array, size: int) -> Array:
    """Return an array of at least this size; one that must grow gets at least half as much again."""
    if len(array) >= size:
        return array
    larger = np.zeros(max(size, len(array) + len(array) // 2), array.dtype)
    larger[: len(array)] = array
    return larger
