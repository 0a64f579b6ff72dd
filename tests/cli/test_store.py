"""`ragfuse store` as an operator uses it, over a real store and without any model."""

import errno
import io
import json
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragfuse.admin.store_admin import EntryFilter, StoreAdmin
from ragfuse.cli.main import app
from ragfuse.engine.store_opener import open_kept
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile, DiskTier, KVStore
from ragfuse.store.tenants import hidden, remember_tenant
from ragfuse.types.keys import ChunkKey, filler_context
from tests.store.kit import ROOT, asked, files, key, kv, leave_only_in
from tests.store.redis_server import RedisServer
from tests.store.s3_server import S3Server

MB = 1 << 20
OURS, THEIRS = [key(i, "ours") for i in range(3)], [key(i, "theirs") for i in range(2)]
FILLER = ChunkKey(OURS[0].model, OURS[0].tokens, filler_context("abc"))
COMMANDS = [("ls",), ("rm", "--all"), ("pin", "--all"), ("gc",), ("export", "a.zip")]


@pytest.fixture
def environment(tmp_path):
    ours = {"HOME": tmp_path / "home", "STORE": tmp_path / "store", "DISK_BYTES": 10 * MB}
    return {f"RAGFUSE_{name}": str(value) for name, value in ours.items()}


