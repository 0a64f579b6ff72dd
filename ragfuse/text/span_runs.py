"""Finds where the ids of a prompt agree with known spans.

Anchors are extended to runs of equal ids, runs of one span are linked to chains, and the longest chains are chosen. All
steps but the last work on arrays. Their cost is bounded by the length of the prompt: where a span repeats itself only a
few candidates are kept, and ids are compared, the best candidates first, until a budget is spent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ragfuse.text.span_anchors import Array, group_offsets, ranks

MIN_RUN_TOKENS = 4
"""The least tokens of a run."""
MAX_GAP_TOKENS = 16
"""The most tokens between two runs of a chain, in the prompt and in the span."""
COMPARED_TOKENS = 8
"""Tokens that are compared at first on either side of anchors."""
GROUP_TOKENS = 32
"""Anchors at most this many tokens apart form one group. A prompt is divided into cells of this many tokens."""
MAX_SHIFTS = 6
"""The most shifts of one span that are tried in a cell of the prompt, unless the span is no longer than a cell."""
MAX_ROUNDS = 24
"""The most rounds of searching for neighbours of the runs found in the round before."""
LOOK_BACK_RUNS = 8
"""The most earlier runs that are considered as a run's predecessor in a chain."""
MAX_REWEIGHED = 8
"""How often a chain that lost tokens to others may compete again by the tokens that remain."""
COMPARED_PER_TOKEN = 256
"""The most ids that are compared for each token of the prompt."""
_REACH = MAX_GAP_TOKENS + MIN_RUN_TOKENS
_OUTSIDE_PROMPT, _OUTSIDE_SPAN = -1, -2
"""Stand for ids beyond the ends of a prompt and of a span; they equal no id, nor each other."""

