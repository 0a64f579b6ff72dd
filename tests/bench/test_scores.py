"""How much of a known answer is found."""

import pytest
from ragfuse_bench.scores import exact, f1


@pytest.mark.parametrize(
    ("answer", "golds", "wanted"),
    [
        ("the red car", ["red bus"], 0.5),
        ("red red", ["red"], 2 / 3),
        ("Berlin", ["Paris", "berlin."], 1.0),
        ("", ["Paris"], 0.0),
        ("Berlin", [], 0.0),
    ],
)
def test_f1_weighs_precision_and_recall_over_words(
    answer: str, golds: list[str], wanted: float
) -> None:
    assert f1(answer, golds) == pytest.approx(wanted)
    assert exact(answer, golds) == float(wanted == 1.0)
