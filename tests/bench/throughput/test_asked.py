"""Questions in other words keep what they ask about; their passages are those that share rare words
with them.
"""

from __future__ import annotations

from math import log

from hypothesis import given
from hypothesis import strategies as st
from ragfuse_bench.throughput.asked import TOP, drawn, top

from ragfuse.calibration.case import Case

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
    for request in found:
        mine = next(each for each in cases if each.id in request.question)
        assert sorted(request.chunks) == sorted(top(request.question, mine.chunks))
        assert len(request.chunks) == TOP
