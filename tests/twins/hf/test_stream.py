"""What is said while it is written is, joined, what is read at the end; stop strings are met in it
alone.
"""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.hf.handover import (
    CONTEXT_TOKENS_BEFORE,
    MAX_PENDING_TOKENS,
    Detokenizer,
    Follower,
    StopFinder,
)
from tests.contracts.text.test_reading import KINDS, tokenizer

LETTERS = " \n\t.,'néß漢🙂a"


NAMES = ("byte-level", "legacy", "wordpiece", "unigram", "wordpiece that cleans up")


def small(name):
    """A small tokenizer of a kind."""
    words = tokenizer(next(kind for kind in KINDS if kind.name == name.split(" that")[0]))
    if "cleans" in name:
        words = copy.deepcopy(words)
        words.clean_up_tokenization_spaces = True
    return words


@pytest.fixture(scope="module", params=NAMES)
def kind(request):
    return small(request.param)


def text_of(words):
    return lambda ids: str(words.decode(list(ids), skip_special_tokens=True))


class Sink:
    """A sequence that tells its text, and is over at the first stop string in it."""

    def __init__(self, words, stops=()):
        self._spelling, self._stops, self._told = Detokenizer.of(words, stops), StopFinder(stops), 0

    @property
    def over(self):
        return self._stops.at >= 0

    def add(self, ids):
        for id in ids:
            text = self._spelling.add([id])
            self._stops.look(text, 0, len(text))

    def end(self):
        self._spelling.end()

    def take(self):
        piece, self._told = self._spelling.text[self._told :], len(self._spelling.text)
        return iter([piece] if piece else [])


def spoken(words, ids):
    said: list[str] = []
    follower = Follower(Sink(words), said.append)
    for count in range(1, len(ids) + 1):
        follower(torch.tensor([[5, 6, 7, *ids[:count]]]), None)
    follower.end()
    return said


@given(data=st.data())
def test_streamed_pieces_join_to_the_decoded_text_for_every_tokenizer(kind, data):
    ids = data.draw(st.lists(st.integers(0, len(kind) - 1), max_size=60))
    assert "".join(spoken(kind, ids)) == text_of(kind)(ids) or "\ufffd" in text_of(kind)(ids)
    text = data.draw(st.text(alphabet=LETTERS, max_size=60))
    ids = kind(text, add_special_tokens=False).input_ids
    said = spoken(kind, ids)
    assert "".join(said) == text_of(kind)(ids)
    assert all(said)


def test_each_token_is_said_at_once():
    words = small("byte-level")
    ids = words("One two three", add_special_tokens=False).input_ids
    assert spoken(words, ids) == [words.decode([id]) for id in ids]


@given(st.text(alphabet=LETTERS, min_size=1, max_size=30), st.data())
def test_a_stop_string_is_met_with_the_token_that_makes_it_whole(kind, text, data):
    """Against the slow way: the whole text is read again with every token."""
    ids = kind(text, add_special_tokens=False).input_ids
    whole = text_of(kind)(ids)
    if "\ufffd" in whole or not whole:
        return
    lo = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[lo : data.draw(st.integers(lo + 1, len(whole)))]
    watch, spelling = Sink(kind, [stop]), Detokenizer.of(kind)
    for at, id in enumerate(ids):
        spelling.add([id])
        watch.add([id])
        assert watch.over == (stop in spelling.text), at
    assert stop in spelling.end()


class Counted(str):
    """A text that counts how many of its characters are searched."""

    searched = 0

    def find(self, what, lo=0, hi=None):
        Counted.searched += (len(self) if hi is None else hi) - lo
        return super().find(what, lo, hi)


def test_work_for_a_token_does_not_grow_with_the_answer():
    decoded = list[int]()

    def text_of(ids):
        decoded.append(len(ids))
        return "".join(chr(97 + id % 26) for id in ids)

    spelling, finder = Detokenizer(text_of), StopFinder(["xyzzy", "\n"])
    for at in range(4000):
        spelling.add([at * 7])
        finder.look(Counted(spelling.text), 0, len(spelling.text))
    assert len(spelling.text) == 4000
    assert max(decoded) <= 2 * CONTEXT_TOKENS_BEFORE
    assert Counted.searched <= 4000 * 2 * len("xyzzy")


def test_bytes_that_never_become_a_character_do_not_pile_up():
    decoded, words = list[int](), small("byte-level")

    def text_of(ids):
        decoded.append(len(ids))
        return str(words.decode(list(ids), skip_special_tokens=True))

    spelling, hidden = Detokenizer(text_of), [0, 3]
    broken = words("🙂", add_special_tokens=False).input_ids[:1]
    spelling.add(broken * 500)
    assert max(decoded) <= MAX_PENDING_TOKENS
    assert set(spelling.end()) == {"\ufffd"}
    silent = Detokenizer(text_of, hidden)
    assert silent.add(hidden * 500) == ""
    assert silent.add(words("ab", add_special_tokens=False).input_ids) == "ab"
