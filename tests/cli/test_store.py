"""`ragfuse store` as an operator uses it, over a real store and without any model."""

import json
import os

import pytest

from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile, DiskTier, KVStore
from ragfuse.store.redis import RedisTier
from ragfuse.store.tenants import hidden, remember_tenant
from ragfuse.types.keys import ChunkKey, filler_context
from tests.cli.kit import refused
from tests.store.kit import files, key, kv, leave_only_in
from tests.store.redis_server import RedisServer
from tests.tiny import python

MB = 1 << 20
OURS, THEIRS = [key(i, "ours") for i in range(3)], [key(i, "theirs") for i in range(2)]
FILLER = ChunkKey(OURS[0].model, OURS[0].tokens, filler_context("abc"))
COMMANDS = [("ls",), ("rm", "--all"), ("pin", "--all"), ("gc",)]


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
        CatalogFile(tmp_path / "store") as book,
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
    with CatalogFile(path) as book:
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


# tenants


@pytest.fixture
def shared(filled):
    """The store, with the others known by their salt as well."""
    with CatalogFile(filled) as book:
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
    assert told("pin", "--off", "--tier", "disk", SALT="other") == {
        "unpinned": 0,
        "already": 2,
        "silent": [],
    }
    assert "Nothing in the store matches" in run("rm", "--all", "--yes", SALT="nobody").output
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


def test_clear_names_a_tier_that_is_down_and_keeps_all_texts(run, told, filled, server):
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    tiers = DiskTier(filled, 10 * MB, lru), RedisTier(server.url(), timeout_s=30)
    with KVStore(tiers) as store:
        leave_only_in(store, [OURS[1]], "redis")
    server.kill()
    assert "redis" in run("ls", **far).output
    result = run("rm", "--all", "--yes", **far)
    assert result.exit_code == 1
    assert "redis" in result.output
    assert left(filled) == set()
    assert (len(texts(filled, OURS[0].model)), len(texts(filled, THEIRS[0].model))) == (2, 1)
    again = run("rm", "--all", "--yes", "--json", "-", **far)  # nothing is listed any more
    assert again.exit_code == 1
    counts = {"dropped": 0, "nbytes": 0, "texts": 0, "stayed": 0}
    assert json.loads(again.stdout) == {**counts, "silent": ["redis"]}
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
    assert told("pin", "--off", "--all") == {"unpinned": 2, "already": 4, "silent": []}
    assert not any(entry["pinned"] for entry in told("ls")["entries"])


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
    assert use.items() >= {"texts": 2, "sessions": 0, "nbytes": {"disk": kept}}.items()


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


def test_gc_and_pin_tell_which_tier_is_down(run, filled, server):
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    server.kill()
    for command in (("gc",), ("pin", "--off", "--tier", "redis")):
        result = run(*command, "--json", "-", **far)
        assert result.exit_code == 1
        assert json.loads(result.stdout)["silent"] == ["redis"]
