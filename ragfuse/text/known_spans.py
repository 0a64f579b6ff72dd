"""Find known spans (the token ids of chunks) in a prompt, including cut or edited spans.

A prompt is tokenised as a whole, so the first and the last token of a text may merge with
neighbouring text. If a text is wrapped, escaped, numbered or shortened in a prompt, the prompt has
only parts of the text's ids. Every match is a run of ids that prompt and span have in common.

Anchors select the few spans that a prompt may contain. An anchor is the hash of a few successive
ids of a span. Winnowing (Schleimer et al., 2003) keeps the minimum of every `WINDOW` successive
hashes. So if prompt and span share `WINDOW` + 5 successive ids, the prompt has an anchor of the
span. The prompt is then compared with the selected spans only, by the hashes of every
`MIN_RUN_TOKENS` successive ids.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ragfuse.types.prompt import Segment

MIN_ALTERED_TOKENS = 32
"""Default minimum number of matching tokens of an altered span."""
MAX_SPANS = 1 << 18
"""Default maximum number of spans in the index."""
MIN_RUN_TOKENS = 4
"""Minimum tokens of a run that prompt and span have in common."""
MAX_GAP_TOKENS = 16
"""Maximum tokens between two successive runs of one span, both in the prompt and in the span."""
SHARED_TOKENS = 24
"""Minimum consecutive tokens that a span must share with a run in `KnownSpans.sharing`."""
COVERED_SHARE = 0.9
"""A match of an unstored span is dropped if stored spans cover at least this share of the match."""
WINDOW = 8
"""Number of successive hashes whose minimum is an anchor."""
ANCHOR_TOKENS = 6
"""Maximum number of tokens that are hashed into an anchor."""
SPANS_PER_ANCHOR = 8
"""Maximum spans tried for an anchor in each array of the index, newest spans first."""
CELL_TOKENS = 32
"""Length in tokens of the cells into which a prompt is divided."""
SPANS_PER_CELL = 4
"""Maximum spans compared per cell of a prompt. Spans with the most anchors come first."""
PAIRS_PER_TOKEN = 64
"""Pairs of equal hashes are limited to `PAIRS_PER_TOKEN * (prompt tokens + 1024)`."""
LOOK_BACK_RUNS = 8
"""Maximum number of earlier runs of a span that are tried as the predecessor of a run."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = 32
_FIRST_BITS = 48
_LOW_BITS = (1 << 32) - 1

Array = NDArray[Any]
Ids = Sequence[int] | Array
Run = tuple[int, int, int, int]
"""(span, lo, hi, shift): tokens lo:hi of the prompt equal ids lo + shift : hi + shift.

`span` is an index into the compared spans. `lo + shift` is an index into their concatenated ids.
"""


@dataclass(slots=True)
class _Entry:
    ids: Array
    text: str
    source: str
    is_stored: bool

    def segment(self, start: int, row: int, n_tokens: int, source: str) -> Segment:
        """Return `n_tokens` rows of the span, from `row` on, as a chunk without keys."""
        run = tuple(self.ids.tolist())
        found = Segment(run[row : row + n_tokens], start, "chunk", (), source, self.text)
        if n_tokens == len(run):
            return found
        return replace(found, rows=(row, row + n_tokens), stored=run)


