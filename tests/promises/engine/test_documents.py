"""Documents of a prompt: each has its own source, and is counted once."""

import pytest

from ragfuse import Ask, Engine
from tests.kits.tiny import CHUNKS

LONG = "a tide that is too long to be known " * 4000
QUESTION = "Who kept the light?"


def asked(engine, documents, **options):
    """The trace of a question over documents, put into one text as a framework's plain
    chain does.
    """
    text = "\n\n".join([*(text for text, _ in documents), QUESTION])
    answer = engine.answer(
        [("user", text)], Ask(documents=tuple(documents), max_tokens=2, **options)
    )
    engine.flush()
    return answer.trace


def sources(trace):
    return [segment.source for segment in trace.segments if segment.kind == "chunk"]


def test_an_ingest_goes_on_without_what_is_too_long_and_names_it(engine):
    done = engine.ingest([(CHUNKS[0], "a.md"), (LONG, "long.md"), (CHUNKS[1], "b.md")])
    assert (done.chunks, done.encoded, done.left_out) == (2, 2, ("long.md",))


@pytest.mark.parametrize("learn", ["text", "off"])
def test_equal_texts_of_one_prompt_have_their_own_sources(tiny_settings, learn):
    given = [(CHUNKS[0], "a.md"), (CHUNKS[1], "c.md"), (CHUNKS[0], "b.md")]
    with Engine(tiny_settings.model_copy(update={"learn": learn})) as engine:
        engine.ingest([(text, "ingested") for text, _ in given])
        assert sources(asked(engine, given)) == ["a.md", "c.md", "b.md"]


def test_a_document_that_stands_in_another_has_its_own_source(engine):
    given = [
        (CHUNKS[1], "other.md"),
        (CHUNKS[0], "alone.md"),
        (f"{CHUNKS[2]}\n\n{CHUNKS[0]}", "whole.md"),
    ]
    assert sources(asked(engine, given)) == ["other.md", "alone.md", "whole.md"]


def test_another_program_on_the_store_reads_no_source_of_the_first(tiny_settings):
    with Engine(tiny_settings) as first:
        assert (
            sources(asked(first, [(CHUNKS[0], "first.md"), (CHUNKS[1], "first.md")]))
            == ["first.md"] * 2
        )
    with Engine(tiny_settings) as second:
        trace = asked(second, [(CHUNKS[1], ""), (CHUNKS[0], "second.md")])
        again = asked(second, [(CHUNKS[0], "third.md")])
    assert [segment.hit for segment in trace.segments if segment.kind == "chunk"] == [True, True]
    assert sources(trace) == ["", "second.md"]
    assert sources(again) == ["third.md"]


def test_stored_passages_of_a_document_are_parts_of_one(engine):
    engine.ingest([(text, "old.md") for text in CHUNKS[:3]])
    trace = asked(
        engine,
        [
            ("\n\n".join(CHUNKS[:3]), "whole.md"),
            ("A new one on quite another matter. " * 3, "new.md"),
        ],
    )
    told = [
        (segment.source, segment.goes_on) for segment in trace.segments if segment.kind == "chunk"
    ]
    assert told == [("whole.md", False), ("whole.md", True), ("whole.md", True), ("new.md", False)]
