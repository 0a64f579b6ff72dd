"""Sets made by rule: each question can be answered from its prompt alone, and only by following
every step.
"""

import re

import pytest
from ragfuse_bench.quality.cases import Packing, read_cases


def tokens(text: str) -> int:
    return len(text) // 4


@pytest.mark.parametrize("name", ["needle", "tracing"])
@pytest.mark.parametrize("size", [4000])
def test_prompts_have_the_tokens_that_are_wanted_and_are_the_same_each_time(
    name: str, size: int
) -> None:
    packing = Packing(tokens, context_tokens=size)
    cases = read_cases(name, packing)
    assert cases == read_cases(name, packing)
    assert len({case.question for case in cases}) > 40
    for case in cases:
        assert size <= sum(map(tokens, case.chunks)) <= 1.15 * size
        assert len(set(case.chunks)) == len(case.chunks)


def test_a_trail_leads_through_three_chunks_to_the_answer() -> None:
    for case in read_cases("tracing", Packing(tokens, context_tokens=4000)):
        thing, owner = re.findall(r"is the (\w+) that ([\w ]+) gave away", case.question)[0]
        steps = [
            rf"{owner} gave the {thing} to ([\w ]+)\.",
            rf"NAME handed on everything from {owner.split()[0]} to ([\w ]+)\.",
            r"NAME keeps such things in room (\d+)\.",
        ]
        found, places = "", set()
        for step in steps:
            hits = [
                (i, hit)
                for i, c in enumerate(case.chunks)
                for hit in re.findall(step.replace("NAME", found), c)
            ]
            assert len(hits) == 1
            places.add(hits[0][0])
            found = hits[0][1]
        assert found == case.answers[0]
        assert len(places) == 3
