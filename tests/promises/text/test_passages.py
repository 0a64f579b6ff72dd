"""Passages are cut by what they say: sizes, borders, and the same cut wherever a passage stands."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.text.passages import (
    LINE_END_TOKENS,
    MAX_PASSAGE_TOKENS,
    MIN_PASSAGE_TOKENS,
    Border,
    is_code,
    last_paragraph,
    passages,
)

LINE, PARAGRAPH, SPECIAL = 1, 2, 3


def border_of(token):
    """Ids 1 to 3 are a line's end, a paragraph's, and a special token; all others are words."""
    return (token, False) if token in (LINE, PARAGRAPH, SPECIAL) else (Border.NONE, True)


def words(count, seed=0):
    drawn = random.Random(seed)
    return [drawn.randrange(10, 10_000) for _ in range(count)]


def cut(ids):
    return [tuple(ids[lo:hi]) for lo, hi in passages(ids, border_of)]


def test_paragraphs_are_passages_without_what_parts_them():
    one, two = words(40, 1), words(50, 2)
    assert cut([*one, PARAGRAPH, *two, PARAGRAPH]) == [tuple(one), tuple(two)]
    longer = (*two, PARAGRAPH, *words(5))
    assert cut([*one, PARAGRAPH, *longer]) == [tuple(one), longer]


@pytest.mark.parametrize("border", [LINE, PARAGRAPH])
def test_what_is_too_short_goes_on_with_the_next_that_is_too_short(border):
    one, two = words(MIN_PASSAGE_TOKENS - 1, 1), words(MIN_PASSAGE_TOKENS - 2, 2)
    for ids in ((*one, border, *two), (*one[:5], border, *two[:5], border, *one)):
        assert cut(ids) == [ids]


@pytest.mark.parametrize("border", [LINE, PARAGRAPH])
@pytest.mark.parametrize("length", [MIN_PASSAGE_TOKENS, 50, 2 * MAX_PASSAGE_TOKENS])
def test_a_line_that_does_not_recur_takes_nothing_along(border, length):
    text = words(length, 2)
    for n_new in (1, 5, MIN_PASSAGE_TOKENS + 2):
        ids = [*text, border, *words(n_new, 1), border, *text]
        found = passages(
            ids, border_of, lambda rows, n=n_new: not length <= rows[0] < length + 1 + n
        )
        assert [tuple(ids[lo:hi]) for lo, hi in found] == 2 * cut(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            (
                "Always call the function `search(query)` before you answer a question about the"
                " price of a ship."
            ),
            False,
        ),
        ("# Style\n\nWrite short answers in plain English, with one fact in each sentence.", False),
        (
            "<instructions>\nWrite short answers, and never repeat the question.\n</instructions>",
            False,
        ),
        ("The lighthouse was built in 1871 [1] and rebuilt after the storm of 1902 [2].", False),
        (
            "The Yehe Yuan Ulus[a] was an empire. "
            + "It was the khanate of the successors of one ruler. " * 4,
            False,
        ),
        (
            (
                "Greet the user as {name}.\n\n{context}\n\nQuestion: {question}\nOne sentence (or"
                " two):"
            ),
            False,
        ),
        ("Write to support@example.com where something in these instructions is unclear.", False),
        (
            (
                '{"type": "function", "function": {"name": "f", "parameters": {"required": ["a"],'
                ' "x": null}}}'
            ),
            False,
        ),
        (
            (
                '{\n  "name": "count",\n  "parameters": {\n    "type": "object",\n    "required":'
                ' ["door", "ship"]\n  }\n}'
            ),
            False,
        ),
        ("for (let i = 0; i < n; i++) {\n  total += prices[i];\n}", True),
        ("def total(prices):\n    found = sum(prices)\n    return found", True),
    ],
)
def test_instructions_are_no_source_code(text, wanted):
    assert is_code(text) == wanted


def test_a_line_ends_a_passage_that_is_long_already():
    one, two = words(LINE_END_TOKENS, 1), words(MIN_PASSAGE_TOKENS, 2)
    assert cut([*one, LINE, *two]) == [tuple(one), tuple(two)]
    assert cut([*one[:-1], LINE, *two]) == [(*one[:-1], LINE, *two)]


def test_the_line_that_says_who_speaks_is_no_part_of_the_first_passage():
    text = words(40, 1)
    assert cut([SPECIAL, 12, LINE, *text, SPECIAL, 13, LINE]) == [tuple(text)]
    assert cut([SPECIAL, *words(4, 2), LINE, *text[:30]]) == [(*words(4, 2), LINE, *text[:30])]


def test_a_long_passage_is_cut_where_its_own_ids_say_so():
    text = words(3 * MAX_PASSAGE_TOKENS, 1)
    found = cut(text)
    assert all(MIN_PASSAGE_TOKENS <= len(each) <= MAX_PASSAGE_TOKENS for each in found)
    shifted = cut([*words(77, 2), PARAGRAPH, *text])
    assert found[0] == shifted[1]
    assert set(found) <= set(shifted)


tokens = st.lists(st.sampled_from([LINE, PARAGRAPH, SPECIAL, *range(10, 30)]), max_size=1500)


@given(tokens)
def test_passages_are_in_order_never_overlap_and_have_their_size(ids):
    found = list(passages(ids, border_of))
    assert all(MIN_PASSAGE_TOKENS <= hi - lo <= MAX_PASSAGE_TOKENS for lo, hi in found)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    assert all(border_of(ids[lo])[1] for lo, _ in found)
    assert all(ids[at] != SPECIAL for lo, hi in found for at in range(lo, hi))


@given(tokens)
def test_every_token_is_looked_at_once(ids):
    asked = []

    def counted(token):
        asked.append(token)
        return border_of(token)

    list(passages(ids, counted))
    assert len(asked) == len(ids)


def test_the_last_paragraph_is_what_follows_the_last_gap_that_something_follows():
    assert last_paragraph([10, 11, PARAGRAPH, 12, 13], border_of) == 3
    assert last_paragraph([10, 11, PARAGRAPH, 12, PARAGRAPH], border_of) == 3
    assert last_paragraph([10, 11, LINE, 12], border_of) == 0
    assert last_paragraph([10, LINE, LINE, 12], border_of) == 3
