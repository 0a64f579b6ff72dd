"""What is forgotten is gone from every tier, in all company, and is found in no prompt any more;
nothing else is.
"""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragfuse import Ask, Engine
from ragfuse.store.deletion import LEARNT
from ragfuse.types.prompt import Segment
from tests.kits.redis_server import RedisServer
from tests.kits.tiny import CHUNKS, QUESTION, ingest, known_texts, messages


@pytest.fixture
def filled(engine):
    ingest(engine)
    return engine


def chunk(engine, text):
    return engine.runtime.encoder.key(engine.tokens(text)).tokens


def entries_of(engine, text):
    return [entry for entry in engine.store.entries() if entry.key.tokens == chunk(engine, text)]


def plain(text):
    return [("user", f"{text}\n\n{QUESTION}")]


def is_known(engine, text):
    return any(segment.text == text for segment in engine.prompt(plain(text)).segments)


def test_a_forgotten_chunk_leaves_every_tier_and_is_known_to_no_engine(filled, tiny_settings):
    filled.answer(messages())
    assert is_known(filled, CHUNKS[1])
    filled.ingest([], filled.tokens(CHUNKS[1]))  # alone, too
    before = entries_of(filled, CHUNKS[1])
    assert {entry.tier for entry in before} == {"memory", "disk"}
    assert {entry.key.encoded for entry in before} == {"alone", "filler"}
    held = [tier.nbytes for tier in filled.store.tiers]
    freed = filled.forget([f" {CHUNKS[1]}\n"])
    assert entries_of(filled, CHUNKS[1]) == []
    assert freed == sum(entry.nbytes for entry in before)
    assert sum(held) - sum(tier.nbytes for tier in filled.store.tiers) >= freed
    with Engine(tiny_settings) as other:
        for engine in (filled, other):
            assert not is_known(engine, CHUNKS[1])
            assert is_known(engine, CHUNKS[2])


def test_another_tenant_keeps_its_own(filled, tiny_settings):
    with Engine(tiny_settings.model_copy(update={"salt": "theirs"})) as other:
        ingest(other)
        theirs = {
            entry.key for entry in entries_of(other, CHUNKS[1]) if entry.key.model == other.digest
        }
        assert filled.forget([CHUNKS[1]]) > 0
        assert {entry.key for entry in entries_of(other, CHUNKS[1])} == theirs
        assert is_known(other, CHUNKS[1])


def test_a_forgotten_chunk_that_waits_to_be_encoded_is_not_encoded(engine):
    prompt = messages(CHUNKS[:3])
    with ThreadPoolExecutor(1) as pool, engine.model.lock:  # the saver cannot encode meanwhile
        engine.answer(prompt, Ask(max_tokens=1))
        forgetting = pool.submit(engine.forget, CHUNKS[:3])
    forgetting.result(60)
    engine.flush()
    assert [text for text in CHUNKS[:3] if entries_of(engine, text) or is_known(engine, text)] == []


def test_while_a_tier_is_down_the_rest_is_forgotten_and_the_text_stays_written_down(
    tiny_settings, tmp_path, caplog
):
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    try:
        given = {"tiers": (server.url(),), "tier_timeout_s": 2.0}
        with Engine(tiny_settings.model_copy(update=given)) as engine:
            ingest(engine)
            server.signal(signal.SIGSTOP)
            assert engine.forget([CHUNKS[1]]) > 0
            assert "No answer from tier redis" in caplog.text
            assert entries_of(engine, CHUNKS[1]) == []
            assert not is_known(engine, CHUNKS[1])
            assert known_texts(engine, "book-1") == [CHUNKS[1]]
        server.signal(signal.SIGCONT)
        with Engine(tiny_settings.model_copy(update=given)) as engine:
            assert {entry.tier for entry in entries_of(engine, CHUNKS[1])} == {"redis"}
            assert engine.forget([CHUNKS[1]]) > 0
            assert entries_of(engine, CHUNKS[1]) == known_texts(engine, "book-1") == []
    finally:
        server.kill()


def learn(engine, text, persistent=True):
    """Learn a passage as the background does, from its ids."""
    ids = tuple(engine.tokens(text))
    engine._remember._text = (lambda tokens: text) if persistent else (lambda tokens: "")
    engine._remember._encode(Segment(ids, 0, "chunk", source=LEARNT))
    del engine._remember._text
    return ids


@pytest.mark.parametrize("persistent", [True, False])
def test_passages_that_were_learnt_from_a_text_go_with_it(engine, persistent):
    whole = f"{CHUNKS[1]} And then: {CHUNKS[2]}"
    inside, across = CHUNKS[1][10:-10], f"{CHUNKS[0]} {CHUNKS[1][:50]}"
    other = "Nobody knows where the keeper of the old lighthouse went when it was given up."
    for text in (inside, across, other):
        learn(engine, text, persistent)
    engine.forget([whole])
    assert [bool(entries_of(engine, text)) for text in (inside, across, other)] == [
        False,
        False,
        True,
    ]
    found = engine.prompt(plain(f"{inside}\n{across}\n{other}")).segments
    assert sum(len(each.tokens) for each in found if each.kind == "chunk") <= len(other) + 2
    assert all(inside not in text for text in known_texts(engine, LEARNT))
