"""Named bytes in a tier: told by name to people, carried by archives, gone after their time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragfuse import ByteStore, Settings, StoreError
from ragfuse.admin.store_admin import EntryFilter, StoreAdmin


def test_people_are_told_whose_bytes_they_are(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store")
    with ByteStore(namespace="embeddings", settings=settings) as store:
        store.put([("a", b"value")])
    with StoreAdmin(settings) as admin:
        assert [line.tenant.name for line in admin.list_entries()] == ["bytes of 'embeddings'"]
        cleared = admin.clear(admin.list_entries(EntryFilter(model="bytes of 'embeddings'")), EntryFilter())
    assert len(cleared.dropped) == 1
    with ByteStore(namespace="embeddings", settings=settings) as store:
        assert store.get(["a"]) == [None]


def test_an_archive_carries_them_to_another_store(tmp_path: Path) -> None:
    there, here = Settings(store=tmp_path / "there"), Settings(store=tmp_path / "here")
    values = {"a": bytes(range(256)), "": b"", "b": b"\0" * 100_000}
    with ByteStore(settings=there) as store:
        store.put(values.items())
    with StoreAdmin(there) as admin:
        assert len(admin.export(admin.list_entries(), tmp_path / "all.zip", texts=True).done) == 3
    with StoreAdmin(here) as admin:
        assert len(admin.import_(tmp_path / "all.zip", None).done) == 3
    with ByteStore(settings=here) as store:
        assert store.get(list(values)) == list(values.values())
        assert sorted(store.names()) == sorted(values)


def test_what_is_unused_for_too_long_goes_unless_it_is_pinned(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store", ttl_s=1e-6)
    with (
        ByteStore(settings=settings) as store,
        ByteStore(namespace="pinned", pinned=True, settings=settings) as pinned,
    ):
        store.put([("a", b"value")])
        pinned.put([("a", b"value")])
        assert store.get(["a"]) == [None]
        assert pinned.get(["a"]) == [b"value"]


def test_the_own_folder_by_its_name_keeps_its_own_capacity(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store", disk_bytes=100_000)
    with ByteStore(str(tmp_path / "store" / ".." / "store"), settings=settings) as store:
        with pytest.raises(StoreError, match="too little space"):
            store.put([("a", bytes(200_000))])
        store.put([("a", bytes(20_000))])


@pytest.mark.parametrize("where", ["redis://127.0.0.1:1/0", "nonsense://x", ""])
def test_a_place_that_cannot_be_used_is_refused(where: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        ByteStore(where, settings=Settings(store=tmp_path, tier_timeout_s=0.2)).put([("a", b"value")])
