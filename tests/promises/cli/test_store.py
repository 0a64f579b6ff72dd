"""`ragfuse store` as an operator uses it, over a real store and without any model."""

import json
import os
from pathlib import Path

import pytest

from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import Catalog, DiskTier, KVStore
from ragfuse.store.catalog import hidden, remember_tenant
from ragfuse.types.keys import ChunkKey, filler_context
from tests.kits.cli import refused
from tests.kits.redis_server import RedisServer
from tests.kits.store import files, key, kv
from tests.kits.tiny import python

MB = 1 << 20
OURS, THEIRS = [key(i, "ours") for i in range(3)], [key(i, "theirs") for i in range(2)]
FILLER = ChunkKey(OURS[0].model, OURS[0].tokens, filler_context("abc"))
COMMANDS = [("ls",), ("rm", "--all"), ("pin", "--all"), ("gc",), ("export", "a.zip")]


@pytest.fixture
def run(run, tmp_path):
    """Runs a command of `ragfuse store`."""
    ours = {"STORE": tmp_path / "store", "DISK_BYTES": 10 * MB}

    def store(*arguments, lines=(), **more):
        variables = {f"RAGFUSE_{name}": str(value) for name, value in (ours | more).items()}
        return run("store", *arguments, lines=lines, **variables)

    return store


@pytest.fixture
def filled(tmp_path):
    """Six entries of two tenants, one chunk of ours in two companies; the book knows most texts."""
    with (
        KVStore([DiskTier(tmp_path / "store", 10 * MB, lru)]) as store,
        Catalog(tmp_path / "store").strict as book,
    ):
        for i, one in enumerate([*OURS, FILLER, *THEIRS]):
            store.put(one, kv(i), wait=True)
        store.read_layers(OURS[1], 0)
        remember_tenant(book, OURS[0].model, Settings(model="smol", salt="acme"))
        sources = ["/docs/Lighthouse.md", "/docs/ships.md"]
        book.add_texts(
            OURS[0].model, [(str(OURS[i]), f"All\nabout \x1b[31m{i}", sources[i]) for i in range(2)]
        )
        book.add_texts(THEIRS[0].model, [(str(THEIRS[0]), "Theirs.", "/docs/theirs.md")])
    return tmp_path / "store"


def left(path) -> set[ChunkKey]:
    with KVStore([DiskTier(path, 10 * MB, lru)]) as store:
        return {entry.key for entry in store.entries()}


def texts(path, model) -> list[str]:
    with Catalog(path).strict as book:
        return [known.text for known in book.texts(model)]


# looking


def test_looking_with_smaller_settings_drops_nothing(told, filled):
    for command in (("ls",), ("gc",), ("pin", "--source", "ships")):
        told(*command, DISK_BYTES=1)
    assert len(told("ls")["entries"]) == 6


def test_a_store_that_is_empty_or_not_there_says_so_and_is_not_made(run, told, tmp_path):
    for command in COMMANDS:
        refused(run(*command), "InputError", "ragfuse ingest PATH")
    assert not (tmp_path / "store").exists()
    DiskTier(tmp_path / "store", MB, lru).close()
    assert "The store is empty" in run("ls").output
    assert (told("ls")["entries"], told("ls")["tenants"]) == ([], [])
    assert "is empty" in run("rm", "--all").output


def test_where_nothing_matches_no_table_is_shown(run, filled):
    shown = run("ls", "--source", "nowhere").output
    assert "No entry in the store matches" in shown
    assert "disk" not in shown


# tenants


@pytest.fixture
def shared(filled):
    """The store, with the others known by their salt as well."""
    with Catalog(filled).strict as book:
        remember_tenant(book, THEIRS[0].model, Settings(model="smol", salt="other"))
    return filled


@pytest.mark.parametrize(
    "filters", [("--all",), ("--source", "s.md"), ("--tier", "disk"), ("--model", "smol")]
)
def test_a_salt_limits_clear_to_its_tenant(told, shared, filters):
    told("rm", *filters, "--yes", SALT="other")
    assert {one for one in left(shared) if one.model == OURS[0].model} == {*OURS, FILLER}
    assert not set(THEIRS[:1]) & left(shared)
    assert len(texts(shared, OURS[0].model)) == 2
    assert texts(shared, THEIRS[0].model) == []


def test_a_salt_limits_all_that_takes_filters_to_its_tenant_unless_another_is_named(
    run, told, shared
):
    assert {entry["digest"] for entry in told("ls", SALT="acme")["entries"]} == {OURS[0].model}
    assert told("pin", "--all", SALT="acme")["pinned"] == 4
    unpinned = {"unpinned": 0, "already": 2}
    assert told("pin", "--off", "--tier", "disk", SALT="other") == unpinned
    assert told("export", "a.zip", SALT="other")["texts"] == 1
    assert "No entry in the store matches" in run("rm", "--all", "--yes", SALT="nobody").output
    assert told("rm", "--tenant", "other", "--yes", SALT="acme")["dropped"] == 2
    assert left(shared) == {*OURS, FILLER}


