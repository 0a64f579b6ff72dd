"""Halves of characters (lone surrogates), as readers of PDF and JSON hand them out: replaced and told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse import Ask, ChatMessage, Engine, Piece
from ragfuse.types.keys import whole_text
from tests.tiny import CHUNKS, chunk_hits, messages

HALF = "A text from a PDF with a half \ud835 of a character, as some readers hand them out, and more words."
WHOLE = HALF.replace("\ud835", "\ufffd")


@given(st.text(st.characters(exclude_categories=())))
def test_a_whole_text_is_what_utf_8_can_hold_and_others_stay(text):
    found = whole_text(text)
    found.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert found != text
    else:
        assert found is text


def test_each_half_becomes_one_sign_and_two_that_belong_together_one_character():
    assert whole_text("a\ud835b\udc00c") == "a\ufffdb\ufffdc"
    assert whole_text("\ud83d\ude00") == "😀"


def test_an_ingest_replaces_halves_and_the_other_texts_are_kept(engine, caplog):
    done = engine.ingest([(CHUNKS[0], "a"), (HALF, "b\udc80.pdf"), (CHUNKS[1], "c")])
    assert done.chunks == 3
    (told,) = [record.message for record in caplog.records if "surrogates" in record.message]
    assert "b\ufffd.pdf" in told
    assert engine.known_texts("b\udc80.pdf") == [WHOLE]
    trace = engine.answer(messages([CHUNKS[0], HALF, CHUNKS[1]])).trace
    assert chunk_hits(trace) == [True] * 3
    assert engine.forget([HALF]) > 0
    assert engine.known_texts("b\ufffd.pdf") == []


QUESTIONS = {
    "text": HALF,
    "message": [("user", HALF)],
    "turn": [ChatMessage("user", HALF)],
    "piece": [("user", (Piece(HALF, "chunk", "s\ud800"), "\n\nWho?"))],
    "list": [("user", ["Hi ", HALF])],
    "system": [("system", HALF), ("user", "Who?")],
    "history": [("user", "Hi"), ("assistant", HALF), ("user", "Who?")],
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_question_is_answered_as_that_with_the_replaced_text(engine, kind):
    def whole(asked):
        if isinstance(asked, str):
            return whole_text(asked)
        if isinstance(asked, Piece):
            return Piece(whole_text(asked.text), asked.kind, whole_text(asked.source))
        if isinstance(asked, ChatMessage):
            return ChatMessage(asked.role, whole(asked.content))
        return type(asked)(map(whole, asked))

    asked = QUESTIONS[kind]
    ids = engine.prompt(asked).token_ids
    assert ids == engine.prompt(whole(asked)).token_ids
    exact = Ask(ratio=1.0)  # the same answer, whether what the first one read is kept by the second or not
    assert engine.answer(asked, exact).text == engine.answer(whole(asked), exact).text
    for session in ("one", None):
        assert (
            engine.answer(asked, Ask(session=session, documents=[(HALF, "d\ud800")], stop=["\ud835"])).text is not None
        )
    assert engine.plan(asked).prompt.token_ids
    with engine.stream(asked) as stream:
        assert stream.answer.text is not None
    engine.flush()


def test_what_is_known_prefetched_or_batched_may_hold_halves(engine):
    engine.know([(HALF, "x\ud800")])
    engine.prefetch([HALF])
    answers = engine.batch([messages([HALF]), f"Before. {HALF} After."])
    engine.flush()
    assert all(answer.text for answer in answers)
    assert chunk_hits(engine.answer(messages([HALF])).trace) == [True]


def test_a_later_process_finds_the_text_again(engine, tiny_settings):
    engine.ingest([(HALF, "b")])
    with Engine(tiny_settings) as other:
        assert chunk_hits(other.answer(f"{HALF}\n\nWho?").trace) == [True]
