"""Prompts that are too long for their model: told with the numbers, or answered without as few
chunks as it takes.
"""

import json
import shutil

import pytest

from ragfuse import Ask, Engine, InputError, Piece
from ragfuse.errors import OverlongError
from ragfuse.plan.explanation import in_words
from tests.tiny import CHUNKS, INSTRUCTION, QUESTION, chunk_hits, ingest, messages

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


def test_without_a_wish_it_is_an_error_with_the_numbers_and_the_way_out(tight):
    longest, found = length(tight, 4) + 11, length(tight, 6)
    with pytest.raises(
        InputError, match=f"at most {longest:,} tokens.*found {found:,}.*overflow='drop'"
    ):
        tight.answer(messages())


def test_the_last_chunks_are_left_out_and_told(tight):
    answer = tight.answer(messages(), Ask(overflow="drop"))
    assert answer.trace.dropped == SOURCES[4:]
    assert answer.trace.as_dict()["dropped"] == [*SOURCES[4:]]
    assert answer.trace.tokens == length(tight, 4)
    assert len(answer.token_ids) == 12


def test_it_is_the_prompt_that_the_remaining_chunks_make(tight):
    ingest(tight)
    lean, wanted = (
        tight.answer(*asked)
        for asked in ((messages(), Ask(overflow="drop")), (messages(CHUNKS[:4]),))
    )
    assert lean.token_ids == wanted.token_ids
    assert chunk_hits(lean.trace) == [True] * 4


def test_one_token_more_to_say_costs_one_chunk_more(tight):
    assert (
        tight.answer(messages(), Ask(overflow="drop", max_tokens=13)).trace.dropped == SOURCES[3:]
    )
    assert (
        tight.answer(messages(), Ask(overflow="drop", options={"max_new_tokens": 13})).trace.dropped
        == SOURCES[3:]
    )


def test_a_long_answer_claims_a_quarter_of_the_room_at_most(tight):
    longest = length(tight, 4) + 11
    trace = tight.answer(messages(), Ask(overflow="drop", max_tokens=longest)).trace
    kept = len(CHUNKS) - len(trace.dropped)
    assert trace.tokens <= longest + 1 - longest // 4 < length(tight, kept + 1)


def test_the_settings_may_say_so_and_a_question_otherwise(narrow, engine):
    tight = narrow(length(engine, 4) + 11, overflow="drop")
    assert tight.answer(messages()).trace.dropped == SOURCES[4:]
    with pytest.raises(InputError, match="does not fit"):
        tight.answer(messages(), Ask(overflow="error"))


def test_one_text_is_fitted_too(narrow, engine):
    def text(chunks):
        return "\n".join([INSTRUCTION, *chunks, QUESTION])

    tight = narrow(len(engine.prompt(text(CHUNKS[:2]))) + 11)
    documents = list(zip(CHUNKS, SOURCES, strict=True))
    answer = tight.answer(text(CHUNKS), Ask(overflow="drop", documents=documents))
    assert answer.trace.dropped == SOURCES[2:]
    assert answer.trace.tokens == len(tight.prompt(text(CHUNKS[:2])))


def test_known_chunks_in_a_text_are_left_out(tight):
    ingest(tight)
    question = [("system", INSTRUCTION), ("user", "\n\n".join([*CHUNKS, QUESTION]))]
    assert tight.answer(question, Ask(overflow="drop")).trace.dropped[-1] == SOURCES[5]


def test_chunks_too_short_to_be_reused_are_left_out_as_well(narrow, engine):
    def short(n):
        parts = [
            Piece(INSTRUCTION),
            *(Piece("ab ", "chunk", str(number)) for number in range(n)),
            Piece(QUESTION),
        ]
        return [("user", parts)]

    tight = narrow(len(engine.prompt(short(7))) + 11)
    assert tight.answer(short(40), Ask(overflow="drop")).trace.tokens == len(tight.prompt(short(7)))


def test_where_even_the_question_is_too_long_it_is_an_error_that_says_what_was_tried(
    narrow, engine
):
    tight = narrow(length(engine, 0) - 1)
    with pytest.raises(InputError, match="does not fit"):
        tight.answer(messages(), Ask(overflow="drop"))
    with pytest.raises(InputError, match=r"Shorten it\.$"):
        tight.answer(messages([]), Ask(overflow="drop"))
    with pytest.raises(InputError, match=r"Shorten it\.$"):
        tight.answer(messages([]))


def test_without_chunks_the_answer_takes_what_room_there_is(narrow, engine):
    tight = narrow(length(engine, 0) + 4)
    answer = tight.answer(messages(), Ask(overflow="drop"))
    assert (answer.trace.dropped, len(answer.token_ids)) == (SOURCES, 5)


def test_streams_and_batches_are_fitted_alike(tight):
    ask = Ask(overflow="drop")
    with tight.stream(messages(), ask) as stream:
        "".join(stream)
        assert stream.answer.trace.dropped == SOURCES[4:]
    batch = tight.batch([messages(), messages(CHUNKS[:2])], ask)
    assert [answer.trace.dropped for answer in batch] == [SOURCES[4:], ()]


def test_a_plan_says_what_is_left_out(tight):
    ingest(tight)
    plan = tight.plan(messages(), Ask(overflow="drop"))
    assert "Left out, so that the prompt and an answer fit: book-4, book-5." in in_words(plan)
    assert "Left out" not in in_words(tight.plan(messages(CHUNKS[:4]), Ask(overflow="drop")))


def test_an_answer_that_does_not_fit_behind_its_prompt_is_refused_with_the_numbers(tight):
    asked = messages(CHUNKS[:4])
    whole = tight.answer(asked, Ask(max_tokens=12))
    assert len(whole.token_ids) == 12
    for ask in (Ask(max_tokens=13), Ask(options={"max_new_tokens": 13})):
        with pytest.raises(OverlongError) as error:
            tight.answer(asked, ask)
        behind = f"An answer of 13 tokens does not fit behind a prompt of {length(tight, 4):,}: "
        assert str(error.value).startswith(behind)
        assert error.value.advice == "Ask for at most 12 tokens, or shorten the prompt."
    with pytest.raises(OverlongError, match="An answer of 13 tokens"):
        tight.plan(asked, Ask(max_tokens=13))


def test_where_chunks_may_be_left_out_an_answer_gets_the_room_that_they_leave(tight):
    longest = length(tight, 4) + 11
    answer = tight.answer(messages(CHUNKS), Ask(overflow="drop", max_tokens=longest))
    assert len(answer.token_ids) >= longest // 4
    with pytest.raises(
        OverlongError,
        match=rf"fit: .* at most {longest:,} tokens.*Ask for at most {longest:,} tokens\.",
    ):
        tight.answer(messages(CHUNKS), Ask(overflow="drop", max_tokens=longest + 1))
