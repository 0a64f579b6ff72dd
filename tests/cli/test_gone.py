"""Documents that leave an index: gone from their folder, or named. What others hold stays, as does the unreadable."""

import contextlib
import errno
import json
import os
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragfuse.cli import ingest as module
from ragfuse.cli.files import find_files, is_gone, mount_of
from ragfuse.cli.gone import absent
from ragfuse.cli.library import Library, Origin
from ragfuse.cli.main import app
from ragfuse.cli.show import listed, names_of

WALNUTS = "Walnuts are harvested in October, when the village holds a fair for them."
MAYOR = "The mayor of the village is called Ada, and she has counted all the votes herself."

HERE = Origin(mount="/")


@pytest.fixture
def run(tiny_settings, tmp_path):
    """Runs a command over the tiny model in a home of its own."""
    ours = {"HOME": tmp_path / "user", "MODEL": tiny_settings.model, "DTYPE": "float32", "MAX_TOKENS": 6, "TOP_K": 2}
    ours |= {"LEARN": "retrieved"}
    environment = {f"RAGFUSE_{name}": str(value) for name, value in ours.items()}

    def run(*arguments, lines=()):
        typed = "".join(f"{line}\n" for line in lines)
        result = CliRunner().invoke(app, [*map(str, arguments)], input=typed, env=environment)
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def told(run):
    """What a command says as JSON."""

    def told(*arguments):
        result = run(*arguments, "--json", "-")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return told


@pytest.fixture
def village(tmp_path):
    """A folder of two documents, one of them in a folder of its own."""
    folder = tmp_path / "village"
    (folder / "trees").mkdir(parents=True)
    (folder / "mayor.txt").write_text(MAYOR)
    (folder / "trees" / "walnuts.txt").write_text(WALNUTS)
    return folder


@pytest.fixture
def unreadable(monkeypatch):
    """Makes a folder one that cannot be listed, as it is for other users than root."""

    def make(folder, number=errno.EACCES):
        real = os.scandir

        def scandir(path="."):
            if Path(path) == folder:
                raise OSError(number, os.strerror(number), str(folder))
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)

    return make


def names(paths):
    return [Path(path).name for path in paths]


def kept(told, name):
    """Sources of the store's entries of a document."""
    return {entry["source"] for entry in told("store", "ls", "--source", name)["entries"]}


def test_a_file_that_is_gone_is_forgotten_with_its_kv_when_its_folder_is_ingested_again(run, told, village):
    run("ingest", village)
    assert kept(told, "mayor")
    (village / "mayor.txt").unlink()
    result = run("ingest", village)
    assert "forgotten: mayor.txt (1 chunk, " in result.stdout
    assert "1 chunk of 1 file in 'default'; it was stored already." in result.stdout
    assert not kept(told, "mayor")
    assert kept(told, "walnuts")
    answer = told("ask", "Who is the mayor of the village?")
    assert names(s["source"] for s in answer["trace"]["segments"] if s["kind"] == "chunk") == ["walnuts.txt"]
    assert told("ingest", village)["forgotten"] == []


def test_a_file_with_another_name_is_moved_and_keeps_its_vectors_and_its_kv(told, run, village, monkeypatch):
    told("ingest", village)
    (village / "mayor.txt").rename(village / "trees" / "ada.txt")
    with monkeypatch.context() as patched:
        patched.setattr(Library, "embeddings", None)  # whoever embeds now fails
        again = told("ingest", village)
    assert (again["moved"], again["forgotten"], again["encoded"]) == (
        {str(village / "mayor.txt"): str(village / "trees" / "ada.txt")},
        [],
        0,
    )
    assert names(kept(told, "ada")) == ["ada.txt"]
    assert not kept(told, "mayor")
    (village / "trees").rename(village / "wood")
    result = run("ingest", village)
    assert "2 files, all in the index already." in result.stdout
    assert "moved: trees/ada.txt is now wood/ada.txt, trees/walnuts.txt is now wood/walnuts.txt (2 chunks)" in (
        result.stdout
    )
    (village / "wood" / "ada.txt").unlink()
    assert names(told("ingest", village)["forgotten"]) == ["ada.txt"]
    assert not kept(told, "ada")


