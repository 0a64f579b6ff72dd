"""Entries, usage and sessions over HTTP: counted, listed, deleted, each tenant's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragfuse.serve.keys import Keys
from tests.kits.serve import (
    BLUE,
    GREEN,
    TENANTS,
    Served,
    refused,
    serving,
    settings_of,
    with_documents,
)

ENTRIES, TALK = "/v1/ragfuse/entries", "/v1/ragfuse/sessions/talk"
BOOKS = {"book-0", "book-1", "book-2"}


@pytest.fixture
def two(varied_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server asked by the first of two tenants, both of which asked with the same documents."""
    settings = settings_of(varied_path, tmp_path, max_tokens=4, learn="retrieved")
    with serving(settings, Keys(TENANTS)) as served:
        for tenant, key in enumerate((BLUE, GREEN)):
            asked = served.of(key).chat(session_id="talk", **with_documents())
            assert asked.status_code == 200
            served.engine(tenant).flush()
        yield served.of(BLUE)


def sources(served: Served) -> dict[str, Any]:
    """What a tenant keeps, by source."""
    found = served.get("/v1/ragfuse/store").json()["sources"]
    return {each["source"]: each for each in found}


def test_what_is_deleted_is_gone_for_its_tenant_alone(two: Served) -> None:
    before = sources(two.of(GREEN))
    assert set(sources(two)) >= BOOKS
    answer = two.delete(f"{ENTRIES}?source=book-0").json()
    assert answer["chunks"] == 1
    assert answer["nbytes"] > 0
    assert "book-0" not in sources(two)
    two.delete(f"{ENTRIES}?all=true")
    assert sources(two) == {}
    assert sources(two.of(GREEN)) == before


def test_a_deletion_is_of_one_source_or_of_all(two: Served) -> None:
    before = sources(two)
    for query in ("", "?source=a&all=true"):
        refused(two.delete(f"{ENTRIES}{query}"))
    assert sources(two) == before


def test_usage_counts_the_askers_own_bytes_by_tier_and_source(two: Served) -> None:
    found = two.get("/v1/ragfuse/store").json()
    assert {each["source"] for each in found["sources"]} >= BOOKS
    for each in found["sources"]:  # KV counts once, its copies by tier
        assert set(each["tiers"]) == {"memory", "disk"}
        assert each["nbytes"] == max(each["tiers"].values()) < sum(each["tiers"].values())
    assert (found["texts"], found["sessions"]) == (3, 1)
    assert [tier["name"] for tier in found["tiers"] if tier["nbytes"] > 0] == ["memory", "disk"]
    assert found["limits"]["sessions"] == two.service.settings.serve_tenant_sessions


def test_sessions_are_listed_and_deleted_by_their_tenant_alone(two: Served) -> None:
    def listed(served: Served) -> list[tuple[str, int]]:
        found = served.get("/v1/ragfuse/sessions").json()["data"]
        return [(each["id"], each["turns"]) for each in found]

    assert listed(two) == [("talk", 1)]
    assert two.delete(TALK).json()["deleted"] is True
    assert refused(two.delete(TALK), 404)["code"] == "session_not_found"
    assert listed(two.of(GREEN)) == [("talk", 1)]
