"""Finds where ids agree with known spans: anchors grow to runs, runs of one span form chains, and the best are chosen.

All steps work on arrays, and their cost is bounded by the length of the prompt: candidates are thinned out where a
span repeats itself, and ids are compared until a budget is spent, the best candidates first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ragfuse.text.span_anchors import Array, ranks, spread

MIN_RUN_TOKENS = 4
"""The least tokens of a run."""
SKIP = 16
"""The most tokens between two runs of a chain, in the prompt and in the span."""
COMPARED_TOKENS = 8
"""Tokens that are compared at first on either side of anchors."""
STRETCH = 32
"""Anchors at most this many tokens apart are grouped; in as many tokens of the prompt only `THIN` shifts of a span are
tried, unless the span is no longer than this."""
THIN = 6
ROUNDS = 24
"""The most rounds of searching for neighbours of the runs found in the round before."""
BACK = 8
"""The most earlier runs that a run may be chained to, and how often a chain is weighed again after losing tokens."""
PER_TOKEN = 256
"""The most ids that are compared for each token of the prompt."""
_REACH = SKIP + MIN_RUN_TOKENS
_NOTHING, _NOWHERE = -1, -2


@dataclass(frozen=True, slots=True)
class Runs:
    """Tokens lo:hi of the prompt that agree with ids at lo + shift and on, which are of span `number`."""

    number: Array
    shift: Array
    lo: Array
    hi: Array

    def __len__(self) -> int:
        return len(self.lo)

    def taken(self, rows: Array) -> Runs:
        """Return only these rows."""
        return Runs(self.number[rows], self.shift[rows], self.lo[rows], self.hi[rows])

    def beside(self, other: Runs) -> Runs:
        """Return these runs followed by the others."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("number", "shift", "lo", "hi"))
        return Runs(*(np.concatenate(pair) for pair in pairs))


