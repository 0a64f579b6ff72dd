"""The first layers of the prompt that has the model next are read while it is another's
(AttentionStore 3.2.1).
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ragfuse import InputError
from tests.kits.redis_server import until
from tests.kits.tiny import CHUNKS, adds_up, chunk_hits, ingest, messages, on_disk_only
from tests.twins.load.test_layers import loading

WAIT_S = 60.0


@pytest.fixture
def slow(tiny_settings):
    """All chunks, on disk alone."""
    with on_disk_only(tiny_settings) as engine:
        ingest(engine)
        engine.flush()
        yield engine
    assert loading() == []


@pytest.fixture
def reads(slow, monkeypatch):
    """What is read from the engine's store, in order."""
    read, seen = slow.store.read_layers, list[tuple[object, ...]]()

    def spy(key, first, *given):
        found = read(key, first, *given)
        seen.append((key, first))
        return found

    monkeypatch.setattr(slow.store, "read_layers", spy)
    return seen


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def until_it_waits(engine):
    until(lambda: engine.model.lock.waiting)


def test_all_is_read_once_and_ahead_and_the_answer_is_the_same(slow, reads, threads):
    alone = slow.answer(messages())
    wanted = sorted(map(str, reads))
    reads.clear()
    with slow.model.lock:
        asked = threads.submit(slow.answer, messages())
        until(lambda: sorted(map(str, reads)) == wanted)
        assert not asked.done()
    answer = asked.result(WAIT_S)
    assert (answer.text, answer.trace.segments) == (alone.text, alone.trace.segments)
    assert sorted(map(str, reads)) == wanted


def test_one_prompt_at_a_time_reads_ahead(slow, reads, threads):
    first_keys, last_keys = (
        {fetch.key for fetch in slow.plan(messages(chunks)).fetches}
        for chunks in (CHUNKS[:3], CHUNKS[3:])
    )
    last_keys -= first_keys
    with slow.model.lock:
        first = threads.submit(slow.answer, messages(CHUNKS[:3]))
        until_it_waits(slow)
        last = threads.submit(slow.answer, messages(CHUNKS[3:]))
        until(lambda: first_keys <= {key for key, _ in reads})
        assert not last_keys & {key for key, _ in reads}
    for asked in (first, last):
        assert all(chunk_hits(asked.result(WAIT_S).trace))
    assert last_keys <= {key for key, _ in reads}


def test_what_leaves_the_store_meanwhile_was_read_or_is_computed(slow, threads):
    slow.forget([CHUNKS[0]])
    with slow.model.lock:
        asked = threads.submit(slow.answer, messages())
        until_it_waits(slow)
        slow.forget([CHUNKS[4]])
    trace = asked.result(WAIT_S).trace
    assert chunk_hits(trace)[:4] == [False, True, True, True]
    assert adds_up(trace)


def test_an_answer_that_nobody_wants_any_more_lets_go_of_what_it_read(slow, threads):
    with slow.model.lock:
        stream = slow.stream(messages())
        until_it_waits(slow)
        stream.cancel()
    with pytest.raises(InputError):
        _ = stream.answer
    until(lambda: loading() == [])
    again = threads.submit(slow.answer, messages())
    assert all(chunk_hits(again.result(WAIT_S).trace))
