"""What is brought to memory before a question comes: the right entries, as many as fit, and in
nobody's way.
"""

import threading

import pytest

from ragfuse import Ask, Engine
from ragfuse.engine.prefetch import MAX_TIER_SHARE, MAX_WAITING_REQUESTS
from ragfuse.types.keys import filler_context
from tests.tiny import CHUNKS, chunk_hits, file_of, ingest, messages

ALL = ["memory"] * len(CHUNKS)


def again(settings, **given) -> Engine:
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


def size_of(engine):
    """Bytes of the largest entry."""
    return max(entry.nbytes for entry in engine.store.entries())


def threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "ragfuse-prefetch" and thread.is_alive()
    ]


def test_what_is_prefetched_is_read_from_memory_by_the_question(old):
    with again(old) as engine:
        assert set(tiers(engine.answer(messages()).trace)) == {"disk"}
    with Engine(old) as engine:  # in another order, and in an engine that met no prompt yet
        engine.prefetch([f"\n {text}\t" for text in CHUNKS])
        engine.flush()
        assert tiers(engine.answer(messages(CHUNKS[::-1])).trace) == ALL


def test_an_answer_is_the_same_with_and_without(old):
    with again(old) as engine:
        plain = engine.answer(messages(), Ask(policy="hkvd", ratio=0.2)).token_ids
    with again(old) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert engine.answer(messages(), Ask(policy="hkvd", ratio=0.2)).token_ids == plain


def test_what_was_encoded_after_an_answer_is_brought_too(tiny_settings):
    with Engine(tiny_settings) as engine:
        engine.answer(messages())
    with Engine(tiny_settings) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert tiers(engine.answer(messages()).trace) == ALL


def test_chunks_are_in_memory_whatever_a_prompt_begins_with(tiny_settings):
    heads = [f"Instruction number {number}, which is long enough.\n\n" for number in range(5)]
    with Engine(tiny_settings) as engine:
        for head in heads:
            engine.ingest([(CHUNKS[0], "")], engine.prefix(messages(head=head)))
    with Engine(tiny_settings) as engine:
        engine.prefetch(CHUNKS[:1])
        engine.flush()
        plans = [
            engine.plan(messages(CHUNKS[:1], head=head))
            for head in [*heads, "A new one, and long enough.\n\n"]
        ]
        found = [[fetch.tier for fetch in plan.fetches] for plan in plans]
        assert found == [["disk", "memory"]] * 5 + [["memory"]]


def test_another_tenant_s_chunks_are_not_brought(old):
    with Engine(old.model_copy(update={"salt": "theirs"})) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert not in_memory(engine)


@pytest.mark.parametrize(("filler_tokens", "context"), [(256, filler_context("")), (0, "")])
def test_it_brings_each_text_s_own_entry_and_nothing_else(tiny_settings, filler_tokens, context):
    settings = tiny_settings.model_copy(update={"filler_tokens": filler_tokens})
    with Engine(settings) as engine:
        ingest(engine)
    with Engine(settings) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert set(in_memory(engine)) == {
            engine.runtime.encoder.key(engine.tokens(text), context) for text in CHUNKS
        }


def test_nothing_is_encoded(old):
    with again(old) as engine:
        before = {entry.key for entry in engine.store.entries()}
        engine.prefetch([*CHUNKS, "A text that nobody has ever stored anywhere at all."])
        engine.flush()
        assert {entry.key for entry in engine.store.entries()} == before
        assert in_memory(engine)


def test_texts_that_are_not_there_are_no_trouble(engine, caplog):
    engine.prefetch(["", "short", "A text that nobody has ever stored anywhere at all."])
    engine.prefetch([])
    engine.prefetch(CHUNKS)
    engine.flush()
    assert not in_memory(engine)
    assert not caplog.records


def test_one_text_is_one_text(old):
    with again(old) as engine:
        engine.prefetch(CHUNKS[3])
        engine.flush()
        assert {key.tokens for key in in_memory(engine)} >= {
            engine.runtime.encoder.key(engine.tokens(CHUNKS[3])).tokens
        }