class KnownSpans:
    """An index of known spans (token ids of chunks), which finds the spans that a prompt contains.

    An unaltered span is found whole, with or without its first and last token. An altered span is
    found in parts: runs of at least 4 equal tokens, in the span's order. At most 16 tokens may lie
    between two runs, both in the prompt and in the span. The runs must have `min_altered_tokens`
    tokens in total.
    Each run is returned as a separate segment. If several spans match the same tokens, the longest
    match wins. A match of an unstored span is dropped if stored spans cover most of the match.

    The time of `find` depends on the length of the prompt, and hardly on the number of spans.
    Thread-safe.

    Args:
        min_tokens: Minimum tokens of a span that can be found.
        min_altered_tokens: Minimum matching tokens of an altered span.
        max_spans: Maximum number of spans. The span that was matched or added longest ago is
            evicted.
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
        self._numbers: dict[bytes, int] = {}  # by ids
        self._texts: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}  # by number, least recently matched first
        self._n_numbers = self._n_discarded = 0
        self._anchor_tokens = min(ANCHOR_TOKENS, min_tokens - 2)
        # Sorted arrays of `hash << 32 | number`, each over 4 times as long as the next array.
        self._levels: list[Array] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, tokens: Ids) -> bool:
        return _as_ids(tokens).tobytes() in self._numbers

    def add(self, tokens: Ids, text: str = "", source: str = "", is_stored: bool = True) -> None:
        """Add a span to the index. If the index has the span already, the old text or source is
        replaced only if it is empty. A span of fewer than `min_tokens` tokens is ignored.

        Args:
            tokens: Token ids of the span.
            text: Text of the span. "" if unknown.
            source: Where the text came from.
            is_stored: True if the span's KV is or will be stored. False if the span is known
                only from the documents of a question.
        """
        ids = _as_ids(tokens)
        if len(ids) < self._min_tokens:
            return
        key = ids.tobytes()
        with self._lock:
            number = self._numbers.get(key)
            if number is not None:
                entry = self._entries[number] = self._entries.pop(number)
                entry.is_stored |= is_stored
                entry.text, entry.source = entry.text or text, entry.source or source
                self._texts[entry.text] = number
                return
            if len(self) >= self._max_spans:
                self._drop(next(iter(self._entries)))
            number = self._numbers[key] = self._texts[text] = self._n_numbers
            self._n_numbers += 1
            entry = self._entries[number] = _Entry(
                np.frombuffer(key, np.int32), text, source, is_stored
            )
            hashes = _hashed(entry.ids[1:-1], self._anchor_tokens) >> _HALF
            least = sliding_window_view(hashes, min(WINDOW, len(hashes))).min(axis=1)
            self._add_anchors(np.unique(least) << _HALF | np.uint64(number))

    def discard(self, tokens: Ids) -> None:
        """Remove a span from the index. Do nothing if the span is not in the index."""
        with self._lock:
            number = self._numbers.get(_as_ids(tokens).tobytes())
            if number is not None:
                self._drop(number)

    def sharing(self, runs: Sequence[Ids], sources: Collection[str]) -> list[Segment]:
        """Return spans from `sources` that share `SHARED_TOKENS` successive tokens with any run."""
        hashes = [_hashed(_as_ids(run), SHARED_TOKENS) for run in runs]
        wanted = np.unique(np.concatenate(hashes)) if hashes else ()
        with self._lock:
            return [
                entry.segment(0, 0, len(entry.ids), entry.source)
                for entry in self._entries.values()
                if entry.source in sources
                and np.isin(_hashed(entry.ids, SHARED_TOKENS), wanted).any()
            ]

    def find(self, ids: Ids, given: Mapping[str, str] | None = None) -> list[Segment]:
        """Return the known spans in a prompt as chunks without keys, in order, without overlap.

        Args:
            ids: The prompt's token ids.
            given: Sources by text. A span whose KV is not stored is found only if `given` has the
                span's text. None means that all spans may be found.
        """
        prompt = _as_ids(ids)
        with self._lock:
            numbers = self._candidates(prompt, given)
            if not numbers:
                return []
            comparison = _Comparison([self._entries[number] for number in numbers])
            found = list[Segment]()
            for index, lo, hi, shift in comparison.chosen(prompt, self._min_altered_tokens):
                number, row = numbers[index], lo + shift - int(comparison.starts[index])
                entry = self._entries[number]
                if not (prompt[lo:hi] == entry.ids[row : row + hi - lo]).all():
                    continue  # a hash collision; a wrong row would give a wrong answer
                self._entries[number] = self._entries.pop(number)
                source = (given or {}).get(entry.text, entry.source)
                found.append(entry.segment(lo, row, hi - lo, source))
            return sorted(found, key=lambda segment: segment.start)

    def _candidates(self, prompt: Array, given: Mapping[str, str] | None) -> list[int]:
        """Return the numbers of the spans with which the prompt is compared.

        These are the given spans, spans with the most anchors in a cell, and spans with an anchor
        that no other span has.
        """
        hashes = _hashed(prompt, self._anchor_tokens) >> _HALF << _HALF
        order = np.argsort(hashes)  # sorted values are faster to look up
        wanted, n_spans = hashes[order], np.zeros(len(hashes), np.int64)
        parts = [np.zeros((2, 0), np.int64)]
        for level in self._levels:
            first = np.searchsorted(level, wanted)
            hits = np.flatnonzero(
                level[np.minimum(first, len(level) - 1)] >> _HALF << _HALF == wanted
            )
            last = np.searchsorted(level, wanted[hits] | _LOW_BITS, "right")
            count = np.minimum(last - first[hits], SPANS_PER_ANCHOR)
            n_spans[hits] += count
            group, offset = _members(count)
            number = (level[last[group] - 1 - offset] & _LOW_BITS).astype(np.int64)
            parts.append(np.stack((hits[group], number)))
        group, number = np.concatenate(parts, axis=1)
        numbers, index, n_anchors = np.unique(number, return_inverse=True, return_counts=True)
        entries = [self._entries.get(each) for each in numbers.tolist()]
        is_usable = np.array(
            [entry is not None and (given is None or entry.is_stored) for entry in entries], bool
        )
        cells = np.unique(order[group] // CELL_TOKENS << 32 | index)
        cells = cells[is_usable[cells & 0xFFFFFFFF]]
        cell, index = cells >> 32, cells & 0xFFFFFFFF
        order = np.lexsort((-n_anchors[index], cell))
        # Of nearly equal spans, the right span has an anchor that no other span has.
        only = number[n_spans[group] == 1]
        own = np.flatnonzero(is_usable & np.isin(numbers, only))
        chosen = np.union1d(index[order[_ranks(cell[order]) < SPANS_PER_CELL]], own)
        chosen = numbers[chosen[np.argsort(-n_anchors[chosen], kind="stable")]]
        asked = [self._texts[text] for text in given or () if text in self._texts]
        found, room = list[int](), PAIRS_PER_TOKEN * (len(prompt) + 1024)
        for each in dict.fromkeys([*asked, *chosen.tolist()]):
            room -= len(self._entries[each].ids)
            if room < 0:
                break
            found.append(each)
        return found

    def _add_anchors(self, anchors: Array) -> None:
        while self._levels and len(self._levels[-1]) <= 4 * len(anchors):
            anchors = np.concatenate([self._levels.pop(), anchors])
            anchors.sort(kind="stable")  # merges two sorted arrays in linear time
        self._levels.append(anchors)

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        del self._numbers[entry.ids.tobytes()]
        if self._texts.get(entry.text) == number:
            del self._texts[entry.text]
        self._n_discarded += 1
        if self._n_discarded > max(1024, len(self)):
            alive = np.fromiter(self._entries, np.uint64)
            kept = [level[np.isin(level & _LOW_BITS, alive)] for level in self._levels]
            self._levels, self._n_discarded = [level for level in kept if len(level)], 0


class _Comparison:
    """A comparison of a prompt with a few spans. `_ids` has the concatenated ids of all spans."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        sizes = np.array([len(entry.ids) for entry in entries])
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self._ids = np.concatenate([entry.ids for entry in entries])
        self._owner = np.repeat(np.arange(len(entries)), sizes)
        self._entries = entries

    def chosen(self, prompt: Array, least: int) -> Iterator[Run]:
        """Yield the runs of the longest chains. No two chains share tokens of the prompt.

        Args:
            prompt: The ids of the prompt.
            least: Minimum tokens of a chain that contains no whole span.
        """
        chains = list(self._chains(self._runs(prompt), least))
        stored = np.zeros(len(prompt), bool)
        for chain in chains:
            if self._entries[chain[0][0]].is_stored:
                for _, lo, hi, _ in chain:
                    stored[lo:hi] |= hi - lo >= least  # shorter runs may belong to a similar text
        heap = [
            (-_size(chain), not entry.is_stored, len(entry.ids), chain)
            for chain in chains
            if (entry := self._entries[chain[0][0]]).is_stored
            or np.concatenate([stored[lo:hi] for _, lo, hi, _ in chain]).mean() < COVERED_SHARE
        ]
        heapq.heapify(heap)
        taken = bytearray(len(prompt))
        while heap:
            weight, is_given, size, chain = heapq.heappop(heap)
            chain = list(_remaining(chain, taken))
            if not self._is_enough(chain, least):
                continue
            if _size(chain) < -weight:
                heapq.heappush(heap, (-_size(chain), is_given, size, chain))
                continue
            for run in chain:
                taken[run[1] : run[2]] = b"\1" * (run[2] - run[1])
                yield run

    def _runs(self, prompt: Array) -> Array:
        """Return runs whose hashes are equal in prompt and span. Omit runs inside longer runs.

        Returns:
            int64 [4, R]: the span, lo, hi and shift of each run.
        """
        order = np.argsort(hashes := _hashed(prompt, MIN_RUN_TOKENS))
        hashes, wanted = hashes[order], _hashed(self._ids, MIN_RUN_TOKENS)
        is_used = np.zeros(1 << 16, bool)  # by the first 16 bits of a hash
        is_used[hashes >> _FIRST_BITS] = True
        rows = np.flatnonzero(is_used[wanted >> _FIRST_BITS])
        rows = rows[self._owner[rows] == self._owner[rows + MIN_RUN_TOKENS - 1]]
        first = np.searchsorted(hashes, wanted[rows])
        count = np.searchsorted(hashes, wanted[rows], "right") - first
        rare = np.argsort(count, kind="stable")
        rare = rare[np.cumsum(count[rare]) <= PAIRS_PER_TOKEN * (len(prompt) + 1024)]
        group, offset = _members(count[rare])
        place = rows[rare[group]]
        at = order[first[rare[group]] + offset]
        # Adjacent pairs of equal hashes with the same shift form a run.
        diagonal = (place - at + len(prompt)) * (len(prompt) + 1) + at
        order = np.argsort(diagonal)
        fresh = np.diff(diagonal[order], prepend=-2) != 1
        begins, stops = order[fresh], order[np.append(fresh[1:], True)] if len(order) else order
        runs = np.stack(
            (
                self._owner[place[begins]],
                at[begins],
                at[stops] + MIN_RUN_TOKENS,
                (place - at)[begins],
            )
        )
        owner, lo, hi, _ = runs
        order = np.lexsort((~self._is_whole(*runs), -hi, lo, owner))
        reach = np.maximum.accumulate(owner[order] << 32 | hi[order])
        return runs[:, order[np.diff(reach, prepend=-1) > 0]]

    def _chains(self, runs: Array, least: int) -> Iterator[list[Run]]:
        """Yield chains: lists of one span's runs, in order. Each run is in at most one chain.

        A chain contains a whole span, or at least `least` tokens.
        """
        owner, lo, hi, shift = runs
        size = hi - lo
        is_enough = (size >= least) | self._is_whole(*runs)
        max_cut = np.where(is_enough, 0, size - MIN_RUN_TOKENS)
        # pairs of a run and one of the `LOOK_BACK_RUNS` runs before it
        later, back = np.indices((len(lo), LOOK_BACK_RUNS)).reshape(2, -1)
        later, other = later[later > back], (later - back - 1)[later > back]
        gap = lo[later] - hi[other]
        gaps = gap, gap + shift[later] - shift[other]
        cut = np.maximum(0, -np.minimum(*gaps))
        fits = (cut <= max_cut[later]) & (np.maximum(*gaps) + cut <= MAX_GAP_TOKENS)
        fits &= owner[later] == owner[other]
        gains = size[later] - cut
        # the equal tokens of the best chain that ends with each run, and the run before it
        best, before = size.tolist(), [-1] * len(lo)
        pairs = (column[fits].tolist() for column in (later, other, gains))
        for index, previous, gain in zip(*pairs, strict=True):
            if best[previous] + gain > best[index]:
                best[index], before[index] = best[previous] + gain, previous
        ends = np.flatnonzero(is_enough | (np.array(before) >= 0)).tolist()
        is_used = [False] * len(lo)
        for end in sorted(ends, key=lambda index: -best[index]):
            chain, index = list[Run](), end
            while index >= 0 and not is_used[index]:
                is_used[index] = True
                chain.append(tuple(runs[:, index].tolist()))
                index = before[index]
            if self._is_enough(chain, least):
                yield chain[::-1]

    def _is_enough(self, chain: Sequence[Run], least: int) -> bool:
        return _size(chain) >= least or any(self._is_whole(*run) for run in chain)

    def _is_whole(self, number: Any, lo: Any, hi: Any, shift: Any) -> Any:
        """Return whether a run, or each of several runs, is a whole span."""
        return (lo + shift <= self.starts[number] + 1) & (hi + shift >= self.ends[number] - 1)


