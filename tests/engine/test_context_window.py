"""Texts that can never fit are refused before they are searched or tokenised; what fits never is."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse import Ask, InputError, Piece
from ragfuse.engine.context_window import (
    CUT_TOKENS,
    PIECE_CHARS,
    UNCHECKED_CHARS,
    check_messages,
    check_schema,
    check_texts,
    largest_body,
    least_tokens,
    may_fit,
)
from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel
from ragfuse.schemas.pml import parse_schema
from ragfuse.text.chat_messages import ChatMessage
from ragfuse.text.known_spans import KnownSpans
from tests.tiny import CHUNKS, INSTRUCTION, QUESTION, messages

PAST = 4 << 20


class Words:
    """A model with a token for each word, or each so many characters; it counts the characters that it tokenises."""

    name = "words"

    def __init__(self, longest: int | None = 1000, chars_per_token: int | None = None) -> None:
        self.max_context, self.read = longest, 0
        self._chars = chars_per_token

    def tokens(self, text: str, special: bool = False) -> list[int]:
        self.read += len(text)
        return list(range(0, len(text), self._chars)) if self._chars else [len(word) for word in text.split()]


@pytest.fixture
def read(monkeypatch):
    """Characters that any model has tokenised since, each text by itself."""
    lengths = list[int]()
    tokens = HFModel.tokens

    def counted(self, text, special=False):
        lengths.append(len(text))
        return tokens(self, text, special)

    monkeypatch.setattr(HFModel, "tokens", counted)
    return lengths


@pytest.fixture
def searched(monkeypatch):
    """Tokens that were searched for known chunks since."""
    lengths = list[int]()
    find = KnownSpans.find

    def counted(self, ids):
        lengths.append(len(ids))
        return find(self, ids)

    monkeypatch.setattr(KnownSpans, "find", counted)
    return lengths


# of texts


@pytest.mark.parametrize("n_chars", [1 << 20, 1 << 22, 1 << 24])
def test_a_text_far_above_the_window_is_read_no_further_than_the_window_goes(n_chars):
    model = Words(1000)
    with pytest.raises(OverlongError):
        check_texts(["word " * (n_chars // 5)], model)
    assert model.read <= 2 * PIECE_CHARS
    wide = Words(20_000)
    with pytest.raises(OverlongError):
        check_texts(["word " * (n_chars // 5)], wide)
    assert wide.read <= 2 * 5 * 20_000


def test_a_text_of_usual_length_is_not_read_at_all():
    model = Words(1000)
    check_texts(["word " * (UNCHECKED_CHARS * 1000 // 5)], model)
    assert model.read == 0


@given(st.text("ab \n\u00e9\U0001f600", max_size=60), st.integers(1, 900), st.integers(1, 5000))
def test_what_fits_is_never_refused(text, times, most):
    whole = text * times
    model = Words(most)
    n_tokens = len(model.tokens(whole))
    assert least_tokens(whole, model, most) <= n_tokens
    assert may_fit(whole, model) or n_tokens > most


def test_pieces_are_cut_at_spaces_and_cover_the_text():
    said = list[str]()

    class Noted(Words):
        def tokens(self, text: str, special: bool = False) -> list[int]:
            said.append(text)
            return super().tokens(text, special)

    chosen = random.Random(1)
    text = " ".join("x" * chosen.randrange(1, 30) for _ in range(20_000))
    least = least_tokens(text, Noted(1 << 20), 1 << 20, unchecked_chars=0)
    assert "".join(said) == text
    assert all(each.startswith(" ") for each in said[1:])
    assert 20_000 - CUT_TOKENS * len(said) <= least <= 20_000


def test_without_a_limit_nothing_is_refused():
    model = Words(None)
    check_texts(["a" * PAST], model)
    check_messages([ChatMessage("user", "a" * PAST)], model)
    assert may_fit("a" * PAST, model)
    assert model.read == 0


# of messages


def test_what_is_thought_before_an_answer_and_white_space_around_it_do_not_count():
    model = Words(100, 4)
    blank = [ChatMessage("user", f"{' ' * 1000}hi{' ' * 1000}")]
    check_messages(blank, model)
    with pytest.raises(OverlongError):
        check_messages(blank, model, is_text=True)
    check_messages(
        [
            ChatMessage("user", "hi"),
            ChatMessage("assistant", f"<think>{'a' * 1000}</think>b"),
            ChatMessage("user", "hi"),
        ],
        model,
    )
    with pytest.raises(OverlongError):
        check_messages(
            [ChatMessage("user", "hi"), ChatMessage("assistant", "a" * 1000), ChatMessage("user", "hi")], model
        )


def test_of_a_conversation_that_may_be_shortened_what_stays_counts():
    model, long = Words(100, 4), "a" * 1000
    turns = [
        ChatMessage("system", "s"),
        ChatMessage("user", long),
        ChatMessage("assistant", "b"),
        ChatMessage("user", "c"),
    ]
    check_messages(turns, model, may_shorten=True)
    for stays in ([ChatMessage("system", long), *turns[1:]], [*turns, ChatMessage("user", long)]):
        with pytest.raises(OverlongError):
            check_messages(stays, model, may_shorten=True)


def test_tools_and_what_they_are_called_with_count():
    model, long = Words(100, 4), {"a": ["b" * 1000]}
    with pytest.raises(OverlongError):
        check_messages([ChatMessage("user", "hi")], model, [{"function": {"name": "f", "parameters": long}}])


def test_more_messages_than_tokens_are_refused():
    with pytest.raises(OverlongError, match="at least 101 in"):
        check_messages(
            [ChatMessage(role, "a") for role in ("user", "assistant")] * 50 + [ChatMessage("user", "a")],
            Words(100, 100),
        )


# of an engine


QUESTIONS = {
    "a text": "word " * (PAST // 5),
    "one word": "a" * PAST,
    "a message": [("user", "word " * (PAST // 5))],
    "many parts": [("user", ["word "] * (PAST // 50))],
    "chunks": [("user", [Piece("word " * 100, "chunk")] * (PAST // 500))],
    "what the system says": [("system", "word " * (PAST // 5)), ("user", "hi")],
    "beginnings of marks": "[[chunk:1::" * (PAST // 11),
    "forged marks": f"[[chunk:1::{'0' * 32}]]a[[end:{'0' * 32}]]" * (PAST // 84),
    "a forged mark": f"[[chunk:1:{'a' * PAST}:{'0' * 32}]]",
    "openings of thoughts": [("user", "<think>" * (PAST // 7))],
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_question_of_four_megabytes_is_refused_before_it_is_searched_or_tokenised(engine, question, read, searched):
    longest = engine.model.max_context
    read.clear()
    for ask in (
        engine.answer,
        engine.plan,
        lambda each: "".join(engine.stream(each)),
        lambda each: engine.batch([each]),
    ):
        with pytest.raises(OverlongError, match=f"takes at most {longest:,} tokens.*found at least"):
            ask(question)
    assert sum(read) <= 4 * PIECE_CHARS
    assert sum(searched) == 0


def test_a_name_of_a_conversation_makes_no_difference(engine, read, searched):
    engine.model  # noqa: B018
    read.clear()
    with pytest.raises(OverlongError):
        engine.answer([("user", QUESTIONS["a text"])], Ask(session="a"))
    assert sum(read) <= 4 * PIECE_CHARS
    assert sum(searched) == 0


def test_where_chunks_may_be_left_out_what_is_left_counts(engine, read):
    longest, chunk = engine.model.max_context, Piece("word " * 2000, "chunk")
    read.clear()
    parts = [Piece(INSTRUCTION), *[chunk] * 400, Piece(QUESTION)]
    answer = engine.answer([("user", parts)], Ask(overflow="drop"))
    assert answer.trace.dropped
    assert answer.trace.tokens <= longest
    assert sum(read) < 400 * 10_000  # less than all of it, though it is asked for several times
    read.clear()
    parts = [Piece(INSTRUCTION), Piece(CHUNKS[0], "chunk"), Piece("past " * (PAST // 5))]
    with pytest.raises(OverlongError, match=r"without the 1 chunks that could be left out does not fit.*at least"):
        engine.answer([("user", parts)], Ask(overflow="drop"))
    assert sum(read) <= 4 * PIECE_CHARS


def test_a_prompt_that_fits_to_the_token_is_answered(engine):
    longest = engine.model.max_context
    room = longest - (len(engine.prompt([("user", "a")])) - 1)
    assert engine.answer([("user", "a" * room)], Ask(max_tokens=1)).trace.tokens == longest
    with pytest.raises(InputError, match=f"found {longest + 1:,}"):
        engine.answer([("user", "a" * (room + 1))], Ask(max_tokens=1))


def test_documents_that_can_never_stand_in_a_prompt_are_not_tokenised(engine, read):
    document = "word " * (PAST // 5)
    engine.model  # noqa: B018
    read.clear()
    engine.know([(document, "book")])
    engine.prefetch([document])
    engine.answer(messages(), Ask(documents=[(document, "book"), (CHUNKS[0], "page")]))
    engine.flush()
    assert max(read) < 2 * PIECE_CHARS
    assert len(engine._stages.prompts._spans) == len(CHUNKS)
    with pytest.raises(OverlongError, match="A chunk of 'book' does not fit"):
        engine.ingest([(document, "book")])
    assert max(read) < 2 * PIECE_CHARS


# in PML


def test_a_schema_of_four_megabytes_is_refused_before_it_is_tokenised(engine, read):
    engine.model  # noqa: B018
    word = "word " * (PAST // 5)
    many = "".join(f'<module name="m{n}">{"word " * 1000}</module>' for n in range(PAST // 5000))
    deep = '<module name="a">' * 20 + word + "</module>" * 20
    for inside in (word, f'<module name="a">{word}</module>', many, deep, f"<user>{word}</user>"):
        read.clear()
        with pytest.raises(OverlongError, match=r"Schema 's' does not fit.*Shorten its modules"):
            engine.register(f'<schema name="s">{inside}</schema>')
        assert sum(read) <= 8 * PIECE_CHARS


def test_modules_of_a_union_stand_in_one_place_and_count_once():
    text = "word-of-a-schema " * 150
    union = "".join(f'<module name="m{n}">{text}</module>' for n in range(50))
    schema = parse_schema(f'<schema name="s">{text}<union>{union}</union></schema>')
    check_schema(schema, Words(300))
    with pytest.raises(OverlongError):
        check_schema(schema, Words(299))


def test_room_for_arguments_counts():
    schema = parse_schema('<schema name="s"><module name="a">b<parameter name="p" len="300"/></module></schema>')
    with pytest.raises(OverlongError, match="found at least 300"):
        check_schema(schema, Words(299))


def test_of_a_long_schema_no_more_is_read_than_the_window_holds():
    modules = "".join(f'<module name="m{n}">{"word " * 1000}</module>' for n in range(400))
    model = Words(10_000)
    with pytest.raises(OverlongError):
        check_schema(parse_schema(f'<schema name="s">{modules}</schema>'), model)
    assert model.read <= 2 * 5 * 10_000


def test_a_prompt_in_pml_of_four_megabytes_is_refused_before_it_is_tokenised(engine, read):
    engine.register(
        '<schema name="s"><module name="a">A module of some words.<parameter name="p" len="9"/></module></schema>'
    )
    word = "word " * (PAST // 5)
    for inside in (
        word,
        f"<a/><user>{word}</user>",
        f'<a p="{word}"/>',
        f"<a>{word}</a>",
        "<a/>" + f"<user>{word[:5000]}</user>" * 800,
    ):
        read.clear()
        with pytest.raises(OverlongError, match=r"The prompt does not fit.*Shorten its texts and arguments"):
            engine.answer(pml=f'<prompt schema="s">{inside}</prompt>')
        assert sum(read) <= 4 * PIECE_CHARS


# of a server


def test_the_largest_request_follows_from_the_window():
    assert largest_body(Words(1000)) == (1 << 18) + 2 * 128 * 1000
    assert largest_body(Words(1 << 20)) == largest_body(Words(None)) == 1 << 24
