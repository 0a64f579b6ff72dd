"""A document's chunks in windows: every chunk once, in order, behind what stands before it."""

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.text import Window, stand_in, windows

documents = st.lists(st.lists(st.integers(100, 999), min_size=1, max_size=30), min_size=1, max_size=20)


def cut(document: list[list[int]], size: int = 40, reach: int = 25, gap: tuple[int, ...] = (7, 7)) -> list[Window]:
    return list(windows(document, (1, 2, 3), reach, size, gap))


@given(document=documents, size=st.integers(1, 80))
def test_every_chunk_comes_once_and_in_order_in_windows_no_longer_than_they_may_be(document, size):
    found = cut(document, size)
    assert [list(chunk) for window in found for chunk in window.chunks] == document
    for window in found:
        assert len(window.chunks) == 1 or len(window.tokens) <= size
        assert all(window.tokens[lo:hi] == chunk for (lo, hi), chunk in zip(window.spans, window.chunks, strict=True))


@given(document=documents, reach=st.integers(0, 50))
def test_before_a_window_stands_the_end_of_the_document_so_far(document, reach):
    so_far: list[int] = []
    for window in cut(document, reach=reach):
        assert list(window.before) == ([1, 2, 3, *so_far][-reach:] if reach else [])
        so_far += window.tokens


def test_a_window_is_as_full_as_it_can_be():
    assert [len(window.chunks) for window in cut([[5] * 10] * 7)] == [3, 3, 1]


def test_a_document_is_read_one_chunk_ahead_at_most():
    taken = []
    document = ([number] * 10 for number in range(9) if taken.append(number) is None)
    assert len(next(windows(document, (), 5, 30)).chunks) == 3
    assert taken == [0, 1, 2, 3]


def test_no_chunks_are_no_windows():
    assert cut([]) == []


def test_the_stand_in_is_plain_text_of_some_length():
    text = stand_in()
    assert 1000 < len(text) < 2000
    assert text.isascii()
