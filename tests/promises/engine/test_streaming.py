"""A question with a deadline over a real Redis behind a line: what comes is used, what does not is
computed.
"""

import json

import pytest
from ragfuse_bench.line import constant, line_to

from ragfuse import Ask, Engine
from ragfuse.codec import RawCodec
from ragfuse.load.stream import COMPUTED
from ragfuse.types.plan import UNREADABLE
from tests.kits.plan import timings, with_cost
from tests.kits.redis_server import RedisServer
from tests.kits.tiny import CHUNKS, adds_up, chunk_hits, ingest, messages

NEVER, SLOWLY = 3600.0, 1e-1
"""Seconds: a deadline that everything meets, and what a computed row takes where reading always
pays.
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def line(server):
    with line_to(server.port) as line:
        yield line


@pytest.fixture
def settings(tiny_settings, server, line):
    """Redis behind the line and nothing else, every chunk at two levels, a chunk a piece."""
    server.raw().flushall()
    url = f"redis://127.0.0.1:{line.port}/0"
    levels = {"redis": ["raw", "int8"]}
    given = {
        "tiers": (url,),
        "levels": levels,
        "memory_bytes": 0,
        "disk_bytes": 0,
        "filler_tokens": 0,
    }
    return tiny_settings.model_copy(update={**given, "tier_timeout_s": 3.0})


@pytest.fixture
def engine(settings):
    with Engine(settings) as engine:
        ingest(engine)
        engine.flush()
        yield engine


def computing(engine, row_s, byte_s=1e-9):
    """This machine computes a row in so long, as far as plans know, and Redis carries so much."""
    engine.timings.learn(with_cost(timings(engine, redis=byte_s, memory=0.0), row_s=row_s))


def test_what_comes_in_time_is_what_would_have_been_read_anyway(engine):
    wanted = engine.answer(messages(), Ask(ratio=0.0))
    assert wanted.trace.stream is None
    assert all(chunk_hits(wanted.trace))
    computing(engine, SLOWLY)
    found = engine.answer(messages(), Ask(ratio=0.0, deadline_s=50.0))
    assert {segment.level for segment in found.trace.segments if segment.kind == "chunk"} == {"raw"}
    assert len(found.trace.stream.pieces) >= len(CHUNKS)
    assert json.loads(json.dumps(found.trace.as_dict()))["stream"]["pieces"][0]["level"] == "int8"
    assert not found.trace.is_late
    assert (found.text, found.trace.tokens_reused) == (wanted.text, wanted.trace.tokens_reused)
    assert adds_up(found.trace)


def test_with_time_for_it_all_is_computed_and_the_answer_is_full_prefills(engine):
    computing(engine, 1e-6, byte_s=1.0)
    before = engine.store.entries()
    found = engine.answer(messages(), Ask(deadline_s=NEVER, ratio=0.15))
    assert {piece.why for piece in found.trace.stream.pieces} == {COMPUTED}
    assert not found.trace.is_late
    assert not any(chunk_hits(found.trace))
    assert found.text == engine.answer(messages(), Ask(reuse=False)).text
    engine.flush()
    assert {entry.key for entry in engine.store.entries()} == {entry.key for entry in before}


def test_a_line_that_stands_still_costs_the_deadline_and_no_answer(engine, line):
    computing(engine, 2e-3)
    engine.answer(messages(), Ask(ratio=0.0, deadline_s=0.1))
    line.start(constant(0.0))
    found = engine.answer(messages(), Ask(ratio=0.0, deadline_s=0.1))
    assert not any(chunk_hits(found.trace))
    assert (
        not found.trace.stream
        or {piece.level for piece in found.trace.stream.pieces if not piece.why} == set()
    )
    assert found.text == engine.answer(messages(), Ask(reuse=False)).text


def test_kv_that_cannot_be_decoded_is_computed_and_the_rest_is_used(engine, monkeypatch):
    computing(engine, SLOWLY)
    decode, broken = RawCodec.decode_all, list[int]()

    def once(codec, blobs, metas):
        if metas[0].key_shape[1] == broken[0]:
            raise ValueError("not these")
        return decode(codec, blobs, metas)

    broken.append(len(engine.tokens(CHUNKS[2])))
    monkeypatch.setattr(RawCodec, "decode_all", once)
    trace = engine.answer(messages(), Ask(ratio=0.0, deadline_s=50.0)).trace
    lost = [segment for segment in trace.segments if segment.kind == "chunk" and not segment.hit]
    assert [(segment.source, segment.why) for segment in lost] == [("book-2", UNREADABLE)]
    assert adds_up(trace)