def test_a_folder_with_another_name_is_moved_when_it_is_ingested_by_that_name(told, village):
    told("ingest", village / "trees")
    (village / "trees").rename(village / "wood")
    again = told("ingest", village / "wood")
    assert (names(again["moved"].values()), again["forgotten"]) == (["walnuts.txt"], [])
    assert list(again["moved"]) == [str(village / "trees" / "walnuts.txt")]
    assert names(kept(told, "walnuts")) == ["walnuts.txt"]


def test_a_file_that_is_gone_is_forgotten_though_a_copy_of_it_was_there_before(told, village):
    (village / "copy.txt").write_text(MAYOR)
    told("ingest", village)
    (village / "mayor.txt").unlink()
    again = told("ingest", village)
    assert (again["moved"], names(again["forgotten"])) == ({}, ["mayor.txt"])


def test_a_file_that_was_changed_and_renamed_is_another_one(told, village):
    told("ingest", village)
    (village / "mayor.txt").rename(village / "ada.txt")
    (village / "ada.txt").write_text(f"{MAYOR} She has a cat, too, which sleeps on the ballots.")
    again = told("ingest", village)
    assert (again["moved"], names(again["forgotten"]), again["encoded"]) == ({}, ["mayor.txt"], 1)


def test_without_kv_a_renamed_document_keeps_its_kv_too(told, village):
    told("ingest", village)
    (village / "mayor.txt").rename(village / "ada.txt")
    told("ingest", village, "--no-kv")
    assert names(kept(told, "ada")) == ["ada.txt"]


def test_a_folder_that_was_deleted_is_forgotten_and_other_folders_are_not(told, run, village, book):
    told("ingest", village, book)
    (village / "trees" / "walnuts.txt").unlink()
    (village / "trees").rmdir()
    result = run("ingest", village)
    assert "forgotten: walnuts.txt" in result.stdout
    assert "1 chunk of 1 file; " in result.stdout
    assert " of 2 files in 'default' in all; it was stored already." in result.stdout
    assert kept(told, "lighthouses")


def test_what_is_left_out_now_is_forgotten(told, village):
    told("ingest", village)
    (village / "mayor.txt").write_bytes(b"\0\1\2")
    (village / "trees" / "walnuts.txt").rename(village / "trees" / ".walnuts.txt")
    (village / "other.txt").write_text("Another document, which is long enough to be one.")
    assert sorted(names(told("ingest", village)["forgotten"])) == ["mayor.txt", "walnuts.txt"]


def test_a_folder_that_cannot_be_read_is_named_and_keeps_its_documents(told, run, village, unreadable):
    told("ingest", village)
    unreadable(village / "trees")
    result = run("ingest", village)
    assert "left out: trees/: cannot be read (Permission denied)" in result.stdout
    assert "kept in the index: walnuts.txt: cannot be read now" in result.stdout
    assert "1 folder left out, see above; all else was read." in result.stdout
    assert kept(told, "walnuts")


def test_a_folder_in_another_one_that_was_emptied_is_forgotten(told, run, village):
    told("ingest", village)
    (village / "trees" / "walnuts.txt").unlink()
    assert "forgotten: walnuts.txt (1 chunk, " in run("ingest", village).stdout
    assert not kept(told, "walnuts")


@pytest.mark.parametrize("beside", [False, True])
def test_a_folder_that_was_emptied_is_forgotten_alone_and_beside_others(told, run, village, book, beside):
    told("ingest", village / "trees")
    (village / "trees" / "walnuts.txt").unlink()
    paths = [village / "trees", *([book] if beside else [])]
    result = run("ingest", *paths)
    assert result.exit_code == 0, result.output
    assert "forgotten: walnuts.txt (1 chunk, " in result.stdout
    assert not kept(told, "walnuts")
    again = run("ingest", *paths)
    assert "forgotten" not in again.output
    assert again.exit_code == (0 if beside else 1)
    assert beside or "found none: no file" in again.stderr


def test_a_folder_that_is_not_there_itself_says_what_the_index_has_from_there(told, run, village):
    told("ingest", village)
    village.rename(village.parent / "town")
    result = run("ingest", village)
    assert result.exit_code == 1
    assert "found nothing at" in result.stderr
    assert f"stay there; to forget: ragfuse ingest --remove {village}" in result.stderr
    assert kept(told, "mayor")


def test_a_path_with_a_space_is_quoted_in_the_command_that_is_told(told, run, village):
    spaced = village.rename(village.parent / "our village")
    told("ingest", spaced)
    spaced.rename(village.parent / "town")
    command = run("ingest", spaced).stderr.rstrip().partition("to forget: ragfuse ")[2]
    assert shlex.split(command) == ["ingest", "--remove", str(spaced)]
    assert len(told(*shlex.split(command))["forgotten"]) == 2


