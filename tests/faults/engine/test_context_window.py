"""Texts that can never fit are refused before they are searched or tokenised; what fits
never is.
"""

import pytest

from ragfuse import Ask, InputError, Piece
from ragfuse.errors import OverlongError
from ragfuse.hf.model import HFModel
from ragfuse.text.known_spans import KnownSpans
from tests.kits.tiny import CHUNKS, messages

PAST = 1 << 21
LONG = "word " * (PAST // 5)


@pytest.fixture
def read(monkeypatch):
    """Characters that any model has tokenised since, each text by itself."""
    lengths = []
    tokens = HFModel.tokens

    def counted(self, text, special=False):
        lengths.append(len(text))
        return tokens(self, text, special)

    monkeypatch.setattr(HFModel, "tokens", counted)
    return lengths


@pytest.fixture
def searched(monkeypatch):
    """Tokens that were searched for known chunks since."""
    lengths = []
    find = KnownSpans.find

    def counted(self, ids, *given):
        lengths.append(len(ids))
        return find(self, ids, *given)

    monkeypatch.setattr(KnownSpans, "find", counted)
    return lengths


QUESTIONS = {
    "a text": LONG,
    "one word": "a" * PAST,
    "a message": [("user", LONG)],
    "many parts": [("user", ["word "] * (PAST // 10))],
    "chunks": [("user", [Piece("word " * 100, "chunk")] * (PAST // 500))],
    "what the system says": [("system", LONG), ("user", "hi")],
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_question_far_above_the_window_is_refused_before_it_is_searched_or_tokenised(
    engine, question, read, searched
):
    longest = engine.model.max_context
    engine.answer("Who?", Ask(max_tokens=1))  # asks the template once how it writes calls
    read.clear()
    searched.clear()
    for ask in (engine.answer, engine.plan, lambda each: "".join(engine.stream(each))):
        with pytest.raises(
            OverlongError, match=f"takes at most {longest:,} tokens.*found at least"
        ):
            ask(question)
    assert sum(read) < 10_000
    assert sum(searched) == 0


def test_a_prompt_that_fits_to_the_token_is_answered(engine):
    longest = engine.model.max_context
    room = longest - (len(engine.prompt([("user", "a")])) - 1)
    assert engine.answer([("user", "a" * room)], Ask(max_tokens=1)).trace.tokens == longest
    with pytest.raises(InputError, match=f"found {longest + 1:,}"):
        engine.answer([("user", "a" * (room + 1))], Ask(max_tokens=1))


def test_documents_that_can_never_stand_in_a_prompt_are_not_tokenised(engine, read):
    engine.model  # noqa: B018
    read.clear()
    engine.know([(LONG, "book")])
    engine.prefetch([LONG])
    engine.answer(messages(), Ask(documents=[(LONG, "book"), (CHUNKS[0], "page")]))
    engine.flush()
    assert max(read) < PAST


def test_schemas_and_prompts_in_pml_that_do_not_fit_are_refused(engine):
    text = "word " * 2000
    for inside in (text, f'<module name="a">{text}</module>', f"<user>{text}</user>"):
        with pytest.raises(OverlongError, match=r"Schema 's' does not fit.*Shorten its modules"):
            engine.schemas.register(f'<schema name="s">{inside}</schema>')
    engine.schemas.register(
        '<schema name="s"><module name="a">A module of some words.</module></schema>'
    )
    with pytest.raises(OverlongError, match="The prompt does not fit"):
        engine.answer(pml=f'<prompt schema="s"><a/><user>{text}</user></prompt>')