def test_without_a_salt_all_is_all(told, shared):
    assert told("rm", "--all", "--yes", SALT="")["dropped"] == 6
    assert left(shared) == set()


# changing


@pytest.fixture
def server(tmp_path):
    """A Redis server of the test's own."""
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


def moved(told, far, *filters):
    """Lets a further tier alone hold what is selected; returns how many entries these are."""
    assert told("export", "moved.zip", "--yes", *filters, **far)["entries"]
    n = told("import", "moved.zip", "--tier", json.loads(far["TIERS"])[0].partition(":")[0], **far)[
        "entries"
    ]
    assert told("rm", "--tier", "disk", "--yes", *filters, **far)["dropped"] == n
    return n


def test_a_tier_that_is_down_stops_a_deletion_and_keeps_all_texts(run, told, filled, server):
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    assert moved(told, far, "--source", "ships") == 1
    server.kill()
    assert "redis" in run("ls", **far).output
    refused(run("rm", "--all", "--yes", **far), "StoreError", "redis", "nothing was changed")
    assert len(left(filled)) == 5
    done = told("rm", "--tier", "disk", "--yes", **far)
    assert (done["dropped"], done["texts"]) == (5, 0)
    assert left(filled) == set()
    assert (len(texts(filled, OURS[0].model)), len(texts(filled, THEIRS[0].model))) == (2, 1)
    server.start()
    assert told("rm", "--all", "--yes", **far)["texts"] == 3
    assert texts(filled, OURS[0].model) == texts(filled, THEIRS[0].model) == []


def test_pins_are_kept_and_taken_off(told, filled):
    assert told("pin", "--source", "lighthouse")["pinned"] == 2
    assert {entry["key"] for entry in told("ls")["entries"] if entry["pinned"]} == {
        str(OURS[0]),
        str(FILLER),
    }
    assert told("ls")["tiers"][0]["pinned"] == 2
    assert told("pin", "--off", "--all") == {"unpinned": 2, "already": 4}
    assert not any(entry["pinned"] for entry in told("ls")["entries"])


def test_chunks_travel_to_another_store_in_a_file(told, run, filled, tmp_path):
    away = {"STORE": tmp_path / "other"}
    exported = told("export", "a.zip", "--tenant", "acme")
    assert (exported["entries"], exported["texts"], exported["missing"]) == (4, 2, 0)
    imported = told("import", "a.zip", **away)
    assert (imported["entries"], imported["texts"], imported["known"]) == (4, 2, 0)
    assert left(tmp_path / "other") == {*OURS, FILLER}
    assert texts(tmp_path / "other", OURS[0].model) == texts(filled, OURS[0].model)
    assert told("import", "a.zip", **away)["known"] == 4
    assert "4 entries and 2 texts" in run("import", "a.zip", STORE=tmp_path / "third").output


def test_an_export_asks_before_it_replaces_a_file(told, run, filled):
    assert told("export", "a.zip", "--tenant", "acme")["texts"] == 2
    assert b"Theirs." not in Path("a.zip").read_bytes()
    assert run("export", "a.zip").exit_code == 1
    assert told("export", "a.zip", "--yes")["texts"] == 3


def test_gc_frees_rests_and_what_is_too_old_and_keeps_pins(told, filled):
    temp = files(filled)[0].parent / "x.0123456789abcdef.tmp"
    temp.write_bytes(bytes(50))
    os.utime(temp, (1.0, 1.0))
    # cleared away at opening
    assert told("gc")["tiers"]["disk"] == {"expired": 0, "nbytes": 0}
    assert not [path for path in files(filled) if path.suffix == ".tmp"]
    told("pin", "--source", "ships")
    assert told("gc", TTL_S="0.000001")["tiers"]["disk"]["expired"] == 5
    assert left(filled) == {OURS[1]}


# one readable line


def test_a_store_that_is_a_file_or_closed_or_has_no_tier(run, tmp_path):
    (tmp_path / "store").write_text("mine")
    for command in COMMANDS:
        refused(run(*command), "StoreError", "a file")
    assert (tmp_path / "store").read_text() == "mine"
    refused(run("ls", DISK_BYTES=0), "SettingsError", "disk_bytes")


def test_no_command_loads_or_even_imports_a_model(filled):
    code = f"""
        import contextlib, io, json, sys
        from ragfuse.cli import app
        sys.argv = ["ragfuse", "store", "ls", "--store", {str(filled)!r}]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                app()
        except SystemExit as end:
            assert not end.code
        print(json.dumps(sorted({{"transformers", "peft", "langchain_core"}} & set(sys.modules))))
        """
    assert python(code) == []


# what stands behind the commands