def _remaining(chain: Sequence[Run], taken: bytearray) -> Iterator[Run]:
    """Yield the parts of a chain that are not taken. If runs overlap, the first run wins."""
    stop = place = 0
    for number, begin, hi, shift in chain:
        lo = max(begin, stop, place - shift)
        while lo < hi and (begin := taken.find(0, lo, hi)) >= 0:
            lo = taken.find(1, begin, hi)
            lo = hi if lo < 0 else lo
            if lo - begin >= MIN_RUN_TOKENS:
                stop, place = lo, lo + shift
                yield number, begin, lo, shift


def _size(chain: Sequence[Run]) -> int:
    return sum(hi - lo for _, lo, hi, _ in chain)


def _hashed(ids: Array, size: int) -> Array:
    """Return the uint64 hashes of every `size` successive ids."""
    words = (ids.astype(np.uint64) + np.uint64(1)) * _ODD
    words ^= words >> _HALF
    count = max(0, len(ids) - size + 1)
    total = np.zeros(count, np.uint64)
    for index in range(size):
        total = (total ^ words[index : index + count]) * _ODD
        total ^= total >> _HALF
    return total * _ODD


def _members(counts: Array) -> tuple[Array, Array]:
    """For each member of each group, return the group's index and the member's index in it."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def _ranks(column: Array) -> Array:
    """Return the rank (0, 1, 2, ...) of each row among adjacent rows with the same value."""
    first = np.flatnonzero(np.diff(column, prepend=-1))
    return _members(np.diff(np.append(first, len(column))))[1]


def _as_ids(tokens: Ids) -> Array:
    return np.asarray(tokens, np.int32)
