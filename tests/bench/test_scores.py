"""How much of a known answer is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragfuse_bench.scores import exact, f1


@pytest.mark.parametrize(
    ("answer", "golds", "wanted"),
    [
        ("the red car", ["red bus"], 0.5),
        ("red red", ["red"], 2 / 3),
        ("Berlin", ["Paris", "berlin."], 1.0),
        ("Berlin", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("Berlin", [], 0.0),
    ],
)
def test_f1_weighs_precision_and_recall_over_words(
    answer: str, golds: list[str], wanted: float
) -> None:
    assert f1(answer, golds) == pytest.approx(wanted)
    assert exact(answer, golds) == float(wanted == 1.0)


@given(st.text(), st.text())
def test_f1_is_symmetric_and_a_share(one: str, other: str) -> None:
    assert f1(one, [other]) == f1(other, [one])
    assert 0.0 <= f1(one, [other]) <= 1.0