@dataclass
class Search:
    """One prompt's ids against spans that fill `arena` at starts:ends.

    compared: ids compared so far.
    """

    ids: Array
    arena: Array
    starts: Array
    ends: Array
    shortest: int
    altered: int
    gram: int
    compared: int = 0
    budget: int = field(init=False)

    def __post_init__(self) -> None:
        self.budget = PER_TOKEN * (len(self.ids) + 64)

    def find(self, at: Array, place: Array, number: Array) -> list[tuple[int, int, int, int]]:
        """Return the chosen matches as sorted (lo, hi, number of the span, place of `lo` in the arena).

        Args:
            at: Places in the prompt where an anchor of a span was found.
            place: Places of these anchors in the arena.
            number: Spans of these anchors.
        """
        runs = self._grown(*self._begun(at, place - at, number), STRETCH)
        runs = self._promising(_apart(runs), self.altered // 2)
        runs = self._promising(_apart(self._with_neighbours(runs)), self.altered)
        order = np.lexsort((runs.lo, runs.lo - runs.hi, runs.lo // MIN_RUN_TOKENS))
        few = order[
            ranks(runs.lo[order] // MIN_RUN_TOKENS) < MIN_RUN_TOKENS
        ]  # where so many begin, at most one can stand
        return self._standing(list(self._chains(runs.taken(few))))

    def whole(self, number: Array, lo: Array, hi: Array) -> Array:
        """Return whether places lo:hi are a whole span, possibly without its first and last token."""
        size = self.ends[number] - self.starts[number]
        all_of: Array = (lo <= self.starts[number] + 1) & (hi >= self.ends[number] - 1) & (size >= self.shortest)
        return all_of

    # runs

    def _begun(self, at: Array, shift: Array, number: Array) -> tuple[Runs, Array, Array]:
        """Return runs around anchors, and whether each may be extended to the left and to the right."""
        order = np.argsort(shift * (len(self.ids) + 1) + at)  # on one shift spans stand in the order of places
        at, shift, number = at[order], shift[order], number[order]
        first = np.ones(len(at), bool)
        first[1:] = (number[1:] != number[:-1]) | (shift[1:] != shift[:-1]) | (at[1:] - at[:-1] > STRETCH)
        firsts = np.flatnonzero(first)
        votes = np.diff(np.append(firsts, len(at)))
        lasts = firsts + votes - 1
        number, shift, begin, end = number[firsts], shift[firsts], at[firsts], at[lasts] + self.gram
        order = self._thinned(number, begin, votes, begin + shift)
        order = order[np.lexsort((begin[order], -votes[order]))]
        number, shift, begin, end = number[order], shift[order], begin[order], end[order]
        least = np.maximum(self.starts[number] - shift, 0)
        most = np.minimum(self.ends[number] - shift, len(self.ids))
        begin, end = np.maximum(begin - COMPARED_TOKENS, least), np.minimum(end + COMPARED_TOKENS, most)
        kept = np.cumsum(end - begin) <= self.budget
        number, shift, begin, end, least, most = (a[kept] for a in (number, shift, begin, end, least, most))
        group, offset = spread(end - begin)
        spot = begin[group] + offset
        same = self.ids[spot] == self.arena[spot + shift[group]]
        self.compared += len(spot)
        bounds = np.ones(len(spot) + 1, bool)  # where another run may begin
        bounds[1:-1] = (same[1:] != same[:-1]) | (group[1:] != group[:-1])
        edges = np.flatnonzero(bounds)
        firsts, lasts = edges[:-1], edges[1:] - 1
        held = same[firsts] & (lasts - firsts + 1 >= MIN_RUN_TOKENS) if len(firsts) else np.zeros(0, bool)
        firsts, lasts = firsts[held], lasts[held]
        group, lo, hi = group[firsts], spot[firsts], spot[lasts] + 1
        runs = Runs(number[group], shift[group], lo, hi)
        return runs, (lo == begin[group]) & (lo > least[group]), (hi == end[group]) & (hi < most[group])

    def _thinned(self, number: Array, begin: Array, votes: Array, place: Array) -> Array:
        """Rows of the few shifts of one span in one stretch that most anchors speak for.

        Where prompt and span repeat the same again and again, every shift seems as good as the next one; but only
        where one begins with the other, or ends with it, may more of them agree.
        """
        cells = np.sort(number * (len(self.ids) // STRETCH + 1) + begin // STRETCH)
        if not (cells[THIN:] == cells[:-THIN]).any():
            return np.arange(len(begin))
        short = self.ends[number] - self.starts[number] <= STRETCH
        again = np.lexsort((begin, place))
        apart = (place[again][1:] != place[again][:-1]) | (begin[again][1:] - begin[again][:-1] > STRETCH)
        edge = np.zeros(len(begin), bool)
        edge[again] = np.append(True, apart) | np.append(apart, True)
        order = np.lexsort((begin, -votes, ~edge, begin // STRETCH, number))
        return order[(ranks(number[order], begin[order] // STRETCH) < THIN) | short[order]]

    def _grown(self, runs: Runs, left: Array, right: Array, block: int) -> Runs:
        """Extend the runs as far as ids agree, on the sides in `left` and `right`."""
        lo, hi = runs.lo.copy(), runs.hi.copy()
        least = np.maximum(self.starts[runs.number] - runs.shift, 0)
        most = np.minimum(self.ends[runs.number] - runs.shift, len(self.ids))
        while (left.any() or right.any()) and self.compared < self.budget:
            for side, edge in ((left, lo), (right, hi)):
                rows = np.flatnonzero(side)
                reach = lo[rows] if edge is hi else -hi[rows]
                rows = rows[np.lexsort((reach, edge[rows] // block, runs.number[rows]))]
                rows = rows[ranks(runs.number[rows], edge[rows] // block) < THIN]
                room = edge[rows] - least[rows] if edge is lo else most[rows] - edge[rows]
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
                grown = np.where(same.all(1), len(step), np.argmin(same, 1)) if len(step) else length
                edge[rows] += -grown if edge is lo else grown
                side[:] = False
                side[rows] = (grown == block) & (room > block)
            block = min(4 * block, 4096)
        return Runs(runs.number, runs.shift, lo, hi)

    def _promising(self, runs: Runs, least: int) -> Runs:
        """Drop runs of spans with fewer than `least` agreeing tokens, and runs covered by a longer run."""
        size = runs.hi - runs.lo
        _, each = np.unique(runs.number, return_inverse=True)
        total = np.bincount(each, size).astype(np.int64)[each]
        whole = self.whole(runs.number, runs.lo + runs.shift, runs.hi + runs.shift)
        kept = np.flatnonzero((total >= least) | whole)
        kept = kept[np.lexsort((-runs.number[kept], -total[kept], -runs.hi[kept], runs.lo[kept]))]
        runs, size, total, whole = runs.taken(kept), size[kept], total[kept], whole[kept]
        # The run that reaches furthest among those that begin before, and would stand by itself.
        reach = np.where((size >= self.altered) | whole, runs.hi, 0) << 32 | np.arange(len(runs))[::-1]
        before = np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(reach)[:-1]]) if len(runs) else reach
        over = len(runs) - 1 - (before & 0xFFFFFFFF)
        covered = (before >> 32 >= runs.hi) & (total <= size[np.minimum(over, len(runs) - 1)])
        return runs.taken(np.flatnonzero(~covered))

    def _with_neighbours(self, runs: Runs) -> Runs:
        """Add the runs right after and before these, and in turn the neighbours of the added ones."""
        seen = set(_edges(runs))
        fresh, way = self._open(runs)
        for _ in range(ROUNDS):
            fresh, way = self._next(fresh, way)
            edges = _edges(fresh)
            half = len(fresh)
            new = np.array([edges[at] not in seen and edges[half + at] not in seen for at in range(half)], bool)
            if not new.any():
                break
            seen.update(edges)
            fresh, way = fresh.taken(new), way[new]
            runs = runs.beside(fresh)
        return runs

    def _open(self, runs: Runs) -> tuple[Runs, Array]:
        """Runs and the way, behind (1) or before (-1), in which no next one of their span is known; the longest."""
        order = np.lexsort((runs.lo, runs.number))
        number, lo, hi = runs.number[order], runs.lo[order], runs.hi[order]
        gaps = lo[1:] - hi[:-1], (lo + runs.shift[order])[1:] - (hi + runs.shift[order])[:-1]
        near = (number[1:] == number[:-1]) & (np.minimum(*gaps) < MIN_RUN_TOKENS) & (np.maximum(*gaps) <= SKIP)
        near &= np.minimum(*gaps) > -MIN_RUN_TOKENS
        behind, before = np.append(near, False), np.append(False, near)
        rows = np.argsort(lo - hi, kind="stable")[: len(self.ids) // 8 + 16]
        on, back = order[rows[~behind[rows]]], order[rows[~before[rows]]]
        return runs.taken(np.append(on, back)), np.repeat(np.array([1, -1]), (len(on), len(back)))

    def _next(self, runs: Runs, way: Array) -> tuple[Runs, Array]:
        """The nearest run behind (way 1) or before (-1) each run, on any shift, where one is near; and the ways."""
        most = max(0, self.budget - self.compared) // _REACH**2
        runs, way = runs.taken(np.arange(min(len(runs), most))), way[:most]
        if not len(runs):
            return runs, way
        edge = np.where(way > 0, runs.hi, runs.lo - 1)
        spot = edge[:, None] + way[:, None] * np.arange(_REACH)
        place = spot + runs.shift[:, None]
        in_prompt = (spot >= 0) & (spot < len(self.ids))
        in_span = (place >= self.starts[runs.number, None]) & (place < self.ends[runs.number, None])
        mine = np.where(in_prompt, self.ids[np.where(in_prompt, spot, 0)], _NOTHING)
        theirs = np.where(in_span, self.arena[np.where(in_span, place, 0)], _NOWHERE)
        same = mine[:, :, None] == theirs[:, None, :]
        self.compared += same.size
        two = same[:, :-1, :-1] & same[:, 1:, 1:]
        four = two[:, :-2, :-2] & two[:, 2:, 2:]
        rows = np.flatnonzero(four.any((1, 2)))
        cell = _NEAREST[np.argmax(four[rows].reshape(len(rows), len(_NEAREST))[:, _NEAREST], 1)]
        skipped, left_out, way = _SKIPPED[cell], _LEFT[cell], way[rows]
        begin = edge[rows] + way * skipped
        lo = np.where(way > 0, begin, begin - MIN_RUN_TOKENS + 1)
        found = Runs(runs.number[rows], runs.shift[rows] + way * (left_out - skipped), lo, lo + MIN_RUN_TOKENS)
        return self._grown(found, way < 0, way > 0, STRETCH), way  # nearer by it would have been found at once

    # chains

    def _chains(self, runs: Runs) -> Iterator[list[tuple[int, int, int, int]]]:
        """Runs of one span in the order of both, (lo, hi, number, shift) each; every run is in one chain at most."""
        order = np.lexsort((runs.lo + runs.shift, runs.lo, runs.number))
        columns = (runs.lo, runs.hi, runs.number, runs.shift)
        rows = list(zip(*(column[order].tolist() for column in columns), strict=True))
        best: list[tuple[int, int]] = []  # agreeing tokens up to here, the run before
        for index, (lo, hi, number, shift) in enumerate(rows):
            choice = (hi - lo, -1)
            most_cut = 0 if hi - lo >= self.altered or self._is_whole(rows[index]) else hi - lo - MIN_RUN_TOKENS
            for other in range(index - 1, max(-1, index - 1 - BACK), -1):
                _, stop, whose, moved = rows[other]
                if whose != number:
                    break
                cut = max(0, stop - lo, stop + moved - lo - shift)
                if cut <= most_cut and max(lo + cut - stop, lo + cut + shift - stop - moved) <= SKIP:
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

    def _standing(self, chains: list[list[tuple[int, int, int, int]]]) -> list[tuple[int, int, int, int]]:
        """Choose the longest chain, then what it leaves of the others; return sorted (lo, hi, number, place)."""
        taken = bytearray(len(self.ids))
        heap = [(-sum(hi - lo for lo, hi, *_ in chain), chain[0][0], index, 0) for index, chain in enumerate(chains)]
        heapq.heapify(heap)
        found = []
        while heap:
            weight, _, index, times = heapq.heappop(heap)
            chain = list(self._left(chains[index], taken))
            total = sum(hi - lo for lo, hi, *_ in chain)
            if not chain or not (total >= self.altered or any(self._is_whole(run) for run in chain)):
                continue
            if total < -weight and times < BACK:
                heapq.heappush(heap, (-total, chain[0][0], index, times + 1))
                continue
            for lo, hi, number, shift in chain:
                taken[lo:hi] = b"\1" * (hi - lo)
                found.append((lo, hi, number, lo + shift))
        return sorted(found)

    def _left(self, chain: list[tuple[int, int, int, int]], taken: bytearray) -> Iterator[tuple[int, int, int, int]]:
        """Yield the parts of a chain whose tokens are not taken; tokens of two runs belong to the first."""
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

    def _is_whole(self, run: tuple[int, int, int, int]) -> bool:
        lo, hi, number, shift = run
        start, end = int(self.starts[number]), int(self.ends[number])
        return lo + shift <= start + 1 and hi + shift >= end - 1 and end - start >= self.shortest


def _edges(runs: Runs) -> list[tuple[int, int, int]]:
    """Both edges of each run on its shift of its span: first all left ones, then all right ones."""
    number, shift, lo, hi = (getattr(runs, name).tolist() for name in ("number", "shift", "lo", "hi"))
    return [*zip(number, shift, [-1 - at for at in lo], strict=True), *zip(number, shift, hi, strict=True)]


def _apart(runs: Runs) -> Runs:
    """Drop runs that another run of the same span and shift contains."""
    order = np.lexsort((-runs.hi, runs.lo, runs.shift, runs.number))
    runs = runs.taken(order)
    if len(runs) < 2:
        return runs
    first = np.ones(len(runs), bool)
    first[1:] = (runs.number[1:] != runs.number[:-1]) | (runs.shift[1:] != runs.shift[:-1])
    lane = np.cumsum(first)  # a run's hi counts only among those of its own span and shift
    reach = np.maximum.accumulate(lane << 40 | runs.hi)
    held = np.zeros(len(runs), bool)
    held[1:] = reach[:-1] >= (lane << 40 | runs.hi)[1:]
    return runs.taken(np.flatnonzero(~held))


_SKIPPED, _LEFT = np.divmod(np.arange((SKIP + 1) ** 2), SKIP + 1)
_NEAREST = np.lexsort((abs(_SKIPPED - _LEFT), _SKIPPED + _LEFT))
"""Cells of tokens skipped in a prompt and left out of a span, the fewest first."""
