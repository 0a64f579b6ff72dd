"""The first layers of the prompt that has the model next are read while it is another's
(AttentionStore 3.2.1).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ragfuse import Engine, InputError
from tests.tiny import CHUNKS, adds_up, chunk_hits, ingest, messages, on_disk_only

WAIT_S = 60.0
BACKWARDS = messages(CHUNKS[::-1])


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def loading() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("ragfuse-load") and thread.is_alive()
    ]


@pytest.fixture
def slow(tiny_settings) -> Iterator[Engine]:
    """All chunks, on disk alone."""
    with on_disk_only(tiny_settings) as engine:
        ingest(engine)
        engine.flush()
        yield engine
    assert loading() == []


@pytest.fixture
def reads(slow, monkeypatch) -> list[tuple[object, ...]]:
    """What is read from the engine's store, in order."""
    read, seen = slow.store.read_layers, list[tuple[object, ...]]()

    def spy(key, first, *given):
        found = read(key, first, *given)
        seen.append((key, first))
        return found

    monkeypatch.setattr(slow.store, "read_layers", spy)
    return seen


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def until_it_waits(engine: Engine, count: int = 1) -> None:
    until(lambda: engine.model.lock.waiting >= count)


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
    first_keys = {key for key, _ in _read_by(slow, reads, messages(CHUNKS[:3]))}
    last_keys = {key for key, _ in _read_by(slow, reads, messages(CHUNKS[3:]))} - first_keys
    reads.clear()
    with slow.model.lock:
        first = threads.submit(slow.answer, messages(CHUNKS[:3]))
        until_it_waits(slow)
        last = threads.submit(slow.answer, messages(CHUNKS[3:]))
        until(lambda: first_keys <= {key for key, _ in reads})
        time.sleep(0.05)
        assert not last_keys & {key for key, _ in reads}
    for asked in (first, last):
        assert all(chunk_hits(asked.result(WAIT_S).trace))
    assert last_keys <= {key for key, _ in reads}


def _read_by(
    engine: Engine, reads: list[tuple[object, ...]], prompt: object
) -> list[tuple[object, ...]]:
    reads.clear()
    engine.answer(prompt)
    return list(reads)


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


def test_many_at_once_over_a_changing_store_end_and_add_up(slow, threads):
    def ask(number: int) -> Future:
        return threads.submit(slow.answer, (messages(), BACKWARDS)[number % 2])

    asked = [ask(number) for number in range(8)]
    slow.forget([CHUNKS[1]])
    asked += [ask(number) for number in range(4)]
    assert all(adds_up(each.result(WAIT_S).trace) for each in asked)
