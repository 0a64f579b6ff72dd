"""Entries, usage and sessions over HTTP: listed, pinned, deleted, each tenant's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragfuse import Settings
from ragfuse.serve.keys import Keys
from tests.serve.kit import Served, read_only_disk, said, serving
from tests.tiny import CHUNKS

BLUE, RED = "a-key-of-the-blue-tenant", "a-key-of-the-red-tenant"


@pytest.fixture
def two(varied_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server of two tenants, both of which asked with the same documents."""
    settings = Settings(
        model=str(varied_path),
        dtype="float32",
        store=tmp_path / "store",
        home=tmp_path,
        max_tokens=4,
        learn="retrieved",
    )
    with serving(settings, Keys([f"blue:{BLUE}", f"red:{RED}"])) as served:
        for key in (BLUE, RED):
            documents = [{"text": text, "title": f"book-{at}"} for at, text in enumerate(CHUNKS[:3])]
            body = {"model": served.service.model, "messages": [said()], "documents": documents, "session_id": "talk"}
            assert served.post("/v1/chat/completions", body, **of(key)).status_code == 200
        for tenant in served.service.keys.tenants:
            served.service.engine(tenant).flush()
        yield served


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def rows(served: Served, key: str, query: str = "") -> list[dict[str, Any]]:
    return served.get(f"/v1/ragfuse/entries{query}", **of(key)).json()["data"]


def test_entries_are_listed_with_source_and_beginning(two: Served) -> None:
    found = [row for row in rows(two, BLUE) if row["source"]]
    assert {row["source"] for row in found} == {"book-0", "book-1", "book-2"}
    assert {row["text"] for row in found} == set(CHUNKS[:3])
    assert all(row["nbytes"] > 0 and row["n_tokens"] > 0 and row["tiers"] and not row["pinned"] for row in found)
    assert [row["source"] for row in rows(two, BLUE, "?source=book-1")] == ["book-1"]
    assert len(rows(two, BLUE, "?limit=1")) == 1


def test_a_pin_holds_until_it_is_taken_off(two: Served) -> None:
    key = rows(two, BLUE, "?source=book-1")[0]["key"]
    answer = two.post("/v1/ragfuse/entries/pin", {"keys": [key[:12]]}, **of(BLUE))
    assert answer.json() == {"object": "ragfuse.pinned", "chunks": 1, "pinned": True}
    assert [row["source"] for row in rows(two, BLUE) if row["pinned"]] == ["book-1"]
    assert not any(row["pinned"] for row in rows(two, RED))
    two.post("/v1/ragfuse/entries/unpin", {"source": "book-1"}, **of(BLUE))
    assert not any(row["pinned"] for row in rows(two, BLUE))


def test_what_is_deleted_is_gone_for_its_tenant_alone(two: Served) -> None:
    before = rows(two, RED)
    answer = httpx.delete(f"{two.root}/v1/ragfuse/entries", params={"source": "book-0"}, headers=of(BLUE)).json()
    assert answer["chunks"] == 1
    assert answer["nbytes"] > 0
    assert "book-0" not in {row["source"] for row in rows(two, BLUE)}
    httpx.delete(f"{two.root}/v1/ragfuse/entries", params={"all": "true"}, headers=of(BLUE))
    assert rows(two, BLUE) == []
    assert [row["key"] for row in rows(two, RED)] == [row["key"] for row in before]


def test_what_a_tier_refuses_is_told(two: Served) -> None:
    with read_only_disk(two):
        pinned = two.post("/v1/ragfuse/entries/pin", {"source": "book-1"}, **of(BLUE))
        deleted = two.delete("/v1/ragfuse/entries?source=book-0", **of(BLUE))
        session = two.delete("/v1/ragfuse/sessions/talk", **of(BLUE))
    assert pinned.status_code == deleted.status_code == 503
    assert "1 of 1 chunks could not be pinned in the tier disk" in pinned.json()["error"]["message"]
    assert "may still be stored in the tier disk" in deleted.json()["error"]["message"]
    assert (session.status_code, session.json().get("silent")) == (200, ["disk"])
    assert "book-0" in {row["source"] for row in rows(two, BLUE)}
    assert two.delete("/v1/ragfuse/entries?source=book-0", **of(BLUE)).json()["tiers"]["disk"] > 0
    assert two.post("/v1/ragfuse/entries/pin", {"source": "book-1"}, **of(BLUE)).json()["chunks"] == 1
    assert "book-0" not in {row["source"] for row in rows(two, BLUE)}


def test_another_tenants_key_selects_nothing(two: Served) -> None:
    httpx.delete(f"{two.root}/v1/ragfuse/entries", params={"all": "true"}, headers=of(BLUE))
    key = rows(two, RED)[0]["key"]
    assert two.post("/v1/ragfuse/entries/pin", {"keys": [key]}, **of(BLUE)).status_code == 404
    answer = httpx.delete(f"{two.root}/v1/ragfuse/entries", params={"key": key}, headers=of(BLUE))
    assert answer.status_code == 404
    assert any(row["key"] == key for row in rows(two, RED))


@pytest.mark.parametrize(
    "body", [{}, {"keys": ["abcdefgh"], "all": True}, {"keys": ["abc"]}, {"keys": ["x" * 9] * 1001}, {"nonsense": 1}]
)
def test_a_selection_says_one_thing(two: Served, body: dict[str, Any]) -> None:
    assert two.post("/v1/ragfuse/entries/pin", body, **of(BLUE)).status_code == 400


def test_a_part_of_a_source_finds_its_entries_in_any_case(two: Served) -> None:
    def sources(query: str) -> set[str]:
        return {each["source"] for each in two.get(f"/v1/ragfuse/entries?{query}", **of(BLUE)).json()["data"]}

    assert sources("source=BOOK-") >= {"book-0", "book-1", "book-2"}
    assert sources("source=ook-1") == sources("source=book-1&exact=true") == {"book-1"}
    assert sources("source=ook-1&exact=true") == set()
    assert "book-1" not in sources("source=")
    assert two.delete("/v1/ragfuse/entries?source=ook-1", **of(BLUE)).json().get("chunks", 0) == 0


def test_usage_counts_the_askers_own_bytes_by_tier_and_source(two: Served) -> None:
    found = two.get("/v1/ragfuse/usage", **of(BLUE)).json()
    assert {each["source"] for each in found["sources"]} >= {"book-0", "book-1", "book-2"}
    for each in found["sources"]:  # KV counts once, its copies by tier
        assert set(each["tiers"]) == {"memory", "disk"}
        assert each["nbytes"] == max(each["tiers"].values()) < sum(each["tiers"].values())
    assert found["texts"] == 3
    assert found["sessions"] == 1
    assert found["nbytes"]["disk"] > 0
    assert found["limits"]["sessions"] == two.service.settings.serve_tenant_sessions


def test_sessions_are_listed_and_deleted_by_their_tenant_alone(two: Served) -> None:
    found = two.get("/v1/ragfuse/sessions", **of(BLUE)).json()["data"]
    assert [(each["id"], each["turns"]) for each in found] == [("talk", 1)]
    assert two.delete("/v1/ragfuse/sessions/talk", **of(BLUE)).json()["deleted"] is True
    again = two.delete("/v1/ragfuse/sessions/talk", **of(BLUE))
    assert (again.status_code, again.json()["error"]["code"]) == (404, "session_not_found")
    assert again.json()["error"]["message"] == "There is no session 'talk'. GET /v1/ragfuse/sessions lists them."
    assert len(two.get("/v1/ragfuse/sessions", **of(RED)).json()["data"]) == 1
