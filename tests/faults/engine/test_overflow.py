"""Prompts that are too long for their model: told with the numbers, or answered without as few
chunks as it takes.
"""

import json
import shutil

import pytest

from ragfuse import Ask, Engine, InputError
from ragfuse.errors import OverlongError
from ragfuse.plan.explanation import in_words
from tests.kits.tiny import CHUNKS, chunk_hits, ingest, messages

SOURCES = tuple(f"book-{number}" for number in range(len(CHUNKS)))


@pytest.fixture
def narrow(varied_path, tmp_path, tiny_settings):
    """An engine whose model takes as many tokens as asked for."""
    engines = []

    def make(longest, **given):
        folder = tmp_path / f"narrow-{longest}"
        shutil.copytree(varied_path, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"max_position_embeddings": longest})
        )
        engines.append(Engine(tiny_settings.model_copy(update={"model": str(folder), **given})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def length(engine, n):
    """Tokens of the prompt with the first n chunks."""
    return len(engine.prompt(messages(CHUNKS[:n])))


@pytest.fixture
def tight(narrow, engine):
    """An engine whose model takes just four chunks and an answer of 12 tokens."""
    return narrow(length(engine, 4) + 11)


def test_unless_chunks_may_be_left_out_too_long_a_prompt_is_refused_with_the_numbers(tight):
    longest, found = length(tight, 4) + 11, length(tight, 6)
    with pytest.raises(InputError, match=f"{longest:,} tokens.*{found:,}.*overflow='drop'"):
        tight.answer(messages())


def test_the_last_chunks_are_left_out_and_told_by_plans_answers_streams_and_batches(tight):
    ingest(tight)
    ask, fitting = Ask(overflow="drop"), messages(CHUNKS[:4])
    assert "book-4, book-5" in in_words(tight.plan(messages(), ask))
    assert "book-" not in in_words(tight.plan(fitting, ask)).splitlines()[-1]
    wanted = tight.answer(fitting)
    with tight.stream(messages(), ask) as stream:
        "".join(stream)
    batch = tight.batch([messages(), fitting], ask)
    for answer in (tight.answer(messages(), ask), stream.answer, batch[0]):
        assert (answer.trace.dropped, answer.trace.tokens) == (SOURCES[4:], length(tight, 4))
        assert chunk_hits(answer.trace) == [True] * 4
        assert len(answer.token_ids) == 12
        assert answer.token_ids == wanted.token_ids
    assert batch[1].trace.dropped == ()


@pytest.mark.parametrize("given", [{"max_tokens": 13}, {"options": {"max_new_tokens": 13}}])
def test_one_token_more_to_say_costs_one_chunk_more(tight, given):
    assert tight.answer(messages(), Ask(overflow="drop", **given)).trace.dropped == SOURCES[3:]


def test_a_long_answer_claims_a_quarter_of_the_room_at_most(tight):
    longest = length(tight, 4) + 11
    answer = tight.answer(messages(), Ask(overflow="drop", max_tokens=longest))
    kept = len(CHUNKS) - len(answer.trace.dropped)
    assert answer.trace.tokens <= longest + 1 - longest // 4 < length(tight, kept + 1)
    assert len(answer.token_ids) >= longest // 4
    with pytest.raises(OverlongError, match=f"at most {longest:,} tokens"):
        tight.answer(messages(), Ask(overflow="drop", max_tokens=longest + 1))


def test_the_settings_may_say_so_and_a_question_otherwise(narrow, engine):
    tight = narrow(length(engine, 4) + 11, overflow="drop")
    assert tight.answer(messages()).trace.dropped == SOURCES[4:]
    with pytest.raises(InputError, match="does not fit"):
        tight.answer(messages(), Ask(overflow="error"))


def test_a_question_that_is_too_long_by_itself_is_refused(narrow, engine):
    tight = narrow(length(engine, 0) - 1)
    for chunks in (CHUNKS, ()):
        with pytest.raises(InputError, match="does not fit"):
            tight.answer(messages(chunks), Ask(overflow="drop"))


def test_without_chunks_the_answer_takes_what_room_there_is(narrow, engine):
    tight = narrow(length(engine, 0) + 4)
    answer = tight.answer(messages(), Ask(overflow="drop"))
    assert (answer.trace.dropped, len(answer.token_ids)) == (SOURCES, 5)


def test_an_answer_that_does_not_fit_behind_its_prompt_is_refused_with_the_numbers(tight):
    asked = messages(CHUNKS[:4])
    whole = tight.answer(asked, Ask(max_tokens=12))
    assert len(whole.token_ids) == 12
    for ask in (Ask(max_tokens=13), Ask(options={"max_new_tokens": 13})):
        for door in (tight.answer, tight.plan):
            with pytest.raises(OverlongError, match=f"13 tokens.*{length(tight, 4):,}.*at most 12"):
                door(asked, ask)
