"""Scoring of answers: what counts as right."""

import pytest

from ragfuse.calibration.case import is_right


@pytest.mark.parametrize(
    ("text", "golds", "right"),
    [
        ("It was proclaimed in October 1973.", ["1979", "October 1973"], True),
        ("in 19730", ["1973"], False),
        ("a cartwheel", ["art"], False),
        ("October", ["October 1973"], False),
        ("The U.S.  dollars!", ["us dollars"], True),
        ("theatre", ["atre"], False),
        ("1973 October", ["October 1973"], False),
        ("anything the !", [], False),
        ("anything the !", ["", "the", "!"], False),
    ],
)
def test_a_known_answer_is_right_as_whole_words_in_order(text, golds, right):
    assert is_right(text, golds) is right