@pytest.fixture
def run(environment, tmp_path, monkeypatch):
    """Runs a command of `ragfuse store`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **more):
        everything = {
            **environment,
            **{f"RAGFUSE_{name}": str(value) for name, value in more.items()},
        }
        return CliRunner().invoke(app, ["store", *map(str, arguments)], env=everything)

    return run


@pytest.fixture
def told(run):
    """What a command says as JSON."""

    def told(*arguments, **more):
        result = run(*arguments, "--json", "-", **more)
        assert result.exit_code == 0, result.output + result.stderr
        return json.loads(result.stdout)

    return told


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


def refused(result, kind, *words):
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 1, result.output
    assert lines[-1].startswith(f"{kind}: ")
    assert (
        len([line for line in lines if "Error" in line and not line.startswith("warning: ")]) == 1
    )
    for word in words:
        assert word in lines[-1]


# looking


def test_ls_says_of_every_entry_whose_it_is_from_where_and_how_it_was_used(told, filled):
    found = told("ls")
    entries = {entry["key"]: entry for entry in found["entries"]}
    assert set(entries) == {str(one) for one in (*OURS, FILLER, *THEIRS)}
    assert found["nbytes"] == sum(path.stat().st_size for path in files(filled))
    mine = entries[str(OURS[1])]
    assert (mine["model"], mine["tenant"], mine["digest"]) == (
        "smol",
        hidden("acme"),
        OURS[0].model,
    )
    assert (mine["tier"], mine["encoded"], mine["n_tokens"], mine["hits"]) == (
        "disk",
        "alone",
        5,
        1,
    )
    assert mine["levels"] == {"raw": mine["nbytes"]}
    assert (mine["source"], mine["text"], mine["pinned"]) == (
        "/docs/ships.md",
        "All\nabout \x1b[31m1",
        False,
    )
    assert entries[str(FILLER)]["encoded"] == "filler"
    assert entries[str(FILLER)]["source"] == "/docs/Lighthouse.md"
    assert (entries[str(THEIRS[0])]["model"], entries[str(THEIRS[1])]["source"]) == ("", "")


def test_ls_for_people_is_a_table_without_anything_a_terminal_would_obey(run, filled, monkeypatch):
    for width in (80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        said = run("ls").output
        assert all(len(line) <= width for line in said.splitlines())
        assert "\x1b" not in said
        for word in (
            *(one.tokens[:12] for one in (*OURS, *THEIRS)),
            "smol",
            "disk",
            "filler",
            "ships.md",
        ):
            assert word in said
    assert "4 more" in run("ls", "--limit", "2").output


def test_a_text_of_two_sources_is_found_by_both_and_cleared_with_either(told, filled):
    with CatalogFile(filled) as book:
        book.add_texts(OURS[0].model, [(str(OURS[0]), "All\nabout \x1b[31m0", "/docs/copy.md")])
    (mine,) = [
        entry for entry in told("ls", "--source", "copy")["entries"] if entry["key"] == str(OURS[0])
    ]
    assert (mine["source"], mine["sources"]) == (
        "/docs/Lighthouse.md",
        ["/docs/Lighthouse.md", "/docs/copy.md"],
    )
    assert told("rm", "--source", "copy", "--yes")["dropped"] == 2
    assert told("ls", "--source", "copy")["entries"] == []
    assert OURS[0] not in left(filled)


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        (("--tier", "disk"), {*OURS, FILLER, *THEIRS}),
        (("--source", "LIGHT"), {OURS[0], FILLER}),
        (("--model", "smol"), {*OURS, FILLER}),
        (("--model", THEIRS[0].model[:8]), set(THEIRS)),
        (("--model", "xyzzy"), set()),
        (("--tenant", "acme"), {*OURS, FILLER}),
        (("--tenant", "acme", "--source", "ships"), {OURS[1]}),
        ((OURS[2].tokens[:12],), None),
        ((str(OURS[2]),), {OURS[2]}),
        ((OURS[2].tokens[:12], "--model", "smol"), {OURS[2]}),
        ((OURS[0].tokens[:12], "--model", "smol"), {OURS[0], FILLER}),
    ],
)
def test_filters_choose_what_matches_all_of_them(told, filled, filters, wanted):
    if wanted is None:
        wanted = {OURS[2]}
    assert {entry["key"] for entry in told("ls", *filters)["entries"]} == {
        str(one) for one in wanted
    }


def test_looking_with_smaller_settings_drops_nothing(told, filled):
    for command in (("ls",), ("gc",), ("pin", "--source", "ships")):
        told(*command, DISK_BYTES=1)
    assert len(told("ls")["entries"]) == 6


def test_a_store_that_is_empty_or_not_there_says_so_and_is_not_made(run, told, tmp_path):
    for command in COMMANDS:
        refused(run(*command), "InputError", "There is no store at", "ragfuse ingest PATH")
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
    assert told("export", "a.zip", SALT="other")["texts"] == 1
    assert "Nothing in the store matches" in run("rm", "--all", "--yes", SALT="nobody").output
    assert told("rm", "--tenant", "other", "--yes", SALT="acme")["dropped"] == 2
    assert left(shared) == {*OURS, FILLER}


def test_without_a_salt_all_is_all(told, shared):
    assert told("rm", "--all", "--yes", SALT="")["dropped"] == 6
    assert left(shared) == set()


# changing


def test_clear_of_one_tenant_leaves_the_others_and_their_texts(told, filled):
    assert told("rm", "--tenant", "acme", "--yes")["dropped"] == 4
    assert left(filled) == set(THEIRS)
    assert (texts(filled, OURS[0].model), texts(filled, THEIRS[0].model)) == ([], ["Theirs."])


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


@pytest.fixture
def far(told, filled, server):
    """Settings with a Redis that holds everything, and is down."""
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    assert moved(told, far) == 6
    assert told("export", "keep.zip", **far)["entries"] == 6
    server.kill()
    return far


@pytest.fixture
def half_far(told, filled, server):
    """Settings with a Redis that holds one chunk of six, and is down."""
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    assert moved(told, far, "--source", "ships") == 1
    server.kill()
    return far


def test_an_export_of_what_a_silent_tier_holds_writes_nothing_and_keeps_the_file_that_is_there(
    run, far
):
    good = Path("keep.zip").read_bytes()
    for wish in ((), ("--tier", "redis"), ("--source", "ships")):
        for name in ("keep.zip", "new.zip"):
            result = run("export", name, "--yes", *wish, **far)
            refused(
                result,
                "StoreError",
                "Tier redis does not answer",
                f"nothing was written to '{name}'",
            )
            assert "empty" not in result.output
    assert Path("keep.zip").read_bytes() == good
    assert not Path("new.zip").exists()


def test_an_export_that_would_lack_what_a_silent_tier_holds_goes_to_a_new_file_alone(run, half_far):
    Path("old.zip").write_bytes(b"old")
    refused(
        run("export", "old.zip", "--yes", **half_far),
        "StoreError",
        "does not answer",
        "nothing was written to 'old.zip'",
    )
    assert Path("old.zip").read_bytes() == b"old"
    result = run("export", "new.zip", "--json", "-", **half_far)
    assert result.exit_code == 1
    assert (json.loads(result.stdout)["entries"], json.loads(result.stdout)["silent"]) == (
        5,
        ["redis"],
    )
    assert "Tier redis does not answer" in result.stderr
    # nothing that is meant lacks
    assert run("export", "old.zip", "--tier", "disk", "--yes", **half_far).exit_code == 0


def test_what_cannot_be_read_is_left_out_of_a_new_export_alone_and_gives_a_status(
    run, told, filled
):
    def damage():
        path = next(path for path in files(filled) if path.suffix == ".kv")
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))

    assert told("export", "keep.zip")["entries"] == 6
    good = Path("keep.zip").read_bytes()
    damage()
    refused(
        run("export", "keep.zip", "--yes"),
        "StoreError",
        "was not replaced",
        "lack 1 of 6",
        "cannot be read",
    )
    assert Path("keep.zip").read_bytes() == good
    damage()
    result = run("export", "new.zip")
    assert result.exit_code == 1
    assert "left out" in result.output
    # what was damaged is gone: nothing lacks
    assert told("export", "keep.zip", "--yes")["entries"] == 4


def test_what_a_silent_tier_holds_is_never_said_to_be_nothing(run, far):
    for command in (("pin", "--all"), ("pin", "--off", "--tier", "redis")):
        result = run(*command, **far)
        refused(result, "StoreError", "Tier redis does not answer", "nothing was")
        assert "empty" not in result.output
    assert "empty" not in run("ls", **far).output
    assert "empty" not in run("rm", "--all", "--yes", **far).output


def test_a_bucket_that_does_not_answer_is_no_empty_one(run, told, filled):
    server = S3Server()
    try:
        far = {"TIERS": json.dumps([server.new_url()]), "TIER_TIMEOUT_S": 2.0}
        with server.reachable():
            assert told("export", "all.zip")["entries"] == 6
            assert told("import", "all.zip", "--tier", "objects", **far)["entries"] == 6
            assert told("export", "keep.zip", "--tier", "objects", **far)["entries"] == 6
            good = Path("keep.zip").read_bytes()
            server.stop()
            result = run("export", "keep.zip", "--tier", "objects", "--yes", **far)
            refused(result, "StoreError", "Tier objects does not answer", "nothing was written")
            gc = run("gc", **far)
        assert Path("keep.zip").read_bytes() == good
        assert gc.exit_code == 1
        assert "objects: does not answer" in gc.output
        assert "objects: 0" not in gc.output
    finally:
        server.stop()


def test_gc_says_which_tier_it_has_not_looked_at(run, half_far):
    result = run("gc", "--json", "-", **half_far)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (list(found["tiers"]), found["silent"]) == (["disk"], ["redis"])
    assert "redis: does not answer" in result.stderr


def test_clear_tells_what_stays_in_a_tier_that_is_down_and_keeps_all_texts(
    run, told, filled, server
):
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    assert moved(told, far, "--source", "ships") == 1
    server.kill()
    assert "Tier redis does not answer" in run("ls", **far).output
    result = run("rm", "--all", "--yes", **far)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "Deleted 5 entries" in said
    assert "Tier redis does not answer: what it holds stays" in said
    assert left(filled) == set()
    assert (len(texts(filled, OURS[0].model)), len(texts(filled, THEIRS[0].model))) == (2, 1)
    again = run("rm", "--all", "--yes", "--json", "-", **far)  # nothing is listed any more
    assert again.exit_code == 1
    counts = {"dropped": 0, "nbytes": 0, "texts": 0, "stayed": 0}
    assert json.loads(again.stdout) == {**counts, "silent": ["redis"]}
    server.start()
    assert told("rm", "--all", "--yes", **far)["texts"] == 3
    assert texts(filled, OURS[0].model) == texts(filled, THEIRS[0].model) == []


def test_clear_of_one_tier_is_done_whatever_another_does_and_keeps_the_texts_of_what_that_may_hold(
    run, told, filled, server
):
    far = {"TIERS": json.dumps([server.url()]), "TIER_TIMEOUT_S": 0.5}
    server.kill()
    result = run("rm", "--tier", "disk", "--yes", **far)
    said = " ".join(result.output.split())
    assert result.exit_code == 1, said
    assert "Deleted 6 entries" in said
    assert "Tier redis does not answer: what it holds stays there, and all texts stay" in said
    assert left(filled) == set()
    assert len(texts(filled, OURS[0].model)) == 2


def test_clear_tells_of_a_tier_that_goes_down_after_it_was_listed(filled, server):
    settings = Settings(store=filled, home=filled.parent, tiers=(server.url(),))
    with StoreAdmin(settings) as admin:
        leave_only_in(admin.store, [OURS[1]], "redis")
        lines = admin.list_entries()
        server.kill()
        done = admin.clear(lines, EntryFilter())
        assert (done.silent, done.texts) == (["redis"], 0)
        assert {line.entry.key for line in done.dropped} == {OURS[0], OURS[2], FILLER, *THEIRS}
        assert len(admin.catalog.file.tenants()) == 2


def test_clear_tells_of_a_folder_that_refuses(filled, monkeypatch):
    def refused(self, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with StoreAdmin(Settings(store=filled, home=filled.parent)) as admin:
        lines = admin.list_entries(EntryFilter(source="light"))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refused)
            done = admin.clear(lines, EntryFilter(source="light"))
        assert (len(done.dropped), done.silent, done.texts) == (0, ["disk"], 0)
        assert {line.source for line in admin.list_entries(EntryFilter(source="light"))} == {
            "/docs/Lighthouse.md"
        }
        done = admin.clear(lines, EntryFilter(source="light"))
        assert (len(done.dropped), done.silent, done.texts) == (2, [], 1)


def test_clear_of_a_tenant_whose_entries_are_gone_drops_the_texts_that_are_left(run, told, filled):
    with KVStore([DiskTier(filled, 10 * MB, lru)]) as store:
        store.clear(OURS[0].model)
    assert "Delete all texts of chunks that no tier stores" in run("rm", "--tenant", "acme").output
    done = told("rm", "--tenant", "acme", "--yes")
    assert (done["dropped"], done["texts"]) == (0, 2)
    assert (texts(filled, OURS[0].model), texts(filled, THEIRS[0].model)) == ([], ["Theirs."])


@pytest.mark.parametrize("command", [("pin",), ("pin", "--off"), ("rm", "--yes")])
def test_what_matches_nothing_is_told_with_a_status(run, told, filled, command):
    result = run(*command, "--source", "no such document")
    assert result.exit_code == 1
    assert "Nothing in the store matches" in result.output + result.stderr


def test_clear_asks_and_without_a_terminal_wants_yes(run, filled, environment):
    asked_in_vain = run("rm", "--all")
    assert asked_in_vain.exit_code == 1
    assert "Delete 6 entries" in asked_in_vain.output
    assert "--yes" in asked_in_vain.output
    for answer, is_gone in (("n", False), ("y", True)):
        status, said = on_a_terminal(environment, answer, "store", "rm", "--source", "ships")
        assert "Delete 1 entry" in said
        assert status == (0 if is_gone else 1)
        assert (OURS[1] in left(filled)) != is_gone


def on_a_terminal(environment, answer, *arguments) -> tuple[int, str]:
    """A command at a terminal where somebody answers its question."""
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())

    def work():
        os.environ.update(environment)
        sys.argv, sys.stdin = ["ragfuse", *arguments], os.fdopen(theirs)
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            try:
                app()
            except SystemExit as end:
                return end.code, said.getvalue()

    try:
        return asked(work)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("command", ["rm", "pin"])
def test_what_is_meant_must_be_said(run, filled, command):
    refused(run(command), "InputError", "Say what to", "--all")
    refused(run(command, "--all", "--source", "ships"), "InputError", "--all alone")
    assert len(left(filled)) == 6


def test_pins_are_kept_and_taken_off(told, filled):
    assert told("pin", "--source", "lighthouse")["pinned"] == 2
    assert {entry["key"] for entry in told("ls")["entries"] if entry["pinned"]} == {
        str(OURS[0]),
        str(FILLER),
    }
    assert told("ls")["tiers"][0]["pinned"] == 2
    assert told("pin", "--off", "--all") == {"unpinned": 2, "already": 4, "silent": []}
    assert not any(entry["pinned"] for entry in told("ls")["entries"])


def test_chunks_travel_to_another_store_in_a_file(told, run, filled, tmp_path):
    away = {"STORE": tmp_path / "other"}
    exported = told("export", "a.zip", "--tenant", "acme")
    assert (exported["entries"], exported["texts"], exported["failed"]) == (4, 2, 0)
    imported = told("import", "a.zip", **away)
    assert (imported["entries"], imported["texts"], imported["known"]) == (4, 2, 0)
    assert left(tmp_path / "other") == {*OURS, FILLER}
    assert texts(tmp_path / "other", OURS[0].model) == texts(filled, OURS[0].model)
    assert told("import", "a.zip", **away)["known"] == 4
    assert "4 entries and 2 texts" in run("import", "a.zip", STORE=tmp_path / "third").output


def test_an_export_without_texts_has_none_and_asks_before_it_replaces_a_file(told, run, filled):
    assert told("export", "a.zip", "--no-texts")["texts"] == 0
    assert b"Theirs." not in Path("a.zip").read_bytes()
    asked_in_vain = run("export", "a.zip")
    assert asked_in_vain.exit_code == 1
    assert "exists already" in asked_in_vain.output
    assert told("export", "a.zip", "--yes")["texts"] == 3


def test_an_archive_that_is_damaged_gives_what_is_whole_and_a_cut_one_is_refused(
    run, filled, tmp_path
):
    assert run("export", "a.zip").exit_code == 0
    data = Path("a.zip").read_bytes()
    Path("a.zip").write_bytes(data[:1500] + b"damage" + data[1506:])
    result = run("import", "a.zip", STORE=tmp_path / "other")
    assert result.exit_code == 1
    assert "left out" in result.output
    assert 0 < len(left(tmp_path / "other")) < 6
    Path("a.zip").write_bytes(data[: len(data) // 2])
    refused(run("import", "a.zip"), "StoreError", "Wanted a whole archive")
    refused(run("import", "b.zip"), "StoreError", "found none")
    refused(run("export", "no/such/folder/a.zip"), "StoreError", "cannot be written")


def test_gc_frees_rests_and_what_is_too_old_and_keeps_pins(told, filled):
    temp = files(filled)[0].parent / "x.0123456789abcdef.tmp"
    temp.write_bytes(bytes(50))
    os.utime(temp, (1.0, 1.0))
    # cleared away at opening
    assert told("gc")["tiers"]["disk"] == {"expired": 0, "leftovers": 1, "nbytes": 50}
    assert told("gc")["tiers"]["disk"] == {"expired": 0, "leftovers": 0, "nbytes": 0}
    assert not [path for path in files(filled) if path.suffix == ".tmp"]
    told("pin", "--source", "ships")
    assert told("gc", TTL_S="0.000001")["tiers"]["disk"]["expired"] == 5
    assert left(filled) == {OURS[1]}


# one readable line


def test_tiers_and_keys_that_are_none_are_named_with_those_there_are(run, filled):
    refused(run("ls", "--tier", "tape"), "StoreError", "no tier 'tape'", "it has: disk")
    refused(run("ls", "zzzz"), "InputError", "'zzzz' begins 0", "ragfuse store ls")
    refused(run("pin", ""), "InputError", "'' begins 0")
    assert OURS[0].tokens == THEIRS[0].tokens
    refused(
        run("rm", OURS[0].tokens[:12], "--yes"),
        "InputError",
        "begins 2",
        f"smol (tenant {hidden('acme')[:8]})",
        "--tenant",
    )
    assert len(left(filled)) == 6


def test_a_store_that_is_a_file_or_closed_or_has_no_tier(run, tmp_path):
    (tmp_path / "store").write_text("mine")
    for command in COMMANDS:
        refused(run(*command), "StoreError", "a file")
    assert (tmp_path / "store").read_text() == "mine"
    refused(run("ls", DISK_BYTES=0), "SettingsError", "disk_bytes")


def test_a_folder_without_permission_is_refused(tmp_path):
    (tmp_path / "store").mkdir(mode=0o500)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write everywhere
        result = CliRunner().invoke(app, ["store", "ls", "--store", str(tmp_path / "store")])
        return result.exit_code, result.stderr

    status, said = asked(work)
    assert status == 1
    assert "permission" in said.lower()


def test_no_command_loads_or_even_imports_a_model(environment, filled):
    code = (
        "import sys; sys.argv = ['ragfuse', 'store', 'ls']\n"
        "from ragfuse.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'transformers', 'peft', 'langchain_core'} & set(sys.modules)))"
    )
    everything = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=everything, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# what stands behind the commands


def test_the_settings_ttl_is_the_store_s(tmp_path):
    settings = Settings(store=tmp_path / "kv", memory_bytes=MB, disk_bytes=MB, ttl_s=50.0)
    now = [1e9]
    with open_kept(settings, clock=lambda: now[0]) as store:
        entry = next(iter(store.entries()), None)
        assert entry is None
        store.put(OURS[0], kv(), wait=True)
        when = store.entries()[0].last_used
        assert list(store.expired(store.entries(), when + 49)) == []
        assert list(store.expired(store.entries(), when + 51)) == [OURS[0], OURS[0]]
        assert store.report_every_s < 50.0 / 4
    with open_kept(settings.model_copy(update={"ttl_s": None})) as store:
        assert store.expired is None


def test_a_bad_byte_in_the_book_costs_no_listing(filled):
    with CatalogFile(filled) as book:
        book.add_texts(OURS[0].model, [("no key at all", "A text.", "somewhere")])
    with StoreAdmin(Settings(store=filled, home=filled.parent)) as admin:
        lines = admin.list_entries()
        assert {line.entry.key for line in lines} == {*OURS, FILLER, *THEIRS}
        assert "somewhere" not in {line.source for line in lines}
        assert admin.clear(lines, EntryFilter()).texts == 4


def test_what_an_engine_has_kept_is_listed_with_source_and_text(engine, tiny_settings):
    passage = (
        "The keeper of the lighthouse counted all ships, and wrote every name into a book. " * 2
    )
    engine.ingest([(passage, "/docs/a.txt"), (passage.upper(), "/docs/b.txt")])
    engine.close()
    with StoreAdmin(tiny_settings) as admin:
        lines = admin.list_entries()
        assert [line.entry.key.encoded for line in lines] == ["filler", "filler"]
        assert {(line.source, line.text[:10]) for line in lines} == {
            ("/docs/a.txt", "The keeper"),
            ("/docs/b.txt", "THE KEEPER"),
        }
        assert len(admin.list_entries(EntryFilter(source="b.txt"))) == 1


def test_ls_says_what_each_tenant_keeps_in_all(run, told, filled):
    uses = {use["digest"]: use for use in told("ls")["tenants"]}
    mine = uses[OURS[0].model]
    assert (mine["model"], mine["texts"], mine["sessions"]) == (
        "smol",
        len(texts(filled, OURS[0].model)),
        0,
    )
    assert mine["nbytes"] == {
        "disk": sum(each["nbytes"] for each in told("ls")["entries"] if each["model"] == "smol")
    }
    assert set(uses) == {OURS[0].model, THEIRS[0].model}
    assert f"KB in disk, {mine['texts']} texts, 0 sessions" in " ".join(run("ls").output.split())
    assert [use["digest"] for use in told("ls", "--model", "smol")["tenants"]] == [OURS[0].model]
