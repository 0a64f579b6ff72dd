"""Requests of a load are drawn from a seed: questions in other words, over their own passages."""

from __future__ import annotations

from ragfuse_bench.throughput.asked import TOP, drawn, top

from ragfuse.calibration.case import Case


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
