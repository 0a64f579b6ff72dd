"""What a tenant may keep: counted, shown, and the oldest of it dropped, whatever other tenants
have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragfuse import Ask, Engine
from ragfuse.serve.quotas import Quota, QuotaKeeper
from tests.serve.kit import BLUE, GREEN, TENANTS, Served, settings_of, wait_for
from tests.tiny import CHUNKS


@pytest.fixture
def pair(varied_path: Path, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two tenants on one store."""
    settings = settings_of(varied_path, tmp_path)
    with Engine(settings) as one, Engine(settings.model_copy(update={"salt": "other"})) as other:
        yield one, other


def sources(engine: Engine) -> list[str]:
    assert engine.catalog.strict.is_open
    return [known.source for known in engine.catalog.strict.texts(engine.digest)]


def on_disk(engine: Engine) -> dict[str, int]:
    """Bytes by chunk of a tenant, used longest ago first."""
    entries = [
        entry for entry in engine.store.tier("disk").list() if entry.key.model == engine.digest
    ]
    return {
        entry.key.tokens: entry.nbytes
        for entry in sorted(entries, key=lambda entry: entry.last_used)
    }


def filled(*engines: Engine, n: int = 5) -> None:
    for engine in engines:
        engine.ingest([(text, f"book-{at}") for at, text in enumerate(CHUNKS[:n])])
        engine.flush()


def test_the_texts_noted_first_are_forgotten_with_their_kv_and_no_other_tenant_s(
    pair: tuple[Engine, Engine],
) -> None:
    one, other = pair
    filled(one, other)
    keeper = QuotaKeeper(one, Quota(texts=3))
    use = keeper.enforce()
    assert (use.texts, keeper.evicted["texts"]) == (3, 2)
    assert sources(one) == ["book-2", "book-3", "book-4"]
    assert len(on_disk(one)) == 3
    assert [piece.kind for piece in one.prompts.pieces(f"{CHUNKS[0]}\n\nWho?")] == ["fresh"]
    assert one.prompts.pieces(f"{CHUNKS[4]}\n\nWho?")[0].kind == "chunk"
    assert len(sources(other)) == len(on_disk(other)) == 5
    assert keeper.enforce().texts == 3
    assert keeper.evicted["texts"] == 2


def test_the_kv_used_longest_ago_is_dropped_but_what_is_pinned(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    filled(one, other)
    sizes, first = on_disk(one), next(iter(on_disk(one)))
    disk = one.store.tier("disk")
    disk.pin(
        [
            each.key
            for each in disk.list()
            if (each.key.tokens, each.key.model) == (first, one.digest)
        ],
        True,
    )
    most = sum(sizes.values()) - 1
    use = QuotaKeeper(one, Quota(nbytes=most)).enforce()
    left = on_disk(one)
    assert use.nbytes == {"disk": sum(left.values())}
    assert sum(left.values()) <= most
    assert list(left) == [first, *list(sizes)[2:]]
    assert len(on_disk(other)) == 5


def test_sessions_used_longest_ago_are_deleted(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    for engine in pair:
        for name in ("a", "b", "c", "d"):
            engine.answer([("user", f"Who is {name}?")], Ask(session=name, max_tokens=2))
        engine.answer([("user", "And then?")], Ask(session="a", max_tokens=2))
        engine.flush()
    keeper = QuotaKeeper(one, Quota(sessions=2))
    assert (keeper.enforce().sessions, keeper.evicted["sessions"]) == (2, 2)
    assert [info.id for info in one.sessions.ls()] == ["a", "d"]
    assert {info.id for info in other.sessions.ls()} == {"a", "b", "c", "d"}


def test_tenants_of_a_server_part_each_tier_unless_told_otherwise() -> None:
    assert Quota(parts=4).byte_limit(100) == 25
    assert Quota(parts=1).byte_limit(100) is None
    assert Quota(nbytes=7, parts=4).byte_limit(100) == 7


def test_a_server_keeps_its_tenants_within_their_quotas_and_shows_what_they_keep(
    make_server: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragfuse.serve.service.UPKEEP_S", 0.05)
    served = make_server(TENANTS, max_tokens=2, serve_tenant_texts=2, serve_tenant_sessions=3)
    for at, text in enumerate(CHUNKS[:4]):
        asked(served.of(BLUE), documents=[text], session_id=f"s{at}")
    asked(served.of(GREEN), documents=[CHUNKS[0]])
    name = served.service.model
    blue, green = (f'engine="{name}-{tenant.name}"' for tenant in served.service.keys.tenants)
    for key, mine, texts, sessions, gone in ((BLUE, blue, 2, 3, 1), (GREEN, green, 1, 0, 0)):
        lines = {
            f"ragfuse_tenant_texts{{{mine}}} {texts}.0",
            f"ragfuse_tenant_sessions{{{mine}}} {sessions}.0",
            f'ragfuse_tenant_evictions_total{{{mine},kind="sessions"}} {gone}.0',
        }
        metrics = served.of(key).get
        wait_for(lambda get=metrics, lines=lines: lines <= {*get("/metrics").text.splitlines()})
    assert green not in served.of(BLUE).get("/metrics").text


def asked(served: Served, **fields: object) -> None:
    assert served.chat(**fields).status_code == 200
    wait_for(lambda: served.get("/v1/ragfuse/store").json()["waiting_to_be_encoded"] == 0)