def test_a_folder_where_no_document_is_left_is_forgotten_without_a_model(told, run, village, monkeypatch):
    told("ingest", village)
    (village / "mayor.txt").write_bytes(b"\0\1\2")
    (village / "trees" / "walnuts.txt").unlink()
    monkeypatch.setattr(module, "loaded_engine", None)
    result = told("ingest", village)
    assert sorted(names(result["forgotten"])) == ["mayor.txt", "walnuts.txt"]
    assert (result["files"], result["chunks"], result["encoded"], result["moved"]) == (0, 0, 0, {})
    assert [why for _, why in result["skipped"]] == ["binary, not text"]
    assert not kept(told, "mayor")


def test_an_interrupted_ingest_of_a_folder_that_was_emptied_is_over(library, told, village):
    told("ingest", village / "trees")
    lib = Library(library().settings.model_copy(update={"home": village.parent / "user"}))
    with contextlib.suppress(KeyboardInterrupt), lib.ingesting([village / "trees"], [village / "trees" / "new.txt"]):
        raise KeyboardInterrupt
    (village / "trees" / "walnuts.txt").unlink()
    assert lib.warnings()
    told("ingest", village / "trees")
    assert not lib.warnings()


@pytest.mark.parametrize("beside", [False, True])
def test_what_lay_on_a_drive_that_is_not_mounted_is_kept(told, run, village, book, beside, monkeypatch):
    drive, is_mount = village / "trees", os.path.ismount
    with monkeypatch.context() as mounted:
        mounted.setattr(os.path, "ismount", lambda path: Path(path) == drive or is_mount(path))
        told("ingest", drive, "--index", "places")
    (drive / "walnuts.txt").unlink()
    result = run("ingest", drive, *([book] if beside else []), "--index", "places")
    assert "forgotten" not in result.output
    command = f"ragfuse ingest --remove {drive} --index places"
    if beside:
        assert "kept in the index: walnuts.txt: the drive that it was on may not be mounted now." in result.stdout
        assert f"To forget it: {command}" in result.stdout
    else:
        assert result.exit_code == 1
        assert f"walnuts.txt of the index 'places' stay there; to forget: {command}" in result.stderr
    assert kept(told, "walnuts")
    assert names(told("ingest", "--remove", drive, "--index", "places")["forgotten"]) == ["walnuts.txt"]


def test_a_chat_forgets_a_folder_that_was_emptied(told, run, village):
    told("ingest", village / "trees")
    (village / "trees" / "walnuts.txt").unlink()
    result = run("chat", lines=[f"/docs add {village / 'trees'}", "/docs"])
    assert result.exit_code == 0, result.output
    assert "forgotten: walnuts.txt (1 chunk, " in result.stdout
    assert not kept(told, "walnuts")


def test_what_another_document_or_another_index_holds_keeps_its_kv(told, village):
    (village / "copy.txt").write_text(MAYOR)
    told("ingest", village)
    told("ingest", village / "trees", "--index", "trees")
    told("ingest", "--remove", "mayor.txt")
    assert names(kept(told, "copy")) == ["copy.txt"]
    told("ingest", "--remove", "walnuts.txt")
    assert names(kept(told, "walnuts")) == ["walnuts.txt"]
    told("ingest", "--remove", "walnuts.txt", "--index", "trees")
    told("ingest", "--remove", "copy.txt")
    assert not kept(told, "walnuts")
    assert not kept(told, "copy")


FORGE = "The forge of the village has been cold since the smith moved to the town in spring."


def test_the_kv_of_what_a_changed_file_no_longer_holds_goes(run, told, village):
    run("ingest", village)
    (old,) = told("store", "ls", "--source", "mayor")["entries"]
    (village / "mayor.txt").write_text(FORGE)
    result = run("ingest", village)
    assert "forgotten of what changed: mayor.txt (1 old chunk, " in result.stdout
    (new,) = told("store", "ls", "--source", "mayor")["entries"]
    assert new["key"] != old["key"]
    assert kept(told, "walnuts")
    assert "forgotten" not in run("ingest", village).stdout


