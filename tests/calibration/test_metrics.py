"""Scoring of answers: what counts as right, and by how much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.calibration.metrics import f1, is_right, normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Oder!", "oder"),
        ("an apple, a day", "apple day"),
        ("U.S. dollars\n", "us dollars"),
        ("theatre another atlas", "theatre another atlas"),
        ("Żoliborz", "żoliborz"),
        ("the", ""),
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text: str, normal: str) -> None:
    assert normalise(text) == normal


@given(st.text())
def test_normalised_text_is_in_single_spaces(text: str) -> None:
    assert normalise(text) == " ".join(normalise(text).split())


def test_known_answer_inside_a_sentence_is_right() -> None:
    assert is_right("It was proclaimed in October 1973.", ["1979", "October 1973"])


def test_part_of_a_word_or_number_is_not_right() -> None:
    assert not is_right("in 19730", ["1973"])
    assert not is_right("a cartwheel", ["art"])


def test_part_of_the_known_answer_is_not_right() -> None:
    assert not is_right("October", ["October 1973"])


def test_words_in_another_order_are_not_right() -> None:
    assert not is_right("1973 October", ["October 1973"])


@pytest.mark.parametrize("golds", [[], [""], ["the"], ["!"]])
def test_nothing_known_makes_nothing_right(golds: list[str]) -> None:
    assert not is_right("anything the !", golds)


def test_f1_weighs_precision_and_recall_over_words() -> None:
    assert f1("the red car", ["red bus"]) == pytest.approx(0.5)
    assert f1("red red", ["red"]) == pytest.approx(2 / 3)


def test_f1_takes_the_best_known_answer() -> None:
    assert f1("Berlin", ["Paris", "berlin."]) == 1.0


def test_f1_of_nothing_in_common_or_nothing_known_is_zero() -> None:
    assert f1("Berlin", ["Paris"]) == 0.0
    assert f1("", ["Paris"]) == 0.0
    assert f1("Berlin", []) == 0.0


@given(st.text(), st.text())
def test_f1_is_symmetric_and_a_share(one: str, other: str) -> None:
    assert f1(one, [other]) == f1(other, [one])
    assert 0.0 <= f1(one, [other]) <= 1.0
