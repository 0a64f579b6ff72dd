"""Scoring of answers: what counts as right, and by how much."""

import pytest

from ragfuse.calibration.metrics import is_right, normalise


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
def test_case_punctuation_articles_and_spaces_do_not_count(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("text", "golds", "right"),
    [
        ("It was proclaimed in October 1973.", ["1979", "October 1973"], True),
        ("in 19730", ["1973"], False),
        ("a cartwheel", ["art"], False),
        ("October", ["October 1973"], False),
        ("1973 October", ["October 1973"], False),
        ("anything the !", [], False),
        ("anything the !", ["", "the", "!"], False),
    ],
)
def test_a_known_answer_is_right_as_whole_words_in_order(text, golds, right):
    assert is_right(text, golds) is right
