"""Conversations of requests that wait: brought to memory, kept there, and read from it when their
turn comes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfuse import Engine
from ragfuse.serve.keys import Keys
from tests.serve.kit import Served, raw, said, serving, settings_of, wait_for, writers
from tests.serve.test_gone import is_idle, long_request, send

ROOM = 6
"""Conversations that memory has room for."""
FIRST, NEXT = "How many ships came to {}?", "And then?"


@pytest.fixture(scope="module", params=["look-ahead", "lru"])
def narrow(
    request: Any, varied_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server that answers one request at a time, with little memory."""
    home = tmp_path_factory.mktemp("ahead")
    settings = settings_of(
        varied_path,
        home,
        serve_together=1,
        evict=request.param,
    )
    with serving(settings) as made:
        begin(made, "measured")
        tier = engine_of(made).store.tier("memory")
        tier.capacity = ROOM * tier.nbytes
        yield made


def engine_of(served: Served) -> Engine:
    return served.service.engine(served.service.keys.tenants[0])


def begin(served: Served, name: str, **fields: Any) -> str:
    """The first turn of a conversation; what is answered."""
    told = {"session_id": name, **fields}
    answer = served.chat(messages=[said(FIRST.format(name))], max_tokens=6, **told).json()
    engine_of(served).flush()
    return str(answer["choices"][0]["message"]["content"])


def in_memory(engine: Engine, name: str) -> bool:
    keys = engine.sessions.show(name).keys
    return len(engine.store.tier("memory").stat(keys)) == len(keys)


def filled(engine: Engine, conversations: int) -> None:
    """Other KV comes to memory, as much as so many conversations have."""
    tier = engine.store.tier("memory")
    kv, wanted = engine.model.encode(range(20, 60)), conversations * tier.capacity // ROOM
    for number in range(10_000):
        if number * kv.nbytes >= wanted:
            return
        engine.store.put(engine.runtime.encoder.key((1, number)), kv, tier="memory")


def test_what_a_waiting_turn_reads_stays_in_memory_by_look_ahead_alone(narrow: Served) -> None:
    engine = engine_of(narrow)
    begin(narrow, "one")
    found: dict[str, Any] = {}

    def ask() -> None:
        found.update(narrow.chat(session_id="one", messages=[said(NEXT)], max_tokens=4).json())

    with raw(narrow.port) as first:
        send(first, long_request(narrow))
        wait_for(writers)
        client = threading.Thread(target=ask)
        client.start()
        wait_for(lambda: ("", "one") in narrow.service.admission.conversations)
        wait_for(lambda: engine.conversations.places())
        assert len(narrow.service.admission.jobs) == 1
        filled(engine, 2 * ROOM)
        kept = in_memory(engine, "one")
        assert kept == (narrow.service.settings.evict == "look-ahead")
    client.join(60)
    tiers = {each["tier"] for each in found["ragfuse"]["segments"] if each["kind"] == "history"}
    assert tiers == {"memory"} or not kept
    wait_for(lambda: is_idle(narrow) and not engine.conversations.places())


def test_a_waiting_turn_s_conversation_comes_to_memory_before_it(narrow: Served) -> None:
    engine = engine_of(narrow)
    answer = begin(narrow, "two")
    messages = [said(FIRST.format("two")), said(answer, "assistant"), said(NEXT)]
    filled(engine, 2 * ROOM)
    assert not in_memory(engine, "two")
    with raw(narrow.port) as first, raw(narrow.port) as second:
        send(first, long_request(narrow))
        wait_for(writers)
        send(second, long_request(narrow, messages=messages, session_id="two"))
        wait_for(lambda: ("", "two") in narrow.service.admission.conversations)
        wait_for(lambda: in_memory(engine, "two"))
        assert len(narrow.service.admission.jobs) == 1  # it waits still
    wait_for(lambda: is_idle(narrow) and not narrow.service.admission.conversations)


def test_tenants_conversations_of_one_name_are_told_apart(
    varied_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(varied_path, tmp_path)
    keys = Keys(["blue:blue-key-of-a-test-0", "green:green-key-of-a-test-0"])
    with serving(settings.model_copy(update={"serve_together": 1}), keys) as served:
        engines = {tenant.salt: served.service.engine(tenant) for tenant in keys.tenants}
        with raw(served.port) as first, raw(served.port) as second:
            body = long_request(served, session_id="one")
            for line, tenant in ((first, "blue"), (second, "green")):
                send_as(line, body, f"{tenant}-key-of-a-test-0")
                wait_for(writers)
            wait_for(lambda: ("green", "one") in served.service.admission.conversations)
            wait_for(
                lambda: (engines["green"].digest, "one") in engines["blue"].conversations.places()
            )
        wait_for(lambda: is_idle(served))


def send_as(line: Any, body: dict[str, Any], key: str) -> None:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type:"
        " application/json\r\n"
    )
    line.sendall(
        f"{head}authorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
