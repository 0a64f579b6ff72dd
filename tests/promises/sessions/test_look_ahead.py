"""What is said of the next conversations decides what a small memory keeps of them, and what comes
back to it.
"""

from contextlib import contextmanager

import pytest

from ragfuse import Ask, Engine
from tests.kits.sessions import talk


def questions(name):
    return (
        f"Who kept the lighthouse {name}, and what did he count?",
        f"And who wrote the names down for {name}?",
    )


def keys_of(engine, name):
    return set(engine.sessions.show(name).keys)


def in_memory(engine, name):
    """Share of a conversation's entries that lie in memory."""
    keys = keys_of(engine, name)
    return len(engine.store.tier("memory").stat(keys)) / len(keys)


def said(engine, *names):
    for name in names:
        talk(engine, questions(name), session=name, max_tokens=8)
        engine.flush()


@contextmanager
def small(settings, talks, **changes):
    """An engine whose memory has room for so many conversations of two turns."""
    with Engine(settings.model_copy(update={"store": settings.home / "measured"})) as large:
        said(large, "x")
        nbytes = large.store.tier("memory").nbytes
    with Engine(
        settings.model_copy(update={"memory_bytes": int(talks * nbytes), **changes})
    ) as engine:
        yield engine


@pytest.mark.parametrize(("policy", "kept"), [("look-ahead", {"a", "c"}), ("lru", {"b", "c"})])
def test_memory_keeps_the_conversation_that_is_next_and_not_the_one_used_last(
    tiny_settings, policy, kept
):
    with small(tiny_settings, 2.5, evict=policy) as engine:
        said(engine, "a", "b")
        engine.expect(["a"])
        said(engine, "c")
        assert {name for name in "abc" if in_memory(engine, name) == 1} == kept


def test_a_conversation_leaves_memory_as_a_whole(tiny_settings):
    with small(tiny_settings, 2.5) as engine:
        said(engine, "a", "b", "c")
        assert [in_memory(engine, name) for name in "abc"] == [0, 1, 1]


def test_a_conversation_that_is_next_is_read_from_memory_when_its_turn_comes(tiny_settings):
    with small(tiny_settings, 2.5) as engine:
        said(engine, "a", "b", "c")
        assert in_memory(engine, "a") == 0
        engine.expect(["a"])
        engine.flush()
        assert in_memory(engine, "a") == 1
        said(engine, "d")  # somebody else's turn comes first
        answer = engine.answer([("user", "Sure?")], Ask(session="a", max_tokens=4))
        read = [segment for segment in answer.trace.segments if segment.kind == "history"]
        assert {segment.tier for segment in read} == {"memory"}
        assert answer.trace.history_reused > 0


def test_a_later_process_knows_whose_kv_lies_on_disk(tiny_settings):
    with Engine(tiny_settings) as engine:
        said(engine, "a", "b", "c")
        on_disk = engine.store.tier("disk").nbytes
    full = tiny_settings.model_copy(update={"disk_bytes": on_disk, "memory_bytes": 0})
    with Engine(full) as engine:
        engine.expect(["a"])
        said(engine, "d")
        left = {name: len(engine.store.tier("disk").stat(keys_of(engine, name))) for name in "abcd"}
        assert left["a"] == len(keys_of(engine, "a"))
        assert left["b"] == 0
        assert left["d"] == len(keys_of(engine, "d"))
