"""Conversations of requests that wait: brought to memory, kept there, and read from it when their
turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ragfuse import Engine
from tests.kits.serve import BLUE, GREEN, TENANTS, Served, asking, said, wait_for, writers

ROOM = 6
"""Conversations that memory has room for."""
FIRST, NEXT = "How many ships came to {}?", "And then?"


@pytest.fixture(scope="module", params=["look-ahead", "lru"])
def narrow(request: Any, make_server: Callable[..., Served]) -> Served:
    """A server that answers one request at a time, with little memory."""
    made = make_server(serve_together=1, evict=request.param)
    begin(made, "measured")
    tier = made.engine().store.tier("memory")
    tier.capacity = ROOM * tier.nbytes
    return made


def begin(served: Served, name: str) -> str:
    """The first turn of a conversation; what is answered."""
    messages = [said(FIRST.format(name))]
    answer = served.chat(messages=messages, max_tokens=6, session_id=name).json()
    served.engine().flush()
    return str(answer["choices"][0]["message"]["content"])


def in_memory(engine: Engine, name: str) -> bool:
    keys = engine.sessions.show(name).keys
    return len(engine.store.tier("memory").stat(keys)) == len(keys)


def filled(engine: Engine, conversations: int) -> None:
    """Other KV comes to memory, as much as so many conversations have."""
    kv = engine.model.encode(range(20, 60))
    wanted = conversations * engine.store.tier("memory").capacity // ROOM
    for number in range(-(-wanted // kv.nbytes)):
        engine.store.put(engine.runtime.encoder.key((1, number)), kv, tier="memory")


def test_what_a_waiting_turn_reads_stays_in_memory_by_look_ahead_alone(narrow: Served) -> None:
    engine = narrow.engine()
    begin(narrow, "one")
    with ThreadPoolExecutor(1) as client:
        with asking(narrow):
            wait_for(writers)
            turn = {"session_id": "one", "messages": [said(NEXT)], "max_tokens": 4}
            waiting = client.submit(narrow.chat, **turn)
            wait_for(lambda: ("", "one") in narrow.service.queue.conversations)
            wait_for(lambda: engine.conversations.places())
            assert narrow.waiting() == 1
            filled(engine, 2 * ROOM)
            kept = in_memory(engine, "one")
            assert kept == (narrow.service.settings.evict == "look-ahead")
        segments = waiting.result().json()["ragfuse"]["segments"]
    tiers = {each["tier"] for each in segments if each["kind"] == "history"}
    assert tiers == {"memory"} or not kept
    wait_for(lambda: narrow.is_idle() and not engine.conversations.places())


def test_a_waiting_turn_s_conversation_comes_to_memory_before_it(narrow: Served) -> None:
    engine = narrow.engine()
    answer = begin(narrow, "two")
    messages = [said(FIRST.format("two")), said(answer, "assistant"), said(NEXT)]
    filled(engine, 2 * ROOM)
    assert not in_memory(engine, "two")
    with asking(narrow):
        wait_for(writers)
        with asking(narrow, messages=messages, session_id="two"):
            wait_for(lambda: ("", "two") in narrow.service.queue.conversations)
            wait_for(lambda: in_memory(engine, "two"))
            assert narrow.waiting() == 1
    wait_for(lambda: narrow.is_idle() and not narrow.service.queue.conversations)


def test_tenants_conversations_of_one_name_are_told_apart(
    make_server: Callable[..., Served],
) -> None:
    served = make_server(TENANTS, serve_together=1)
    blue, green = served.engine(0), served.engine(1)
    with asking(served.of(BLUE), session_id="one"):
        wait_for(writers)
        with asking(served.of(GREEN), session_id="one"):
            wait_for(lambda: ("green", "one") in served.service.queue.conversations)
            wait_for(lambda: (green.digest, "one") in blue.conversations.places())
            places = {(blue.digest, "one"): 0, (green.digest, "one"): 1}
            assert blue.conversations.places() == places
    wait_for(served.is_idle)