def test_what_another_document_or_index_holds_of_a_changed_file_keeps_its_kv(told, village):
    (village / "copy.txt").write_text(MAYOR)
    told("ingest", village)
    told("ingest", village / "trees", "--index", "trees")
    before = {entry["key"] for entry in told("store", "ls")["entries"]}
    (village / "mayor.txt").write_text(FORGE)
    (village / "trees" / "walnuts.txt").write_text(f"{FORGE} There are walnuts in it now.")
    told("ingest", village)
    after = {entry["key"]: entry["sources"] for entry in told("store", "ls")["entries"]}
    assert before <= after.keys()
    assert all(names(sources) != ["mayor.txt", "copy.txt"] for sources in after.values())
    told("ingest", village / "trees", "--index", "trees")
    assert not before <= {entry["key"] for entry in told("store", "ls")["entries"]}


def test_a_changed_size_of_chunks_forgets_no_kv(told, village):
    told("ingest", village)
    before = {entry["key"] for entry in told("store", "ls")["entries"]}
    told("ingest", village, "--chunk-tokens", "16")
    assert before <= {entry["key"] for entry in told("store", "ls")["entries"]}


def test_a_document_is_removed_by_name_without_a_model(run, told, village, monkeypatch):
    told("ingest", village)
    monkeypatch.setattr(module, "loaded_engine", None)
    result = run("ingest", "--remove", "trees/walnuts.txt")
    assert result.exit_code == 0, result.output
    assert "forgotten: walnuts.txt (1 chunk, " in result.stdout
    assert "1 chunk of 1 file in 'default' now." in result.stdout
    assert not kept(told, "walnuts")


def test_other_indexes_that_hold_a_removed_document_are_named(run, told, village):
    told("ingest", village)
    told("ask", "Who counted the votes?", "--docs", village)
    result = run("ingest", "--remove", "walnuts.txt")
    named = next(line for line in result.stdout.splitlines() if line.startswith("the index 'docs-"))
    assert "', which --docs made, holds walnuts.txt too" in named
    command = named.partition("to forget: ragfuse ")[2].split()
    assert command[:2] == ["ingest", "--remove"]
    assert kept(told, "walnuts")
    assert "the index" not in run(*command).stdout
    assert not kept(told, "walnuts")


def test_conversations_that_hold_text_of_a_removed_document_are_named(run, told, village):
    told("ingest", village)
    for name in ("first", "second talk"):
        told("ask", "Who is the mayor of the village, and who counted walnuts?", "--session", name)
    told("ask", "Hello", "--session", "third", "--docs", village / "trees" / "walnuts.txt")
    entries = {entry["key"] for entry in told("store", "ls")["entries"]}
    said = run("ingest", "--remove", "mayor.txt").stdout
    assert (
        "2 conversations hold text of it still, with its KV: second talk, first; "
        "to delete: ragfuse sessions rm 'second talk' first\n"
    ) in said
    assert MAYOR in run("sessions", "show", "first").stdout
    assert entries & {entry["key"] for entry in told("store", "ls")["entries"]}
    told("sessions", "rm", "second talk", "first", "--yes")
    (village / "mayor.txt").unlink()
    assert told("ingest", "--remove", "walnuts.txt")["sessions"] == ["third"]


def test_a_conversation_that_holds_text_of_a_file_that_is_gone_is_named(run, told, village):
    told("ingest", village)
    told("ask", "Who is the mayor of the village?", "--session", "talk")
    (village / "mayor.txt").unlink()
    assert "1 conversation holds text of it still, with its KV: talk; to delete" in run("ingest", village).stdout


def test_a_name_that_fits_none_or_several_documents_is_told(run, village):
    (village / "trees" / "mayor.txt").write_text("A mayor among trees, which is another document.")
    run("ingest", village, "--no-kv")
    several = run("ingest", "--remove", "mayor.txt")
    assert several.exit_code == 1
    assert "may be village/mayor.txt, trees/mayor.txt" in several.stderr
    assert "found none named 'walnut.txt'. Did you mean walnuts.txt?" in run("ingest", "--remove", "walnut.txt").stderr
    assert "found none named ''" in run("ingest", "--remove", "").stderr


@pytest.mark.parametrize("arguments", [(), (".", "--remove", "x")])
def test_an_ingest_takes_either_paths_or_names_to_remove(run, arguments):
    result = run("ingest", *arguments)
    assert result.exit_code == 2
    assert "either files and folders" in " ".join(result.stderr.replace("│", " ").split())


