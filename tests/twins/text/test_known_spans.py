"""Known spans of ids in a prompt: whole and altered ones are found, nothing but what agrees, in a
bounded time.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfuse.text.known_spans import KnownSpans
from ragfuse.types.prompt import Segment
from tests.kits.operations import lines

Ids = list[int]
MOST_LINES_PER_TOKEN = 500


def drawn(n: int, seed: object, vocabulary: int = 50_000) -> Ids:
    """Ids that agree with no others by chance."""
    source = random.Random(repr(seed))
    return [source.randrange(vocabulary) for _ in range(n)]


def known_with(*spans: Ids, **options: int) -> KnownSpans:
    known = KnownSpans(**options)
    for span in spans:
        known.add(span)
    return known


def agrees(match: Segment, ids: Ids) -> bool:
    row, n = match.row, len(match.tokens)
    return tuple(ids[match.start : match.stop]) == match.tokens == match.run[row : row + n]


def checked(known: KnownSpans, ids: Ids) -> list[Segment]:
    """What is found, once it keeps what every match promises."""
    found = known.find(ids)
    for match in found:
        assert len(match.tokens) >= 4
        assert agrees(match, ids)
        assert match.run in known
    assert all(first.stop <= second.start for first, second in pairwise(found))
    return found


def places(found: list[Segment]) -> list[tuple[int, int, int]]:
    return [(match.start, match.stop, match.row) for match in found]


def covered(found: list[Segment]) -> set[int]:
    return {index for match in found for index in range(match.start, match.stop)}


# whole


def test_whole_spans_are_found_in_any_order_with_text_and_source():
    a, b = drawn(150, "a"), drawn(9, "b")
    known = KnownSpans()
    known.add(a, "some text", "a.txt")
    known.add(np.array(b), source="b.txt")
    found = checked(known, [1, 2, 3, *b, 4, 5, *a, 6])
    assert places(found) == [(3, 12, 0), (14, 164, 0)]
    assert [(match.run, match.text, match.source) for match in found] == [
        (tuple(b), "", "b.txt"),
        (tuple(a), "some text", "a.txt"),
    ]


@pytest.mark.parametrize("n", [9, 12, 20, 31])
def test_a_short_span_is_found_if_at_most_its_first_and_last_token_are_lost(n):
    span = drawn(n, n)
    known = known_with(span)
    assert places(checked(known, [60_000, *span[1:-1], 60_000])) == [(1, n - 1, 1)]
    assert known.find([60_000, *span[2:], 60_000]) == []
    assert known.find([60_000, *span[:-2], 60_000]) == []


def test_spans_shorter_than_the_shortest_are_ignored():
    short = drawn(7, "short")
    known = known_with(short, [1], [])
    assert len(known) == 0
    assert known.find([*short, 1]) == []
    assert places(known_with(short, min_tokens=6).find(short)) == [(0, 7, 0)]


# altered


def test_a_cut_of_enough_tokens_is_found_and_a_shorter_one_is_not():
    a = drawn(200, "a")
    assert places(checked(known_with(a), [1, *a[50:82], 2])) == [(1, 33, 50)]
    assert known_with(a).find([1, *a[50:81], 2]) == []


@pytest.mark.parametrize("each", [4, 5, 7, 10, 30])
@pytest.mark.parametrize(
    ("added", "left_out"), [(1, 0), (0, 1), (1, 2), (3, 1), (16, 0), (0, 16), (16, 16), (0, 5)]
)
def test_runs_between_small_insertions_and_deletions_are_chained(each, added, left_out):
    """A run of 13 tokens is always met; whatever lies beside it is found from there."""
    a, ids, expected, row = drawn(400, "a"), [], [], 0
    for index in range(6):
        size = 30 if index == 3 else each
        expected.append((len(ids), len(ids) + size, row))
        ids += [*a[row : row + size], *(80_000 + 20 * index + extra for extra in range(added))]
        row += size + left_out
    assert places(checked(known_with(a), ids)) == expected


def test_runs_too_far_apart_or_in_another_order_do_not_count_together():
    a = drawn(100, "a")
    known = known_with(a)
    assert known.find([*a[:20], *drawn(17, "gap", 9), *a[20:40]]) == []
    assert known.find([*a[40:60], 1, *a[:20]]) == []
    assert len(known.find([*a[:20], *drawn(16, "gap", 9), *a[20:40]])) == 2


# what is kept


def test_the_same_tokens_again_keep_the_source_that_brought_them_first():
    a = drawn(20, "a")
    known = KnownSpans()
    known.add(a, "", "old.txt")
    known.add(tuple(a), "text", "new.txt")
    assert len(known) == 1
    [match] = known.find(a)
    assert (match.text, match.source) == ("text", "old.txt")


def test_a_span_that_is_only_given_gives_way_to_stored_ones_that_cover_most_of_it():
    given, known = drawn(200, "given"), KnownSpans()
    known.add(given, "given", is_stored=False)
    known.add([*given[140:], *drawn(60, "more")], "part")
    prompt = [*given, *drawn(60, "more")]
    found = [(each.start, each.stop, each.row, each.text) for each in known.find(prompt)]
    assert found == [(0, 200, 0, "given"), (200, 260, 60, "part")]
    known.add(given[10:140], "rest")
    assert [each.text for each in known.find(prompt)] == ["rest", "part"]
    known.add(given)
    assert [each.text for each in known.find(prompt)] == ["given", "part"]


def test_spans_above_the_limit_are_dropped_least_recently_matched_first():
    spans = [drawn(30, index) for index in range(6)]
    known = known_with(*spans[:4], max_spans=4)
    known.find(spans[0])
    known.add(spans[4])
    assert [span in known for span in spans[:5]] == [True, False, True, True, True]
    known.add(spans[2])  # known again: as if it were new
    known.add(spans[5])
    assert [span in known for span in spans] == [True, False, True, False, True, True]
    assert len(known) == 4


# many alike


HEAD = drawn(100, "head")
PROMPTS = {
    "one token repeated": lambda n: [7] * n,
    "a short period": lambda n: ([1, 2, 3] * n)[:n],
    "a longer period": lambda n: (drawn(37, "period") * n)[:n],
    "the one beginning again and again": lambda n: (HEAD * n)[:n],
    "one span again and again": lambda n: ([*HEAD, *drawn(100, 5)] * n)[:n],
    "two ids by chance": lambda n: drawn(n, "two", 2),
}
KNOWN = {
    "thousands with one beginning": [[*HEAD, *drawn(100, index)] for index in range(3000)],
    "one token repeated, of many lengths": [[7] * n for n in range(8, 1500, 3)],
    "short periods": [([1, 2, 3] * 300)[at : at + n] for at in range(3) for n in range(8, 800, 7)],
    "long spans of a period": [(drawn(37, "period") * 200)[at : at + 5000] for at in range(30)],
    "two ids by chance": [drawn(40, index, 2) for index in range(300)],
    "many beginnings of one span": [[*HEAD, *drawn(100, 5)][:n] for n in range(8, 200)],
}


@pytest.fixture(scope="module", params=KNOWN)
def crowd(request):
    return known_with(*KNOWN[request.param])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_work_grows_with_the_prompt_alone(crowd, prompt):
    for n in (1000, 8000):
        ids = PROMPTS[prompt](n)
        checked(crowd, ids)
        assert lines(lambda ids=ids: crowd.find(ids)) < MOST_LINES_PER_TOKEN * n


# a slow and obvious twin


def agreements(ids: Ids, span: Ids) -> list[tuple[int, int, int]]:
    """Every longest run (lo, hi, row), by trying all shifts."""
    runs = []
    for shift in range(-len(ids), len(span) + 1):
        lo = max(0, -shift)
        for index in range(lo, min(len(ids), len(span) - shift) + 1):
            if index == min(len(ids), len(span) - shift) or ids[index] != span[index + shift]:
                if index > lo:
                    runs.append((lo, index, lo + shift))
                lo = index + 1
    return runs


def stands(run: tuple[int, int, int], span: Ids, altered: int) -> bool:
    lo, hi, row = run
    return hi - lo >= altered or (len(span) >= 8 and row <= 1 and row + hi - lo >= len(span) - 1)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Ids], Ids]:
    """Spans, and a prompt made of parts of them and other ids."""
    ids = st.integers(0, draw(st.sampled_from([1, 2, 5, 40, 1000])))
    spans = draw(st.lists(st.lists(ids, min_size=6, max_size=60), min_size=1, max_size=5))
    prompt: Ids = []
    for _ in range(draw(st.integers(1, 6))):
        span = draw(st.sampled_from(spans))
        lo = draw(st.sampled_from([0, 0, 0, 1, 3, len(span) // 2]))
        hi = draw(st.sampled_from([len(span), len(span), len(span) - 1, len(span) - 3]))
        prompt += draw(st.lists(ids, max_size=8)) + span[lo:hi]
    return spans, prompt + draw(st.lists(ids, max_size=8))


@settings(max_examples=400, deadline=None)
@given(scenes())
def test_every_span_in_a_prompt_is_matched_or_overlaps_a_match(scene):
    spans, prompt = scene
    known = known_with(*spans, min_altered_tokens=20)
    found = checked(known, prompt)
    held = covered(found)
    standing = [run for span in spans for run in agreements(prompt, span) if stands(run, span, 20)]
    for lo, hi, _ in standing:
        assert not held.isdisjoint(range(lo, hi)), (lo, hi)
    if standing:
        longest = max(hi - lo for lo, hi, _ in standing)
        assert len(held) >= longest
    if found and not standing:  # then several runs count together
        assert len(held) >= 20


@settings(max_examples=100, deadline=None)
@given(scenes(), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=12))
def test_after_adding_and_discarding_in_any_order_only_kept_spans_are_matched(scene, steps):
    spans, prompt = scene
    known, left = KnownSpans(min_altered_tokens=20), dict[tuple[int, ...], None]()
    for add, which in steps:
        span = spans[which % len(spans)]
        if add:
            known.add(span)
            left |= {tuple(span): None} if len(span) >= 8 else {}
        else:
            known.discard(span)
            left.pop(tuple(span), None)
        checked(known, prompt)
        assert len(known) == len(left)
    alike = known_with(*map(list, left), min_altered_tokens=20)
    assert len(covered(checked(known, prompt))) == len(covered(checked(alike, prompt)))


# threads
