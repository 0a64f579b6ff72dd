"""The text that stands before chunks while they are encoded."""

from ragfuse.text import stand_in


def test_the_stand_in_is_plain_text_of_some_length():
    text = stand_in()
    assert 1000 < len(text) < 2000
    assert text.isascii()