def test_the_index_of_docs_forgets_the_kv_of_what_is_gone_too(told, village):
    told("ask", "Who?", "--docs", village)
    assert kept(told, "mayor")
    (village / "mayor.txt").unlink()
    told("ask", "Who?", "--docs", village)
    assert not kept(told, "mayor")


def test_a_chat_forgets_a_document(run, told, village):
    run("ingest", village)
    told("ask", "Who is the mayor of the village?", "--session", "before")
    lines = ["Who is the mayor?", "/docs remove mayor.txt", "/docs", "Who is the mayor?", "/docs remove mayor.txt"]
    result = run("chat", lines=lines)
    assert "forgotten: mayor.txt (1 chunk, " in result.stdout
    assert "1 conversation holds text of it still, with its KV: before; to delete" in result.stdout
    assert "found none named 'mayor.txt'. It has: walnuts.txt." in result.stdout
    assert "From walnuts.txt." in result.stderr
    assert not kept(told, "mayor")


def test_a_document_that_became_unreadable_keeps_what_was_read_of_it(run, village):
    (village / "data.json").write_text('{"text": "A document of data, which is long enough to be one."}')
    run("ingest", village, "--no-kv")
    (village / "data.json").write_text('{"text": ')
    result = run("ingest", village, "--no-kv")
    assert "What was read of it before stays in the index." in result.stdout
    assert "2 chunks of 2 files; 3 chunks of 3 files in 'default' in all, without KV." in result.stdout


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_nothing_is_gone_from_a_folder_that_fails(village, unreadable, number):
    source = str((village / "trees" / "walnuts.txt").resolve())
    (village / "trees" / "walnuts.txt").unlink()
    (village / "trees" / "notes.txt").write_text("Some notes, so that it is not empty.")
    assert absent({source: HERE}, [village], find_files([village])).gone == (source,)
    unreadable(village / "trees", number)
    found = absent({source: HERE}, [village], find_files([village]))
    assert (found.gone, found.unread) == ((), (source,))


def test_a_hidden_file_that_was_ingested_by_its_own_path_stays(village):
    hidden = village / ".hidden.txt"
    hidden.write_text("hidden")
    found = absent({str(hidden.resolve()): HERE}, [village], find_files([village]))
    assert found == absent({}, [village], find_files([village]))


def test_what_a_link_led_to_is_kept_where_the_link_leads_nowhere_now(village, tmp_path):
    away = tmp_path / "away.txt"
    away.write_text("What lay elsewhere.")
    (village / "link.txt").symlink_to(away)
    source = str(away.resolve())
    assert source in {str(file.resolve()) for file in find_files([village]).files}
    away.unlink()
    found = find_files([village])
    assert [path.name for path, _ in found.skipped] == ["link.txt"]
    assert absent({source: HERE}, [village], found) == absent({}, [village], found)


def test_a_file_that_is_named_and_left_out_now_is_gone(village):
    mayor, walnuts = village / "mayor.txt", village / "trees" / "walnuts.txt"
    mayor.write_text("")
    sources = {str(mayor.resolve()): HERE, str(walnuts.resolve()): HERE}
    found = absent(sources, [mayor, walnuts], find_files([mayor, walnuts]))
    assert found.gone == (str(mayor.resolve()),)


@pytest.mark.parametrize(
    ("mount", "gone"),
    [("", ["b.txt", "none/b.txt"]), ("/", ["b.txt", "empty/b.txt", "none/b.txt"]), ("/no/such/drive", [])],
)
def test_a_file_is_gone_only_where_its_folder_is_there_and_its_drive_is_mounted(tmp_path, mount, gone):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("a")
    files = ("a.txt", "b.txt", "empty/b.txt", "none/b.txt")
    assert [name for name in files if is_gone(tmp_path / name, mount)] == gone


def test_the_mount_of_a_file_is_that_of_the_nearest_folder_above_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in (Path("/"), tmp_path, tmp_path / "drive"))
    assert mount_of(tmp_path / "drive" / "trees" / "a.txt") == str(tmp_path / "drive")
    assert mount_of(tmp_path / "other" / "a.txt") == str(tmp_path)


def test_names_are_told_with_their_folder_where_two_are_the_same():
    assert names_of(["/x/a.txt", "/y/a.txt", "/x/b\x1b.txt", "", "/x/a.txt"]) == ["x/a.txt", "y/a.txt", "b .txt"]
    assert listed(f"/x/{number}.txt" for number in range(7)) == "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more"
