"""Anchors of known spans: hashes of a few successive tokens, chosen by winnowing, in sorted arrays.

Winnowing (Schleimer et al., 2003) keeps the least of every `WINDOW` successive hashes. Thus any agreement of
`gram + WINDOW - 1` tokens contains an anchor, although only every fourth or fifth hash is kept. A hash may match by
chance, so the caller must compare ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WINDOW = 8
"""Number of successive hashes of which the least is kept."""
OLDEST, NEWEST = 2, 6
"""The most places that one hash leads to: its oldest and its newest ones. A place among the oldest stays there, so a
span with such an anchor is found whatever is added later."""
MOST_LENGTHS = 64
"""The most different lengths of spans that are found by a hash of the whole span."""
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_NONE = np.uint64((1 << 64) - 1)
_LOW = np.uint64((1 << 32) - 1)
_HALF = np.uint64(32)
_BITS_EACH = 16


def few(counts: Array, oldest: int = OLDEST, newest: int = NEWEST) -> tuple[Array, Array]:
    """Return (group, offset) of at most the first `oldest` and last `newest` members of groups of these sizes."""
    taken = np.minimum(counts, oldest + newest)
    group, offset = spread(taken)
    skipped = (counts - taken)[group]
    return group, np.where(offset < oldest, offset, offset + skipped)


def spread(counts: Array) -> tuple[Array, Array]:
    """Return (group, offset) of all members of groups of these sizes."""
    group = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return group, np.arange(len(group)) - firsts[group]


def ranks(*columns: Array) -> Array:
    """Return the rank (0, 1, 2, ...) of each row among adjacent rows with the same values."""
    n = len(columns[0])
    fresh = np.ones(n, bool)
    if n:
        fresh[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    firsts = np.flatnonzero(fresh)
    rank: Array = np.arange(n) - firsts[np.cumsum(fresh) - 1]
    return rank


def mixed(ids: Array) -> Array:
    """Return a uint64 hash of each id."""
    x = ids.astype(np.uint64) + np.uint64(_ODD[0])
    for odd, shift in ((_ODD[1], 30), (_ODD[2], 27)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(odd)
    x ^= x >> np.uint64(31)
    return x


def grams(words: Array, size: int) -> Array:
    """Return the hash of each `size` successive words (from `mixed`), uint64 below 2**32."""
    count = max(0, len(words) - size + 1)
    total = np.zeros(count, np.uint64)
    for index in range(size):
        total *= np.uint64(_ODD[3])
        total += words[index : index + count]
    total *= np.uint64(_ODD[4])
    return total >> _HALF


def wholes(words: Array, lengths: Sequence[int]) -> list[Array]:
    """Return hashes like those of `grams` for each of these lengths, in constant time per place."""
    powers = np.cumprod(np.full(len(words) + 1, _ODD[3], np.uint64))
    back = np.cumprod(np.full(len(words) + 1, pow(_ODD[3], -1, 1 << 64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words * powers[:-1])])
    found = []
    for length in lengths:
        window = (sums[length:] - sums[: len(sums) - length]) * back[: max(0, len(sums) - length)]
        found.append(((window + np.uint64(length)) * np.uint64(_ODD[4])) >> _HALF)
    return found


@dataclass(frozen=True, slots=True)
class _Level:
    """Sorted entries, with an index of their first bits, as a binary search over all is slowed by cache misses."""

    entries: Array
    firsts: Array
    shift: int

    @classmethod
    def of(cls, entries: Array) -> _Level:
        order = max(1, min(31, len(entries).bit_length() - 3))
        firsts = np.zeros((1 << order) + 1, np.int64)
        np.cumsum(
            np.bincount((entries >> np.uint64(64 - order)).astype(np.int64), minlength=1 << order), out=firsts[1:]
        )
        return cls(entries, firsts.astype(np.uint32), 64 - order)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.entries.nbytes + self.firsts.nbytes

    def below(self, wanted: Array) -> Array:
        """Return for each wanted value how many entries are less."""
        bucket = (wanted >> np.uint64(self.shift)).astype(np.int64)
        lo = self.firsts[bucket].astype(np.int64)
        left = self.firsts[bucket + 1] - lo
        while left.any():
            half = left >> 1
            less = (left > 0) & (self.entries[np.minimum(lo + half, len(self.entries) - 1)] < wanted)
            lo = np.where(less, lo + half + 1, lo)
            left = np.where(less, left - half - 1, half)
        return lo

    def few(self, wanted: Array) -> tuple[Array, Array]:
        """Return (index into `wanted`, place) of the oldest and newest entries of each hash, older ones first."""
        lo = self.below(wanted)
        there = np.flatnonzero(self.entries[np.minimum(lo, len(self.entries) - 1)] & ~_LOW == wanted)
        lo = lo[there]
        group, offset = few(self.below(wanted[there] | _LOW) - lo)
        return there[group], self.entries[lo[group] + offset] & _LOW


class AnchorLevels:
    """Sorted arrays of `hash << 32 | place`, each more than twice as long as the next one, and bits of all hashes.

    Places only grow, so of one hash the older ones stand in the longer arrays.
    """

    def __init__(self) -> None:
        self._levels: list[_Level] = []
        self._order = 16
        self._bits = np.zeros(1 << self._order - 3, np.uint8)

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    @property
    def nbytes(self) -> int:
        """Bytes of arrays and bits."""
        return sum(level.nbytes for level in self._levels) + self._bits.nbytes

    def add(self, entries: Array) -> None:
        """Add sorted entries, whose places are greater than all earlier ones."""
        if not len(entries):
            return
        merged = entries
        while self._levels and len(self._levels[-1]) <= 2 * len(merged):
            merged = np.sort(np.concatenate([self._levels.pop().entries, merged]), kind="stable")  # two runs: linear
        self._levels.append(_Level.of(merged))
        self._mark([entries])

    def find(self, hashes: Array) -> tuple[Array, Array]:
        """Return (index into `hashes`, place) of the oldest and newest places of each hash, older ones first."""
        at = np.flatnonzero(self._maybe(hashes))
        wanted = hashes[at] << _HALF
        if not len(wanted):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        found = [level.few(wanted) for level in self._levels]
        index, place = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(index, kind="stable")
        index, place = at[index[order]], place[order].astype(np.int64)
        if len(self._levels) > 1:
            firsts = np.flatnonzero(ranks(index) == 0)
            group, offset = few(np.diff(np.append(firsts, len(index))))
            index, place = index[firsts[group] + offset], place[firsts[group] + offset]
        return index, place

    def count(self, hashes: Array) -> Array:
        """Return the number of places of each hash."""
        total = np.zeros(len(hashes), np.int64)
        at = np.flatnonzero(self._maybe(hashes))
        wanted = hashes[at] << _HALF
        for level in self._levels:
            total[at] += level.below(wanted | _LOW) - level.below(wanted)
        return total

    def move(self, moved: Callable[[Array], Array]) -> None:
        """Replace every place by `moved(places)`, which must keep their order; -1 removes a place."""
        levels, self._levels = self._levels, []
        for level in levels:
            places = moved((level.entries & _LOW).astype(np.int64))
            left = places >= 0
            kept = (level.entries[left] & ~_LOW) | places[left].astype(np.uint64)
            if len(kept):
                self._levels.append(_Level.of(kept))
        self._order = 16
        self._bits = np.zeros(1 << self._order - 3, np.uint8)
        self._mark([level.entries for level in self._levels])

    def _mark(self, fresh: Sequence[Array]) -> None:
        order = max(16, min(32, (_BITS_EACH * len(self)).bit_length()))
        if order > self._order:
            self._order, self._bits = order, np.zeros(1 << order - 3, np.uint8)
            fresh = [level.entries for level in self._levels]
        for entries in fresh:
            bit = entries >> np.uint64(64 - self._order)
            np.bitwise_or.at(self._bits, bit >> np.uint64(3), np.uint8(1) << (bit & np.uint64(7)).astype(np.uint8))

    def _maybe(self, hashes: Array) -> Array:
        bit = hashes >> np.uint64(32 - self._order)
        flags: Array = self._bits[bit >> np.uint64(3)] >> (bit & np.uint64(7)).astype(np.uint8) & np.uint8(1)
        return flags


class Anchors:
    """Anchors of spans that are stored one after another in one array of ids.

    Each span of at least `shortest` tokens has an anchor between its first and last token. If others have its anchors
    already, it gets a rarer one; if it has none, a hash of all tokens between its ends.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest, self._gram = shortest, min(6, shortest - 2)
        self._short, self._whole = AnchorLevels(), AnchorLevels()
        self._lengths: set[int] = set()  # between the ends, of spans that are met by a hash of the whole

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._short.nbytes + self._whole.nbytes

    @property
    def gram(self) -> int:
        """Tokens of an anchor."""
        return self._gram

    def find(self, ids: Array) -> tuple[Array, Array]:
        """Return (index into ids, place in the array) pairs from which on the ids may agree."""
        words = mixed(ids)
        at, place = self._short.find(grams(words, self._gram))
        lengths = sorted((length for length in self._lengths if length <= len(ids)), reverse=True)
        if not lengths:
            return at, place
        found = [self._whole.find(hashes) for hashes in wholes(words, lengths)]
        begin, where = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(begin, kind="stable")
        order = order[ranks(begin[order]) < NEWEST]  # of those that begin here the longest
        return np.append(at, begin[order]), np.append(place, where[order])

    def move(self, moved: Callable[[Array], Array]) -> None:
        """Replace every place by `moved(places)`, which must keep their order; -1 removes a place."""
        self._short.move(moved)
        self._whole.move(moved)
        if not len(self._whole):
            self._lengths.clear()

    def add(self, ids: Array, base: int, lengths: Array) -> None:
        """Add consecutive spans of these lengths in `ids`, stored from place `base` on; negative: skipped."""
        size = np.abs(lengths)
        ends = np.cumsum(size)
        starts, owner = ends - size, np.repeat(np.arange(len(size)), size)
        fit = lengths >= self._shortest
        words, count = mixed(ids), len(ids) - self._gram + 1
        if count <= 0 or not fit.any():
            return
        keys = grams(words, self._gram) << _HALF | (np.arange(count, dtype=np.uint64) + np.uint64(base))
        inside = fit[owner[:count]] & (owner[:count] == owner[self._gram - 1 :])
        brief = fit & (size < self._gram + WINDOW + 1)  # may have no whole window between its ends
        entries = np.sort(np.concatenate([_winnowed(keys, inside, owner), keys[starts[brief] + 1]]))
        hashes, whose = entries >> _HALF, owner[(entries & _LOW).astype(np.int64) - base]
        rank = ranks(hashes, whose)  # of a hash that a span has again and again, the first place and the last
        entries = entries[(rank == 0) | np.append(rank[1:] == 0, np.ones(len(rank[:1]), bool))]
        hashes, whose = entries >> _HALF, owner[(entries & _LOW).astype(np.int64) - base]
        first = ranks(hashes) + self._short.count(hashes) < OLDEST
        wanting = fit.copy()
        wanting[whose[first]] = False
        if wanting.any():
            at = np.arange(count)
            between = wanting[owner[:count]] & (at > starts[owner[:count]])
            between &= at + self._gram < ends[owner[:count]]
            rarer, whose = self._rarer(np.sort(keys[between]), hashes, owner, base)
            wanting[whose] = False
            entries = np.sort(np.concatenate([entries, rarer]))
        self._short.add(entries)
        self._add_wholes(words, starts[wanting], size[wanting], base)

    def _rarer(self, keys: Array, taken: Array, owner: Array, base: int) -> tuple[Array, Array]:
        """One key of each span by which it is among the first, and whose it is."""
        hashes, whose = keys >> _HALF, owner[(keys & _LOW).astype(np.int64) - base]
        others = np.searchsorted(taken, hashes, "right") - np.searchsorted(taken, hashes)
        rank = ranks(hashes) + others + self._short.count(hashes)
        free = np.flatnonzero(rank < OLDEST)
        order = free[np.lexsort((rank[free], whose[free]))]
        order = order[ranks(whose[order]) == 0]
        return keys[order], whose[order]

    def _add_wholes(self, words: Array, starts: Array, sizes: Array, base: int) -> None:
        entries = []
        for start, size in zip(starts.tolist(), (sizes - 2).tolist(), strict=True):
            if size in self._lengths or len(self._lengths) < MOST_LENGTHS:
                self._lengths.add(size)
                [hashed] = wholes(words[start + 1 : start + 1 + size], [size])
                entries.append(hashed[0] << _HALF | np.uint64(base + start + 1))
        self._whole.add(np.sort(np.array(entries, np.uint64)))


def _winnowed(keys: Array, inside: Array, owner: Array) -> Array:
    """The least key of each window that lies in one span, once."""
    if len(keys) < WINDOW:
        return keys[:0]
    least, whole = np.where(inside, keys, _NONE), inside[: len(keys) - WINDOW + 1].copy()
    for step in (1, 2, 4):
        least = np.minimum(least[:-step], least[step:])
    whole &= inside[WINDOW - 1 :] & (owner[: len(whole)] == owner[WINDOW - 1 : WINDOW - 1 + len(whole)])
    picked = least[whole]
    fresh = np.ones(len(picked), bool)
    fresh[1:] = picked[1:] != picked[:-1]
    chosen: Array = picked[fresh]
    return chosen
