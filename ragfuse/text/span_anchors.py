"""Anchors of known spans: hashes of a few successive tokens, chosen by winnowing, in sorted arrays.

Winnowing (Schleimer et al., 2003) keeps the least of every `WINDOW` successive hashes. So any run of
`gram + WINDOW - 1` equal tokens contains an anchor, although only every fourth or fifth hash is kept. A hash may match
by chance, so the caller must compare ids.
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
"""The most places that one hash leads to: its oldest and its newest ones.

A place among the oldest stays among them, so a span with such an anchor is found whatever is added later.
"""
MAX_WHOLE_LENGTHS = 64
"""The most lengths of spans that are found by a hash of all their tokens: each costs a search at every place."""
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_NONE = np.uint64((1 << 64) - 1)
_LOW_BITS = np.uint64((1 << 32) - 1)
_HALF_BITS = np.uint64(32)
_BITS_PER_ENTRY = 16


def oldest_and_newest(counts: Array, oldest: int = OLDEST, newest: int = NEWEST) -> tuple[Array, Array]:
    """Return (group, offset) of at most the first `oldest` and last `newest` members of groups of these sizes."""
    n_taken = np.minimum(counts, oldest + newest)
    group, offset = group_offsets(n_taken)
    skipped = (counts - n_taken)[group]
    return group, np.where(offset < oldest, offset, offset + skipped)


def group_offsets(counts: Array) -> tuple[Array, Array]:
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


def hashed_ids(ids: Array) -> Array:
    """Return a uint64 hash of each id."""
    x = ids.astype(np.uint64) + np.uint64(_ODD[0])
    for odd, shift in ((_ODD[1], 30), (_ODD[2], 27)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(odd)
    x ^= x >> np.uint64(31)
    return x


def grams(hashes: Array, size: int) -> Array:
    """Return the hash of each `size` successive words (from `mixed`), uint64 below 2**32."""
    count = max(0, len(hashes) - size + 1)
    total = np.zeros(count, np.uint64)
    for index in range(size):
        total *= np.uint64(_ODD[3])
        total += hashes[index : index + count]
    total *= np.uint64(_ODD[4])
    return total >> _HALF_BITS


def grams_of_lengths(hashes: Array, lengths: Sequence[int]) -> list[Array]:
    """Return hashes like those of `grams` for each of these lengths, in constant time per place."""
    powers = np.cumprod(np.full(len(hashes) + 1, _ODD[3], np.uint64))
    back = np.cumprod(np.full(len(hashes) + 1, pow(_ODD[3], -1, 1 << 64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes * powers[:-1])])
    found = []
    for length in lengths:
        window = (sums[length:] - sums[: len(sums) - length]) * back[: max(0, len(sums) - length)]
        found.append(((window + np.uint64(length)) * np.uint64(_ODD[4])) >> _HALF_BITS)
    return found


@dataclass(frozen=True, slots=True)
class _Level:
    """Sorted entries with an index of their first bits, because a binary search over all entries misses the cache."""

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

    def oldest_and_newest(self, wanted: Array) -> tuple[Array, Array]:
        """Return (index into `wanted`, place) of the oldest and newest entries of each hash, older ones first."""
        lo = self.below(wanted)
        present = np.flatnonzero(self.entries[np.minimum(lo, len(self.entries) - 1)] & ~_LOW_BITS == wanted)
        lo = lo[present]
        group, offset = oldest_and_newest(self.below(wanted[present] | _LOW_BITS) - lo)
        return present[group], self.entries[lo[group] + offset] & _LOW_BITS


class AnchorLevels:
    """Sorted arrays of `hash << 32 | place`, each more than twice as long as the next one, with a filter of all hashes.

    Each added place is greater than all before, so the older places of a hash are in the longer arrays. The filter has
    one bit for each group of hashes with the same first bits.
    """

    def __init__(self) -> None:
        self._levels: list[_Level] = []
        self._order = 16
        self._bits = np.zeros(1 << self._order - 3, np.uint8)

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def add(self, entries: Array) -> None:
        """Add sorted entries, whose places are greater than all earlier ones."""
        if not len(entries):
            return
        merged = entries
        while self._levels and len(self._levels[-1]) <= 2 * len(merged):
            merged = np.sort(np.concatenate([self._levels.pop().entries, merged]), kind="stable")  # two runs: linear
        self._levels.append(_Level.of(merged))
        self._set_bits([entries])

    def find(self, hashes: Array) -> tuple[Array, Array]:
        """Return (index into `hashes`, place) of the oldest and newest places of each hash, older ones first."""
        at = np.flatnonzero(self._maybe(hashes))
        wanted = hashes[at] << _HALF_BITS
        if not len(wanted):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        found = [level.oldest_and_newest(wanted) for level in self._levels]
        index, place = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(index, kind="stable")
        index, place = at[index[order]], place[order].astype(np.int64)
        if len(self._levels) > 1:
            firsts = np.flatnonzero(ranks(index) == 0)
            group, offset = oldest_and_newest(np.diff(np.append(firsts, len(index))))
            index, place = index[firsts[group] + offset], place[firsts[group] + offset]
        return index, place

    def count(self, hashes: Array) -> Array:
        """Return the number of places of each hash."""
        total = np.zeros(len(hashes), np.int64)
        at = np.flatnonzero(self._maybe(hashes))
        wanted = hashes[at] << _HALF_BITS
        for level in self._levels:
            total[at] += level.below(wanted | _LOW_BITS) - level.below(wanted)
        return total

    def move(self, moved: Callable[[Array], Array]) -> None:
        """Replace every place by `moved(places)`, which must keep their order; -1 removes a place."""
        levels, self._levels = self._levels, []
        for level in levels:
            places = moved((level.entries & _LOW_BITS).astype(np.int64))
            present = places >= 0
            kept = (level.entries[present] & ~_LOW_BITS) | places[present].astype(np.uint64)
            if len(kept):
                self._levels.append(_Level.of(kept))
        self._order = 16
        self._bits = np.zeros(1 << self._order - 3, np.uint8)
        self._set_bits([level.entries for level in self._levels])

    def _set_bits(self, fresh: Sequence[Array]) -> None:
        order = max(16, min(32, (_BITS_PER_ENTRY * len(self)).bit_length()))
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
    """Anchors of spans: positions at whose token hash a span is looked up. All ids lie in one array, span after span.

    Each span of at least `min_tokens` tokens has an anchor between its first and last token. A span whose anchors are
    all shared with other spans gets one more, at a less frequent hash; if it has no such hash, the hash of all tokens
    between its ends serves as its anchor.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens, self._gram = min_tokens, min(6, min_tokens - 2)
        self._short, self._whole = AnchorLevels(), AnchorLevels()
        self._lengths: set[int] = set()  # tokens between the ends of the spans that have a hash of all these tokens

    @property
    def gram(self) -> int:
        """The tokens that one hash covers."""
        return self._gram

    def find(self, ids: Array) -> tuple[Array, Array]:
        """Return pairs (index into ids, place in the array of spans) of which the following tokens may agree."""
        id_hashes = hashed_ids(ids)
        at, place = self._short.find(grams(id_hashes, self._gram))
        lengths = sorted((length for length in self._lengths if length <= len(ids)), reverse=True)
        if not lengths:
            return at, place
        found = [self._whole.find(hashes) for hashes in grams_of_lengths(id_hashes, lengths)]
        begin, where = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(begin, kind="stable")
        order = order[ranks(begin[order]) < NEWEST]  # the longest of those that begin at one index
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
        is_long_enough = lengths >= self._min_tokens
        id_hashes, count = hashed_ids(ids), len(ids) - self._gram + 1
        if count <= 0 or not is_long_enough.any():
            return
        keys = grams(id_hashes, self._gram) << _HALF_BITS | (np.arange(count, dtype=np.uint64) + np.uint64(base))
        inside = is_long_enough[owner[:count]] & (owner[:count] == owner[self._gram - 1 :])
        short = is_long_enough & (size < self._gram + WINDOW + 1)  # may have no whole window between its ends
        entries = np.sort(np.concatenate([_winnow(keys, inside, owner), keys[starts[short] + 1]]))
        hashes, spans = entries >> _HALF_BITS, owner[(entries & _LOW_BITS).astype(np.int64) - base]
        rank = ranks(hashes, spans)  # if a span repeats a hash, its first and last place are kept
        entries = entries[(rank == 0) | np.append(rank[1:] == 0, np.ones(len(rank[:1]), bool))]
        hashes, spans = entries >> _HALF_BITS, owner[(entries & _LOW_BITS).astype(np.int64) - base]
        first = ranks(hashes) + self._short.count(hashes) < OLDEST
        without_anchor = is_long_enough.copy()
        without_anchor[spans[first]] = False
        if without_anchor.any():
            at = np.arange(count)
            between = without_anchor[owner[:count]] & (at > starts[owner[:count]])
            between &= at + self._gram < ends[owner[:count]]
            rarer, spans = self._rare_keys(np.sort(keys[between]), hashes, owner, base)
            without_anchor[spans] = False
            entries = np.sort(np.concatenate([entries, rarer]))
        self._short.add(entries)
        self._add_wholes(id_hashes, starts[without_anchor], size[without_anchor], base)

    def _rare_keys(self, keys: Array, taken: Array, owner: Array, base: int) -> tuple[Array, Array]:
        """Return a key for each span whose hash has few places (less than `OLDEST` before it), and the span of each.

        Args:
            keys: All possible keys of the spans without an anchor, sorted.
            taken: Hashes of the other new anchors, sorted.
            owner: The span of each token.
            base: Place of the first token.
        """
        hashes, spans = keys >> _HALF_BITS, owner[(keys & _LOW_BITS).astype(np.int64) - base]
        others = np.searchsorted(taken, hashes, "right") - np.searchsorted(taken, hashes)
        rank = ranks(hashes) + others + self._short.count(hashes)
        free = np.flatnonzero(rank < OLDEST)
        order = free[np.lexsort((rank[free], spans[free]))]
        order = order[ranks(spans[order]) == 0]
        return keys[order], spans[order]

    def _add_wholes(self, id_hashes: Array, starts: Array, sizes: Array, base: int) -> None:
        entries = []
        for start, size in zip(starts.tolist(), (sizes - 2).tolist(), strict=True):
            if size in self._lengths or len(self._lengths) < MAX_WHOLE_LENGTHS:
                self._lengths.add(size)
                [hashed] = grams_of_lengths(id_hashes[start + 1 : start + 1 + size], [size])
                entries.append(hashed[0] << _HALF_BITS | np.uint64(base + start + 1))
        self._whole.add(np.sort(np.array(entries, np.uint64)))


def _winnow(keys: Array, inside: Array, owner: Array) -> Array:
    """Return the least key of each window that lies in one span, without repetitions."""
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
