"""Entries, usage and sessions over HTTP: counted, listed, deleted, each tenant's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragfuse.serve.keys import Keys
from tests.serve.kit import Served, read_only_disk, said, serving, settings_of
from tests.tiny import CHUNKS

BLUE, RED = "a-key-of-the-blue-tenant", "a-key-of-the-red-tenant"


@pytest.fixture
def two(varied_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server of two tenants, both of which asked with the same documents."""
    settings = settings_of(
        varied_path,
        tmp_path,
        max_tokens=4,
        learn="retrieved",
    )
    with serving(settings, Keys([f"blue:{BLUE}", f"red:{RED}"])) as served:
        for key in (BLUE, RED):
            documents = [
                {"text": text, "title": f"book-{at}"} for at, text in enumerate(CHUNKS[:3])
            ]
            body = {
                "model": served.service.model,
                "messages": [said()],
                "documents": documents,
                "session_id": "talk",
            }
            assert served.post("/v1/chat/completions", body, **of(key)).status_code == 200
        for tenant in served.service.keys.tenants:
            served.service.engine(tenant).flush()
        yield served


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def sources(served: Served, key: str) -> dict[str, Any]:
    """What a tenant keeps, by source."""
    found = served.get("/v1/ragfuse/usage", **of(key)).json()["sources"]
    return {each["source"]: each for each in found}


def test_what_is_deleted_is_gone_for_its_tenant_alone(two: Served) -> None:
    before = sources(two, RED)
    assert {"book-0", "book-1", "book-2"} <= set(sources(two, BLUE))
    answer = httpx.delete(
        f"{two.root}/v1/ragfuse/entries", params={"source": "book-0"}, headers=of(BLUE)
    ).json()
    assert answer["chunks"] == 1
    assert answer["nbytes"] > 0
    assert "book-0" not in sources(two, BLUE)
    httpx.delete(f"{two.root}/v1/ragfuse/entries", params={"all": "true"}, headers=of(BLUE))
    assert sources(two, BLUE) == {}
    assert sources(two, RED) == before


def test_what_a_tier_refuses_is_told(two: Served) -> None:
    with read_only_disk(two):
        deleted = two.delete("/v1/ragfuse/entries?source=book-0", **of(BLUE))
        session = two.delete("/v1/ragfuse/sessions/talk", **of(BLUE))
    assert deleted.status_code == 503
    assert "may still be stored in disk" in deleted.json()["error"]["message"]
    assert (session.status_code, session.json().get("silent")) == (200, ["disk"])
    assert "book-0" in sources(two, BLUE)
    assert two.delete("/v1/ragfuse/entries?source=book-0", **of(BLUE)).json()["tiers"]["disk"] > 0
    assert "book-0" not in sources(two, BLUE)


@pytest.mark.parametrize("query", ["", "?source=a&all=true"])
def test_a_deletion_says_one_thing(two: Served, query: str) -> None:
    before = sources(two, BLUE)
    assert two.delete(f"/v1/ragfuse/entries{query}", **of(BLUE)).status_code == 400
    assert sources(two, BLUE) == before


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
    assert len(two.get("/v1/ragfuse/sessions", **of(RED)).json()["data"]) == 1
