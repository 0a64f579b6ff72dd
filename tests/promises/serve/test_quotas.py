"""What a tenant may keep: counted, shown, and the oldest of it dropped, whatever other tenants
have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragfuse import Ask, Engine
from ragfuse.serve.service import enforce, limits_of
from tests.kits.serve import BLUE, GREEN, TENANTS, Served, settings_of, wait_for
from tests.kits.tiny import CHUNKS


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


def limited(engine: Engine, parts: int = 1, **limits: int) -> None:
    """Enforce these limits of a tenant."""
    settings, names = engine.settings, {f"serve_tenant_{name}": n for name, n in limits.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "settings", settings.model_copy(update=names))
        enforce(engine, parts)


def test_the_texts_noted_first_are_forgotten_with_their_kv_and_no_other_tenant_s(
    pair: tuple[Engine, Engine],
) -> None:
    one, other = pair
    filled(one, other)
    for _ in range(2):
        limited(one, texts=3)
        assert sources(one) == ["book-2", "book-3", "book-4"]
    assert len(on_disk(one)) == 3
    assert [piece.kind for piece in one.prompts.pieces(f"{CHUNKS[0]}\n\nWho?")] == ["fresh"]
    assert one.prompts.pieces(f"{CHUNKS[4]}\n\nWho?")[0].kind == "chunk"
    assert len(sources(other)) == len(on_disk(other)) == 5


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
    limited(one, bytes=most)
    left = on_disk(one)
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
    limited(one, sessions=2)
    assert [info.id for info in one.sessions.ls()] == ["a", "d"]
    assert {info.id for info in other.sessions.ls()} == {"a", "b", "c", "d"}


def test_tenants_of_a_server_part_each_tier_unless_told_otherwise(
    pair: tuple[Engine, Engine],
) -> None:
    one, _ = pair
    capacity = one.store.tier("disk").capacity
    assert limits_of(one, 4)["bytes"] == capacity // 4
    assert "bytes" not in limits_of(one, 1)
    told = one.settings.model_copy(update={"serve_tenant_bytes": 7})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "settings", told)
        assert limits_of(one, 4)["bytes"] == 7


def test_a_server_keeps_its_tenants_within_their_quotas_and_shows_what_they_keep(
    make_server: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragfuse.serve.service.UPKEEP_S", 0.05)
    served = make_server(TENANTS, max_tokens=2, serve_tenant_texts=2, serve_tenant_sessions=3)
    for at, text in enumerate(CHUNKS[:4]):
        asked(served.of(BLUE), documents=[text], session_id=f"s{at}")
    asked(served.of(GREEN), documents=[CHUNKS[0]])

    def kept(key: str) -> tuple[int, int]:
        found = served.of(key).get("/v1/ragfuse/store").json()
        return found["texts"], found["sessions"]

    wait_for(lambda: (kept(BLUE), kept(GREEN)) == ((2, 3), (1, 0)))


def asked(served: Served, **fields: object) -> None:
    assert served.chat(**fields).status_code == 200
    wait_for(lambda: served.get("/v1/ragfuse/store").json()["waiting_to_be_encoded"] == 0)