PlacedRun = tuple[int, int, int, int]
"""A run as (lo, hi, number, shift), or as a match: (lo, hi, number of the span, place of `lo` in the arena)."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs in arrays: tokens lo:hi of the prompt equal the ids of span `number` at lo + shift : hi + shift."""

    number: Array
    shift: Array
    lo: Array
    hi: Array

    def __len__(self) -> int:
        return len(self.lo)

    def select(self, rows: Array) -> Runs:
        """Return only these rows."""
        return Runs(self.number[rows], self.shift[rows], self.lo[rows], self.hi[rows])

    def joined(self, other: Runs) -> Runs:
        """Return these runs followed by the others."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("number", "shift", "lo", "hi"))
        return Runs(*(np.concatenate(pair) for pair in pairs))


@dataclass
class Search:
    """A search of one prompt for known spans. Use it once.

    Args:
        ids: The prompt.
        arena: The ids of all spans, one after another.
        starts: Place in the arena where each span begins.
        ends: Place in the arena after each span.
        min_tokens: The least tokens of a span that can be found.
        min_altered_tokens: The least tokens of an altered span that must agree.
        gram: Tokens of an anchor.

    Attributes:
        compared: Ids compared so far.
        budget: The most ids to compare.
    """

    ids: Array
    arena: Array
    starts: Array
    ends: Array
    min_tokens: int
    min_altered_tokens: int
    gram: int
    compared: int = 0
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        self.budget = COMPARED_PER_TOKEN * (len(self.ids) + 64)

    def find(self, at: Array, place: Array, number: Array) -> list[PlacedRun]:
        """Return the best of all overlapping matches, sorted.

        Args:
            at: Positions in the prompt where an anchor of a span was found.
            place: Positions of these anchors in the arena, the array of all spans' ids.
            number: Numbers of the spans of these anchors.

        Returns:
            For each match: tokens lo:hi of the prompt, the number of the span, and the position of `lo` in the arena.
        """
        runs = self._extend(*self._initial_runs(at, place - at, number), GROUP_TOKENS)
        runs = self._without_weak(_without_contained(runs), self.min_altered_tokens // 2)
        runs = self._without_weak(_without_contained(self._with_neighbours(runs)), self.min_altered_tokens)
        order = np.lexsort((runs.lo, runs.lo - runs.hi, runs.lo // MIN_RUN_TOKENS))
        # At most one of the runs that begin within `MIN_RUN_TOKENS` tokens can be chosen, so a few of them are enough.
        few = order[ranks(runs.lo[order] // MIN_RUN_TOKENS) < MIN_RUN_TOKENS]
        return self._select_chains(list(self._chains(runs.select(few))))

    def whole(self, number: Array, lo: Array, hi: Array) -> Array:
        """Return whether places lo:hi are a whole span, possibly without its first and last token."""
        size = self.ends[number] - self.starts[number]
        all_of: Array = (lo <= self.starts[number] + 1) & (hi >= self.ends[number] - 1) & (size >= self.min_tokens)
        return all_of

    # runs

    def _initial_runs(self, at: Array, shift: Array, number: Array) -> tuple[Runs, Array, Array]:
        """Return runs around anchors, and whether each may be extended to the left and to the right."""
        order = np.argsort(shift * (len(self.ids) + 1) + at)  # this sorts by span too: at one shift, spans are in order
        at, shift, number = at[order], shift[order], number[order]
        first = np.ones(len(at), bool)
        first[1:] = (number[1:] != number[:-1]) | (shift[1:] != shift[:-1]) | (at[1:] - at[:-1] > GROUP_TOKENS)
        firsts = np.flatnonzero(first)
        votes = np.diff(np.append(firsts, len(at)))
        lasts = firsts + votes - 1
        number, shift, begin, end = number[firsts], shift[firsts], at[firsts], at[lasts] + self.gram
        order = self._likely_shifts(number, begin, votes, begin + shift)
        order = order[np.lexsort((begin[order], -votes[order]))]
        number, shift, begin, end = number[order], shift[order], begin[order], end[order]
        min_begin = np.maximum(self.starts[number] - shift, 0)
        max_end = np.minimum(self.ends[number] - shift, len(self.ids))
        begin, end = np.maximum(begin - COMPARED_TOKENS, min_begin), np.minimum(end + COMPARED_TOKENS, max_end)
        fits = np.cumsum(end - begin) <= self.budget
        columns = (number, shift, begin, end, min_begin, max_end)
        number, shift, begin, end, min_begin, max_end = (column[fits] for column in columns)
        group, offset = group_offsets(end - begin)
        spot = begin[group] + offset
        same = self.ids[spot] == self.arena[spot + shift[group]]
        self.compared += len(spot)
        bounds = np.ones(len(spot) + 1, bool)  # where another run may begin
        bounds[1:-1] = (same[1:] != same[:-1]) | (group[1:] != group[:-1])
        edges = np.flatnonzero(bounds)
        firsts, lasts = edges[:-1], edges[1:] - 1
        is_run = same[firsts] & (lasts - firsts + 1 >= MIN_RUN_TOKENS) if len(firsts) else np.zeros(0, bool)
        firsts, lasts = firsts[is_run], lasts[is_run]
        group, lo, hi = group[firsts], spot[firsts], spot[lasts] + 1
        runs = Runs(number[group], shift[group], lo, hi)
        return runs, (lo == begin[group]) & (lo > min_begin[group]), (hi == end[group]) & (hi < max_end[group])

    def _likely_shifts(self, number: Array, begin: Array, votes: Array, place: Array) -> Array:
        """Return the rows of the few shifts of a span with the most anchors in each cell of the prompt.

        Where a repetition in the prompt meets one in the span, every shift seems as good as the next. Those at which
        both repetitions begin or end together come first, because only there the text beside them may agree as well.
        """
        cells = np.sort(number * (len(self.ids) // GROUP_TOKENS + 1) + begin // GROUP_TOKENS)
        if not (cells[MAX_SHIFTS:] == cells[:-MAX_SHIFTS]).any():
            return np.arange(len(begin))
        short = self.ends[number] - self.starts[number] <= GROUP_TOKENS
        by_place = np.lexsort((begin, place))
        places, begins = place[by_place], begin[by_place]
        is_new = (places[1:] != places[:-1]) | (begins[1:] - begins[:-1] > GROUP_TOKENS)
        edge = np.zeros(len(begin), bool)
        edge[by_place] = np.append(True, is_new) | np.append(is_new, True)
        order = np.lexsort((begin, -votes, ~edge, begin // GROUP_TOKENS, number))
        return order[(ranks(number[order], begin[order] // GROUP_TOKENS) < MAX_SHIFTS) | short[order]]

    def _extend(self, runs: Runs, left: Array, right: Array, block: int) -> Runs:
        """Extend the runs as far as ids are equal, to the sides given by `left` and `right`, in growing blocks."""
        lo, hi = runs.lo.copy(), runs.hi.copy()
        min_lo = np.maximum(self.starts[runs.number] - runs.shift, 0)
        max_hi = np.minimum(self.ends[runs.number] - runs.shift, len(self.ids))
        while (left.any() or right.any()) and self.compared < self.budget:
            for side, edge in ((left, lo), (right, hi)):
                rows = np.flatnonzero(side)
                reach = lo[rows] if edge is hi else -hi[rows]
                rows = rows[np.lexsort((reach, edge[rows] // block, runs.number[rows]))]
                rows = rows[ranks(runs.number[rows], edge[rows] // block) < MAX_SHIFTS]
                room = edge[rows] - min_lo[rows] if edge is lo else max_hi[rows] - edge[rows]
                length = np.minimum(room, block)
                fits = np.cumsum(length) <= self.budget - self.compared
                rows, room, length = rows[fits], room[fits], length[fits]
                step = np.arange(min(block, int(length.max(initial=0))))
                spot = edge[rows, None] + (-1 - step if edge is lo else step)
                inside = step < length[:, None]
                spot = np.where(inside, spot, 0)
                source = np.where(inside, spot + runs.shift[rows, None], 0)
                same = inside & (self.ids[spot] == self.arena[source])
                self.compared += int(length.sum())
                n_equal = np.where(same.all(1), len(step), np.argmin(same, 1)) if len(step) else length
                edge[rows] += -n_equal if edge is lo else n_equal
                side[:] = False
                side[rows] = (n_equal == block) & (room > block)
            block = min(4 * block, 4096)
        return Runs(runs.number, runs.shift, lo, hi)

    def _without_weak(self, runs: Runs, min_tokens: int) -> Runs:
        """Drop runs of spans with fewer than `min_tokens` equal tokens, and runs covered by a longer run."""
        size = runs.hi - runs.lo
        _, each = np.unique(runs.number, return_inverse=True)
        total = np.bincount(each, size).astype(np.int64)[each]
        whole = self.whole(runs.number, runs.lo + runs.shift, runs.hi + runs.shift)
        rows = np.flatnonzero((total >= min_tokens) | whole)
        rows = rows[np.lexsort((-runs.number[rows], -total[rows], -runs.hi[rows], runs.lo[rows]))]
        runs, size, total, whole = runs.select(rows), size[rows], total[rows], whole[rows]
        # For each run, the one that reaches furthest of those that begin before it and are enough for a match alone.
        reach = np.where((size >= self.min_altered_tokens) | whole, runs.hi, 0) << 32 | np.arange(len(runs))[::-1]
        before = np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(reach)[:-1]]) if len(runs) else reach
        covering = len(runs) - 1 - (before & 0xFFFFFFFF)
        covered = (before >> 32 >= runs.hi) & (total <= size[np.minimum(covering, len(runs) - 1)])
        return runs.select(np.flatnonzero(~covered))

    def _with_neighbours(self, runs: Runs) -> Runs:
        """Add the next runs of the same spans after and before these, and in turn the neighbours of the added ones."""
        seen = set(_edges(runs))
        fresh, side = self._open_ends(runs)
        for _ in range(MAX_ROUNDS):
            fresh, side = self._neighbours(fresh, side)
            edges = _edges(fresh)
            half = len(fresh)
            new = np.array([edges[at] not in seen and edges[half + at] not in seen for at in range(half)], bool)
            if not new.any():
                break
            seen.update(edges)
            fresh, side = fresh.select(new), side[new]
            runs = runs.joined(fresh)
        return runs

    def _open_ends(self, runs: Runs) -> tuple[Runs, Array]:
        """Return runs and a side, after (1) or before (-1), where the next run of their span is not known yet.

        If there are many, only the longest runs are returned.
        """
        order = np.lexsort((runs.lo, runs.number))
        number, lo, hi = runs.number[order], runs.lo[order], runs.hi[order]
        gaps = lo[1:] - hi[:-1], (lo + runs.shift[order])[1:] - (hi + runs.shift[order])[:-1]
        near = (number[1:] == number[:-1]) & (np.maximum(*gaps) <= MAX_GAP_TOKENS)
        near &= (np.minimum(*gaps) < MIN_RUN_TOKENS) & (np.minimum(*gaps) > -MIN_RUN_TOKENS)
        behind, before = np.append(near, False), np.append(False, near)
        rows = np.argsort(lo - hi, kind="stable")[: len(self.ids) // 8 + 16]
        right, left = order[rows[~behind[rows]]], order[rows[~before[rows]]]
        return runs.select(np.append(right, left)), np.repeat(np.array([1, -1]), (len(right), len(left)))

    def _neighbours(self, runs: Runs, side: Array) -> tuple[Runs, Array]:
        """Return the nearest run, if any, after (side 1) or before (-1) each run, at any shift, and its side."""
        max_runs = max(0, self.budget - self.compared) // _REACH**2
        runs, side = runs.select(np.arange(min(len(runs), max_runs))), side[:max_runs]
        if not len(runs):
            return runs, side
        edge = np.where(side > 0, runs.hi, runs.lo - 1)
        spot = edge[:, None] + side[:, None] * np.arange(_REACH)
        place = spot + runs.shift[:, None]
        in_prompt = (spot >= 0) & (spot < len(self.ids))
        in_span = (place >= self.starts[runs.number, None]) & (place < self.ends[runs.number, None])
        prompt_ids = np.where(in_prompt, self.ids[np.where(in_prompt, spot, 0)], _OUTSIDE_PROMPT)
        span_ids = np.where(in_span, self.arena[np.where(in_span, place, 0)], _OUTSIDE_SPAN)
        same = prompt_ids[:, :, None] == span_ids[:, None, :]
        self.compared += same.size
        two = same[:, :-1, :-1] & same[:, 1:, 1:]
        four = two[:, :-2, :-2] & two[:, 2:, 2:]
        rows = np.flatnonzero(four.any((1, 2)))
        cell = _NEAREST[np.argmax(four[rows].reshape(len(rows), len(_NEAREST))[:, _NEAREST], 1)]
        skipped, left_out, side = _SKIPPED[cell], _OMITTED[cell], side[rows]
        begin = edge[rows] + side * skipped
        lo = np.where(side > 0, begin, begin - MIN_RUN_TOKENS + 1)
        found = Runs(runs.number[rows], runs.shift[rows] + side * (left_out - skipped), lo, lo + MIN_RUN_TOKENS)
        # Extended only away from the old run: if it could grow towards that, a nearer run would have been found.
        return self._extend(found, side < 0, side > 0, GROUP_TOKENS), side

    # chains

    def _chains(self, runs: Runs) -> Iterator[list[PlacedRun]]:
        """Yield chains: runs of one span in the order of prompt and span. Every run is in at most one chain."""
        order = np.lexsort((runs.lo + runs.shift, runs.lo, runs.number))
        columns = (runs.lo, runs.hi, runs.number, runs.shift)
        rows = list(zip(*(column[order].tolist() for column in columns), strict=True))
        best: list[tuple[int, int]] = []  # for the best chain that ends with each run: equal tokens, the run before
        for index, (lo, hi, number, shift) in enumerate(rows):
            choice = (hi - lo, -1)
            is_enough = hi - lo >= self.min_altered_tokens or self._is_whole(rows[index])
            max_cut = 0 if is_enough else hi - lo - MIN_RUN_TOKENS
            for other in range(index - 1, max(-1, index - 1 - LOOK_BACK_RUNS), -1):
                _, stop, other_number, other_shift = rows[other]
                if other_number != number:
                    break
                cut = max(0, stop - lo, stop + other_shift - lo - shift)
                if cut <= max_cut and max(lo + cut - stop, lo + cut + shift - stop - other_shift) <= MAX_GAP_TOKENS:
                    total = best[other][0] + hi - lo - cut
                    choice = (total, other) if total > choice[0] else choice
            best.append(choice)
        used = [False] * len(rows)
        for end in sorted(range(len(rows)), key=lambda index: (-best[index][0], rows[index][0])):
            chain, index = [], end
            while index >= 0 and not used[index]:
                used[index] = True
                chain.append(rows[index])
                index = best[index][1]
            if chain:
                yield chain[::-1]

    def _select_chains(self, chains: list[list[PlacedRun]]) -> list[PlacedRun]:
        """Choose the longest chain, then repeatedly the longest of what remains; return sorted matches."""
        taken = bytearray(len(self.ids))
        heap = [(-sum(hi - lo for lo, hi, *_ in chain), chain[0][0], index, 0) for index, chain in enumerate(chains)]
        heapq.heapify(heap)
        found = []
        while heap:
            weight, _, index, n_reweighed = heapq.heappop(heap)
            chain = list(self._remaining(chains[index], taken))
            total = sum(hi - lo for lo, hi, *_ in chain)
            if not chain or not (total >= self.min_altered_tokens or any(self._is_whole(run) for run in chain)):
                continue
            if total < -weight and n_reweighed < MAX_REWEIGHED:
                heapq.heappush(heap, (-total, chain[0][0], index, n_reweighed + 1))
                continue
            for lo, hi, number, shift in chain:
                taken[lo:hi] = b"\1" * (hi - lo)
                found.append((lo, hi, number, lo + shift))
        return sorted(found)

    def _remaining(self, chain: list[PlacedRun], taken: bytearray) -> Iterator[PlacedRun]:
        """Yield the parts of a chain whose tokens are not taken; where two runs overlap, the first has the tokens."""
        stop = place = 0
        for begin, hi, number, shift in chain:
            lo = max(begin, stop, place - shift)
            self.compared += 1
            if hi - lo < MIN_RUN_TOKENS:
                continue
            while lo < hi and (begin := taken.find(0, lo, hi)) >= 0:
                self.compared += 1
                lo = taken.find(1, begin, hi)
                lo = hi if lo < 0 else lo
                if lo - begin >= MIN_RUN_TOKENS:
                    stop, place = lo, lo + shift
                    yield begin, lo, number, shift

    def _is_whole(self, run: PlacedRun) -> bool:
        lo, hi, number, shift = run
        start, end = int(self.starts[number]), int(self.ends[number])
        return lo + shift <= start + 1 and hi + shift >= end - 1 and end - start >= self.min_tokens


def _edges(runs: Runs) -> list[tuple[int, int, int]]:
    """Return the edges of the runs as hashable values (span, shift, edge): all left ones, then all right ones."""
    number, shift, lo, hi = (getattr(runs, name).tolist() for name in ("number", "shift", "lo", "hi"))
    return [*zip(number, shift, [-1 - at for at in lo], strict=True), *zip(number, shift, hi, strict=True)]


def _without_contained(runs: Runs) -> Runs:
    """Drop runs that another run of the same span and shift contains."""
    order = np.lexsort((-runs.hi, runs.lo, runs.shift, runs.number))
    runs = runs.select(order)
    if len(runs) < 2:
        return runs
    first = np.ones(len(runs), bool)
    first[1:] = (runs.number[1:] != runs.number[:-1]) | (runs.shift[1:] != runs.shift[:-1])
    lane = np.cumsum(first)  # a run's hi counts only among those of its own span and shift
    reach = np.maximum.accumulate(lane << 40 | runs.hi)
    contained = np.zeros(len(runs), bool)
    contained[1:] = reach[:-1] >= (lane << 40 | runs.hi)[1:]
    return runs.select(np.flatnonzero(~contained))


_SKIPPED, _OMITTED = np.divmod(np.arange((MAX_GAP_TOKENS + 1) ** 2), MAX_GAP_TOKENS + 1)
_NEAREST = np.lexsort((abs(_SKIPPED - _OMITTED), _SKIPPED + _OMITTED))
"""Pairs of tokens skipped in the prompt and omitted from the span, as numbers, those with the fewest tokens first."""
