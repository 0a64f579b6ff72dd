"""The text that stands before chunks while they are encoded."""

from ragfuse.text import filler_text, sample


def test_the_stand_in_is_plain_text_of_some_length():
    text = filler_text()
    assert 1000 < len(text) < 2000
    assert text.isascii()


def test_the_sample_is_of_many_kinds():
    texts = sample()
    assert len(texts) > 12
    assert all(len(text) > 100 for text in texts)
    assert sum(map(len, texts)) > 6000