def test_ls_shows_the_owner_source_and_use_of_each_entry(told, filled):
    found = told("ls")
    entries = {entry["key"]: entry for entry in found["entries"]}
    assert set(entries) == {str(one) for one in (*OURS, FILLER, *THEIRS)}
    assert found["nbytes"] == sum(path.stat().st_size for path in files(filled))
    mine = entries[str(OURS[1])]
    wanted = {"model": "smol", "tenant": hidden("acme"), "digest": OURS[0].model, "tier": "disk"}
    wanted |= {"encoded": "alone", "n_tokens": 5, "hits": 1, "levels": {"raw": mine["nbytes"]}}
    wanted |= {"source": "/docs/ships.md", "text": "All\nabout \x1b[31m1", "pinned": False}
    assert mine.items() >= wanted.items()
    filler = entries[str(FILLER)]
    assert (filler["encoded"], filler["source"]) == ("filler", "/docs/Lighthouse.md")
    (use,) = told("ls", "--model", "smol")["tenants"]
    kept = sum(entry["nbytes"] for entry in entries.values() if entry["model"] == "smol")
    assert use.items() >= {"texts": 2, "sessions": 0, "nbytes": kept}.items()


def test_ls_fits_the_terminal_and_prints_no_control_characters(run, filled, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = run("ls").output
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "\x1b" not in said
    for word in (*(one.tokens[:12] for one in (*OURS, *THEIRS)), "smol", "disk", "filler"):
        assert word in said
    assert "4 more" in run("ls", "--limit", "2").output


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        (("--source", "LIGHT"), {OURS[0], FILLER}),
        (("--model", THEIRS[0].model[:8]), set(THEIRS)),
        (("--tenant", "acme", "--source", "ships"), {OURS[1]}),
        ((OURS[0].tokens[:12], "--model", "smol"), {OURS[0], FILLER}),
    ],
)
def test_filters_select_entries_that_match_all_of_them(told, filled, filters, wanted):
    found = {entry["key"] for entry in told("ls", *filters)["entries"]}
    assert found == {str(one) for one in wanted}


def test_a_filter_without_a_match_or_a_meaning_changes_nothing(run, filled):
    refused(run("ls", "--tier", "tape"), "StoreError", "disk")
    refused(run("ls", "zzzz"), "InputError", "ragfuse store ls")
    assert OURS[0].tokens == THEIRS[0].tokens
    refused(run("rm", OURS[0].tokens[:12], "--yes"), "InputError", "--tenant")
    for command in (("pin",), ("rm", "--yes")):
        refused(run(*command), "InputError", "--all")
        refused(run(*command, "--all", "--source", "ships"), "InputError", "--all")
        assert run(*command, "--source", "no such document").exit_code == 1
    assert len(left(filled)) == 6


def test_deleting_asks_first_and_drops_texts_without_entries(run, told, filled):
    for answer, is_gone in ((), False), (("n",), False), (("y",), True):
        result = run("rm", "--source", "ships", lines=answer)
        assert "Delete 1 entry" in result.output
        assert (result.exit_code == 0) == is_gone
        assert (OURS[1] in left(filled)) != is_gone
    with KVStore([DiskTier(filled, 10 * MB, lru)]) as store:
        store.clear(OURS[0].model)
    assert told("rm", "--tenant", "acme", "--yes")["texts"] == 1
    assert (texts(filled, OURS[0].model), texts(filled, THEIRS[0].model)) == ([], ["Theirs."])


def test_an_export_is_refused_where_a_tier_that_may_hold_some_is_down(run, told, filled, server):
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    assert moved(told, far, "--source", "ships") == 1
    assert told("export", "keep.zip", **far)["entries"] == 6
    good = Path("keep.zip").read_bytes()
    server.kill()
    for wish in ((), ("--tier", "redis"), ("--source", "ships")):
        refused(run("export", "keep.zip", "--yes", *wish, **far), "StoreError", "redis")
    assert Path("keep.zip").read_bytes() == good
    refused(run("gc", **far), "StoreError", "redis")
    # nothing that is selected is missing
    assert run("export", "keep.zip", "--tier", "disk", "--yes", **far).exit_code == 0


def test_what_is_damaged_is_refused(run, told, filled, tmp_path):
    assert told("export", "a.zip")["entries"] == 6
    data = Path("a.zip").read_bytes()
    path = next(path for path in files(filled) if path.suffix == ".kv")
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    refused(run("export", "a.zip", "--yes"), "StoreError", "could not be read")
    assert Path("a.zip").read_bytes() == data
    Path("a.zip").write_bytes(data[:1500] + b"damage" + data[1506:])
    result = run("import", "a.zip", STORE=tmp_path / "other")
    refused(result, "StoreError", "cannot be imported")
    assert len(left(tmp_path / "other")) < 6
    refused(run("import", "b.zip"), "StoreError", "cannot be imported")
    refused(run("export", "no/such/folder/a.zip"), "StoreError", "cannot be written")