def test_an_entry_whose_file_is_lost_costs_itself_alone(old):
    with again(old) as engine:
        file_of(engine, CHUNKS[2], filler_context("")).unlink()
        engine.prefetch(CHUNKS)
        engine.flush()
        trace = engine.answer(messages()).trace
        assert tiers(trace) == ["memory", "memory", "", "memory", "memory", "memory"]
        assert chunk_hits(trace) == [True, True, False, True, True, True]


def test_it_takes_no_more_than_its_share_and_evicts_nothing_that_it_brought(old):
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


def test_what_is_pinned_leaves_it_less_room(old):
    with again(old) as engine:
        room = 6 * size_of(engine)
    with again(old, memory_bytes=room) as engine:
        first = engine.prompt(messages()).segments[1].keys[0]
        rest = [
            engine.runtime.encoder.key(engine.tokens(text), filler_context(""))
            for text in CHUNKS[3:]
        ]
        for key in rest:
            engine.store.warm([key])
        engine.store.pin(rest)
        engine.prefetch(CHUNKS[:3])
        engine.flush()
        assert in_memory(engine).keys() == {*rest, first}
        assert engine.store.tier("memory").counts["evicted"] == 0


def test_what_the_next_prompt_needs_and_memory_has_is_not_evicted_for_it(old):
    with again(old) as engine:
        room = 4 * size_of(engine)
    with again(old, memory_bytes=room) as engine:
        keys = [segment.keys[0] for segment in engine.prompt(messages()).segments if segment.keys]
        engine.store.warm([keys[3]])  # longest unused, and wanted
        for key in keys[4:7]:
            engine.store.warm([key])
        engine.prefetch([CHUNKS[2], CHUNKS[0]])
        engine.flush()
        assert keys[3] in in_memory(engine)


def test_without_a_memory_tier_it_does_nothing_that_fails(old, caplog):
    with again(old, memory_bytes=0) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert not caplog.records
        assert set(tiers(engine.answer(messages()).trace)) == {"disk"}


class Gate:
    """Holds back every read of a tier until it is opened, and counts what came."""

    def __init__(self, tier, monkeypatch) -> None:
        self.open, self.reached, self.keys = threading.Event(), threading.Event(), []
        read = tier.get

        def held(key, layers, level=None):
            if threading.current_thread().name == "ragfuse-prefetch":
                self.keys.append(key)
                self.reached.set()
                assert self.open.wait(60)
            return read(key, layers, level)

        monkeypatch.setattr(tier, "get", held)


def test_a_question_does_not_wait_for_it_and_what_it_reads_is_not_read_again(old, monkeypatch):
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
        assert gate.keys == [
            engine.runtime.encoder.key(engine.tokens(CHUNKS[0]), filler_context(""))
        ]  # the one at hand


def test_the_newest_wish_comes_first_and_the_oldest_is_dropped(old, monkeypatch):
    with again(old) as engine:
        gate = Gate(engine.store.tier("disk"), monkeypatch)
        engine.prefetch(CHUNKS[:1])
        assert gate.reached.wait(60)
        for _ in range(MAX_WAITING_REQUESTS - 1):
            engine.prefetch(CHUNKS[:2])
        engine.prefetch(CHUNKS[5:])
        gate.open.set()
        engine.flush()
        newest = engine.runtime.encoder.key(engine.tokens(CHUNKS[5])).tokens
        assert gate.keys[1].tokens == newest
        assert len(set(gate.keys)) == len(gate.keys)


def test_its_thread_ends_with_the_work(old):
    with again(old) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
        assert not threads()


def test_closing_an_engine_ends_it_and_what_waits_is_dropped(old, monkeypatch):
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


def test_a_model_that_is_not_there_is_the_question_s_trouble(tiny_settings, tmp_path, caplog):
    with Engine(tiny_settings.model_copy(update={"model": str(tmp_path / "none")})) as engine:
        engine.prefetch(CHUNKS)
        engine.flush()
    assert "stopped early" in caplog.text
