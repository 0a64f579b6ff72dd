"""Questions in other words keep what they ask about; their passages are those that share rare words
with them.
"""

from __future__ import annotations

import re
from collections import Counter
from math import log

from hypothesis import given
from hypothesis import strategies as st
from ragfuse_bench.throughput.asked import TOP, drawn, each_once, top, wordings

from ragfuse.calibration.case import Case

QUESTIONS = (
    "In what year was the film The Green Door released?",
    "Who is the director of the film Seven Ships?",
    "How many ships did the keeper count",
    "Whose mother was born in Port Elling?",
)


def test_what_is_asked_about_stands_in_every_wording():
    for question in QUESTIONS:
        names = [word for word in re.findall(r"\w+", question)[1:] if word[0].isupper()]
        numbers = re.findall(r"\d+", question)
        for text in wordings(question):
            assert all(word in text for word in (*names, *numbers))


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), min_size=1, max_size=6).map(
    " ".join
)


def slow_top(question: str, passages: list[str], count: int) -> list[str]:
    """Every passage's score, counted anew for every word of the question; the best is taken out
    again and again.
    """
    left = dict(enumerate(passages))
    scores = {
        at: sum(
            log(1 + len(passages) / sum(word in other.split() for other in passages))
            for word in sorted(set(question.split()))
            if word in text.split()
        )
        for at, text in left.items()
    }
    found = []
    while left and len(found) < count:
        best = min(left, key=lambda at: (-scores[at], at))
        found.append(left.pop(best))
    return found


@given(WORDS, st.lists(WORDS, max_size=8), st.integers(1, 8))
def test_passages_are_taken_by_the_rare_words_that_they_share(question, passages, count):
    assert top(question, passages, count) == slow_top(question, passages, count)


def case(name: str) -> Case:
    passages = tuple(
        f"Passage {number} of {name} speaks of {'green' * (number % 3)} doors."
        for number in range(9)
    )
    return Case("set", name, f"Which door of {name} is green?", ("the third",), passages)


def test_requests_are_drawn_from_a_seed_with_their_passages_in_any_order():
    cases = [case("north"), case("south"), case("east")]
    found = drawn(cases, 200, seed=3)
    assert found == drawn(cases, 200, seed=3) != drawn(cases, 200, seed=4)
    assert len({request.question for request in found}) > 20
    orders = Counter(request.chunks for request in found)
    assert len(orders) > 100
    for request in found:
        mine = next(each for each in cases if each.id in request.question)
        assert sorted(request.chunks) == sorted(top(request.question, mine.chunks))
        assert len(request.chunks) == TOP
    assert [
        each.id in request.question
        for each, request in zip(cases, each_once(cases, 1), strict=True)
    ] == [True] * 3
