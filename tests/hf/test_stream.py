"""What is said while it is written is, joined, what is read at the end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragfuse.hf.stream import Spelling, StopWhere, TextSink


@pytest.fixture(scope="module")
def words(smollm_path):
    return AutoTokenizer.from_pretrained(smollm_path)


def text_of(words):
    return lambda ids: str(words.decode(list(ids), skip_special_tokens=True))


def spoken(words, ids, size=1):
    said: list[str] = []
    sink = TextSink(text_of(words), said.append, lambda text: (text, len(text)), (2,))
    sink.put(torch.tensor([[5, 6, 7]]))
    for at in range(0, len(ids), size):
        sink.put(torch.tensor(ids[at : at + size]))
    sink.end()
    return said


@given(st.lists(st.integers(3, 49_151), max_size=40))
def test_random_ids_are_said_as_they_are_read(words, ids):
    said = spoken(words, ids)
    assert "".join(said) == text_of(words)(ids)
    assert all(said)


@given(st.text(alphabet=" \n\t.,'néß漢🙂a", max_size=30))
def test_white_space_and_parts_of_characters_are_neither_lost_nor_said_twice(words, text):
    ids = words(text, add_special_tokens=False).input_ids
    said = spoken(words, ids)
    assert "".join(said) == text
    assert "\ufffd" not in "".join(said)


def test_what_comes_behind_the_end_is_not_said(words):
    ids = words("One two", add_special_tokens=False).input_ids
    assert "".join(spoken(words, [*ids, 2, *ids])) == "One two"


def test_each_token_is_said_at_once(words):
    ids = words("One two three", add_special_tokens=False).input_ids
    assert spoken(words, ids) == ["One", " two", " three"]


def test_a_sequence_is_stopped_where_its_text_says_so(words):
    rows = [words(text, add_special_tokens=False).input_ids for text in (" a b c", " b c d")]
    stop = StopWhere(text_of(words), lambda text: "c" in text)
    over = [stop(torch.tensor([[1, *row[: size + 1]] for row in rows]), None).tolist() for size in range(3)]
    assert over == [[False, False], [False, True], [True, True]]


def test_bytes_that_never_become_a_character_are_said_at_the_end(words):
    broken = words("🙂", add_special_tokens=False).input_ids[:1]
    spelling = Spelling(text_of(words))
    assert spelling.add(broken) == ""
    assert spelling.end() == text_of(words)(broken)
