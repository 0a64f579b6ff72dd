"""One question, asked five times through each door: soon the same tokens each time, from the same
entries.
"""

import pytest

from ragfuse import Ask, Engine
from tests.kits.tiny import CHUNKS, INSTRUCTION, QUESTION, messages

TEXT = [("user", "\n\n".join([INSTRUCTION.strip(), *CHUNKS, QUESTION]))]
DOCUMENTS = [(text, f"book-{number}") for number, text in enumerate(CHUNKS)]


def indexed(engine):
    engine.ingest(DOCUMENTS)
    return TEXT, Ask()


def indexed_behind_its_beginning(engine):
    engine.ingest(DOCUMENTS, engine.prefix(messages()))
    return TEXT, Ask()


def known(engine):
    engine.know(DOCUMENTS)
    return TEXT, Ask()


def heard(engine):
    return TEXT, Ask(documents=DOCUMENTS)


def given_as_pieces(engine):
    return messages(), Ask()


DOORS = [indexed, indexed_behind_its_beginning, known, heard, given_as_pieces]


def how(answer):
    """What an answer says of how it was made: policy, and of each chunk the entry and its tier's
    level.
    """
    trace = answer.trace
    chunks = [
        (each.hit, each.encoded, each.level) for each in trace.segments if each.kind == "chunk"
    ]
    return trace.policy, trace.ratio, trace.fallback_reason, chunks


def asked(engine, question, ask, times):
    """Answers one after another, each once what the one before it leaves is stored."""
    answers = []
    for _ in range(times):
        answers.append(engine.answer(question, ask))
        engine.flush()
    return answers


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_five_times_the_same_question_is_soon_one_answer(tiny_settings, door, prefix_cache):
    # The first chunk is encoded behind its beginning once that has come twice: it is exact from the
    # third time on.
    settled = 2 if prefix_cache else 1
    with Engine(tiny_settings.model_copy(update={"prefix_cache": prefix_cache})) as engine:
        answers = asked(engine, *door(engine), 5)
        assert len({answer.token_ids for answer in answers[settled:]}) == 1
        assert len({str(how(answer)) for answer in answers[settled:]}) == 1
        assert answers[1].trace.tokens_reused > 0


@pytest.mark.parametrize("door", DOORS)
def test_whichever_way_chunks_came_into_the_store_the_answer_is_one(tiny_settings, door):
    with Engine(tiny_settings) as engine:
        _, mine = asked(engine, *door(engine), 2)
    with Engine(tiny_settings.model_copy(update={"store": tiny_settings.home / "other"})) as engine:
        engine.ingest(DOCUMENTS)
        wanted = engine.answer(TEXT)
    assert mine.trace.tokens == wanted.trace.tokens
    assert mine.token_ids == wanted.token_ids
    assert how(mine) == how(wanted)


def test_what_recurs_is_learnt_and_then_answers_stay_as_they_are(tiny_settings):
    learns = tiny_settings.model_copy(update={"learn": "text"})
    with Engine(learns) as engine:
        for question in ("Question: When?", "Question: Where?"):  # met, and met again
            asked(engine, [("user", "\n\n".join([*CHUNKS, question]))], Ask(), 1)
        answers = asked(engine, TEXT, Ask(), 4)
        assert answers[0].trace.tokens_chunks > 0
        assert len({answer.token_ids for answer in answers}) == 1
        assert len({str(how(answer)) for answer in answers}) == 1
