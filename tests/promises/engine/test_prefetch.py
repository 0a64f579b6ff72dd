"""What is brought to memory before a question comes: the right entries, as many as fit, and in
nobody's way.
"""

import threading

import pytest

from ragfuse import Ask, Engine
from ragfuse.engine.remember import MAX_TIER_SHARE
from ragfuse.types.keys import filler_context
from tests.kits.store import read_all
from tests.kits.tiny import CHUNKS, ingest, messages


def again(settings, **given):
    """A new engine over the same store, which has met one prompt."""
    engine = Engine(settings.model_copy(update=given))
    engine.prompt(messages())
    return engine


@pytest.fixture
def old(tiny_settings):
    """Settings of a store that another engine has filled."""
    with Engine(tiny_settings) as engine:
        ingest(engine)
    return tiny_settings


def tiers(trace):
    """Where each chunk was read from."""
    return [segment.tier for segment in trace.segments if segment.kind == "chunk"]


def in_memory(engine):
    return {entry.key: entry for entry in engine.store.tier("memory").list()}


def own_key(engine, text):
    return engine.runtime.encoder.key(engine.tokens(text), filler_context(""))


def size_of(engine):
    """Bytes of the largest entry."""
    return max(entry.nbytes for entry in engine.store.entries())


def threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "ragfuse-prefetch" and thread.is_alive()
    ]


def test_prefetched_chunks_are_read_from_memory_and_change_no_answer(old):
    ask = Ask(policy="hkvd", ratio=0.2)
    with again(old) as engine:
        plain = engine.answer(messages(), ask)
        assert set(tiers(plain.trace)) == {"disk"}
    with Engine(old) as engine:  # one that met no prompt yet
        engine.prefetch([f"\n {text}\t" for text in CHUNKS[::-1]])
        engine.flush()
        answer = engine.answer(messages(), ask)
        assert tiers(answer.trace) == ["memory"] * len(CHUNKS)
        assert answer.token_ids == plain.token_ids


def test_texts_that_are_not_in_the_store_are_no_trouble_and_not_encoded(old, caplog):
    with again(old) as engine:
        before = {entry.key for entry in engine.store.entries()}
        engine.prefetch([])
        engine.prefetch(["", "short", "A text that nobody has ever stored anywhere at all."])
        engine.flush()
        assert not in_memory(engine)
        engine.prefetch(CHUNKS[3])
        engine.flush()
        assert in_memory(engine).keys() == {own_key(engine, CHUNKS[3])}
        assert {entry.key for entry in engine.store.entries()} == before
        assert not caplog.records


def test_a_prefetch_brings_no_chunk_of_another_tenant(old):
    with Engine(old.model_copy(update={"salt": "theirs"})) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert not in_memory(engine)


def test_a_prefetch_takes_no_more_than_its_share_and_evicts_nothing_that_it_brought(old):
    with again(old) as engine:
        room = 6 * size_of(engine)
    with again(old, memory_bytes=room) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        tier = engine.store.tier("memory")
        assert 2 * size_of(engine) < tier.nbytes <= MAX_TIER_SHARE * room
        assert tier.counts["evicted"] == 0
        there = [name == "memory" for name in tiers(engine.answer(messages()).trace)]
        assert there[:3] == [True] * 3
        assert not any(there[4:])


def test_a_prefetch_evicts_nothing_that_the_next_prompt_needs(old):
    with again(old) as engine:
        room = 4 * size_of(engine)
    with again(old, memory_bytes=room) as engine:
        keys = [segment.keys[0] for segment in engine.prompt(messages()).segments if segment.keys]
        read_all(engine.store, keys[3])  # longest unused, and wanted
        for key in keys[4:7]:
            read_all(engine.store, key)
        engine.prefetch([CHUNKS[2], CHUNKS[0]])
        engine.flush()
        assert keys[3] in in_memory(engine)


class Gate:
    """Holds back every read of a tier until it is opened, and counts what came."""

    def __init__(self, tier, monkeypatch):
        self.open, self.reached, self.keys = threading.Event(), threading.Event(), []
        read = tier.get

        def held(key, layers, level=None):
            if threading.current_thread().name == "ragfuse-prefetch":
                self.keys.append(key)
                self.reached.set()
                assert self.open.wait(60)
            return read(key, layers, level)

        monkeypatch.setattr(tier, "get", held)


def test_a_question_does_not_wait_for_a_prefetch_and_reads_its_chunks_once(old, monkeypatch):
    with again(old) as engine:
        plain = engine.answer(messages(), Ask(ratio=0.2)).token_ids
    with again(old) as engine:
        gate = Gate(engine.store.tier("disk"), monkeypatch)
        engine.prefetch(CHUNKS)
        assert gate.reached.wait(60)
        answer = engine.answer(messages(), Ask(ratio=0.2))
        assert answer.token_ids == plain
        assert set(tiers(answer.trace)) == {"disk"}
        gate.open.set()
        engine.flush()
        assert gate.keys == [own_key(engine, CHUNKS[0])]  # the one at hand


def test_closing_an_engine_ends_its_prefetch_and_drops_what_waits(old, monkeypatch):
    engine = again(old)
    gate = Gate(engine.store.tier("disk"), monkeypatch)
    engine.prefetch(CHUNKS)
    assert gate.reached.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not threads()
    assert len(gate.keys) == 1
    engine.prefetch(CHUNKS)
    assert not threads()
