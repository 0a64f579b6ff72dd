"""NUL and halves of characters (lone surrogates), as readers of PDF and JSON hand them out:
replaced and told.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse import Ask, Piece
from ragfuse.types.texts import whole_text, whole_value
from tests.kits.tiny import CHUNKS, chunk_hits, known_texts, messages

ODD = (
    "A text from a PDF with an odd \ud835 character or \0 two, as some readers hand them out, and"
    " more words."
)
WHOLE = ODD.replace("\ud835", "\ufffd").replace("\0", "\ufffd")


@given(st.text(st.characters(exclude_categories=())))
def test_a_whole_text_is_what_utf_8_and_xml_can_hold_and_others_stay(text):
    found = whole_text(text)
    assert "\0" not in found
    found.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert found != text
    else:
        assert (found is text) == ("\0" not in text)
    assert whole_text(found) is found
    assert whole_text("a\ud835b\udc00c\0d") == "a\ufffdb\ufffdc\ufffdd"
    assert whole_text("\ud83d\ude00\x01\x7f\ufeff") == "😀\x01\x7f\ufeff"


def test_the_texts_of_a_value_are_replaced_wherever_they_stand(caplog):
    value = {"a\0": [1, None, {"b": ("\ud800", True)}], "c": 0.5}
    assert whole_value(value, "It") == {"a\ufffd": [1, None, {"b": ("\ufffd", True)}], "c": 0.5}
    assert len(caplog.records) == 2
    for same in ({"a": [1, ("b",)], "c": None}, [], "text", 7):
        assert whole_value(same, "It") == same


def test_an_ingest_replaces_them_and_the_other_texts_are_kept(engine, caplog):
    done = engine.ingest([(CHUNKS[0], "a"), (ODD, "b\udc80\0.pdf"), (CHUNKS[1], "c")])
    assert done.chunks == 3
    (told,) = [record.message for record in caplog.records if "surrogate" in record.message]
    assert "b\ufffd\ufffd.pdf" in told
    assert known_texts(engine, "b\ufffd\ufffd.pdf") == [WHOLE]
    trace = engine.answer(messages([CHUNKS[0], ODD, CHUNKS[1]])).trace
    assert chunk_hits(trace) == [True] * 3
    assert engine.forget([ODD]) > 0
    assert known_texts(engine, "b\ufffd\ufffd.pdf") == []


QUESTIONS = {
    "text": ODD,
    "message": [("user", ODD)],
    "piece": [("user", (Piece(ODD, "chunk", "s\ud800"), "\n\nWho?"))],
    "history": [("user", "Hi"), ("assistant", ODD), ("user", "Who?")],
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_question_is_answered_as_that_with_the_replaced_text(engine, kind):
    def whole(asked):
        if isinstance(asked, str):
            return whole_text(asked)
        if isinstance(asked, Piece):
            return Piece(whole_text(asked.text), asked.kind, whole_text(asked.source))
        return type(asked)(map(whole, asked))

    asked = QUESTIONS[kind]
    ids = engine.prompt(asked).token_ids
    assert ids == engine.prompt(whole(asked)).token_ids
    # the same answer, whether what the first one read is kept by the second or not
    exact = Ask(ratio=1.0)
    assert engine.answer(asked, exact).text == engine.answer(whole(asked), exact).text
    engine.prefetch([ODD])
    ask = Ask(session="one", documents=[(ODD, "d\ud800")], stop=["\ud835", "\0"])
    trace = engine.answer(asked, ask).trace
    assert "d\ufffd" in {segment.source for segment in trace.segments}
