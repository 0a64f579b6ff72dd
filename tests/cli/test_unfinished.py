"""An index that an interrupted ingest has left in part says so to whoever asks it, until an ingest ends."""

import shlex

import pytest
from typer.testing import CliRunner

from ragfuse.cli.main import app


@pytest.fixture
def three(tmp_path):
    """A folder of three documents."""
    folder = tmp_path / "three"
    folder.mkdir()
    for name in ("one", "two", "three"):
        (folder / f"{name}.txt").write_text(f"The document {name} has one sentence, which is long enough to be found.")
    return folder


def stop_in_the_middle(library, paths, files, tokenizer):
    with library.ingesting(paths, files):
        library.add(files[0], tokenizer)
        raise KeyboardInterrupt


@pytest.fixture
def interrupted(library, three, engine):
    """An index that has one of three documents, as its ingest was interrupted."""
    made = library("places")
    files = [three / "one.txt", three / "two.txt", three / "three.txt"]
    with pytest.raises(KeyboardInterrupt):
        stop_in_the_middle(made, [three], files, engine.model.tokenizer)
    return made


def test_it_says_how_much_is_there_and_what_to_do(interrupted, three):
    (told,) = interrupted.warnings()
    assert told == (
        "The ingest of 'three' was interrupted, or goes on elsewhere; 1 of 3 files is in the index 'places'. "
        f"To have all: ragfuse ingest {three} --index places"
    )


def test_a_path_with_a_space_is_quoted_in_what_to_do(library, tmp_path, engine):
    file = tmp_path / "two words" / "it's one.txt"
    file.parent.mkdir()
    file.write_text("A document in a folder whose name has two words.")
    made = library("places")
    with pytest.raises(KeyboardInterrupt):
        stop_in_the_middle(made, [file], [file], engine.model.tokenizer)
    (told,) = made.warnings()
    command = shlex.split(told.partition("To have all: ")[2])
    assert command == ["ragfuse", "ingest", str(file), "--index", "places"]


def test_an_ingest_that_ends_has_all(interrupted, three, engine):
    files = sorted(three.iterdir())
    with interrupted.ingesting([three.parent], files):
        assert len(interrupted.warnings()) == 2
        for file in files:
            interrupted.add(file, engine.model.tokenizer)
    assert interrupted.warnings() == []


def test_the_end_of_another_ingest_changes_nothing(interrupted, book, engine):
    with interrupted.ingesting([book], list(book.iterdir())):
        interrupted.add(book / "lighthouses.txt", engine.model.tokenizer)
    assert len(interrupted.warnings()) == 1


def test_documents_that_are_gone_or_removed_are_not_waited_for(interrupted, three, book):
    (three / "two.txt").unlink()
    interrupted.remove([str((three / f"{name}.txt").resolve()) for name in ("one", "three")])
    assert interrupted.warnings() == []


def test_a_document_of_which_a_part_is_missing_does_not_count(interrupted, three, engine):
    (path,) = interrupted.folder.glob("*.json")
    path.write_text(path.read_text().replace('"parts": 1', '"parts": 2'))
    assert "; 0 of 3 files are in" in interrupted.warnings()[0]


def test_a_damaged_note_says_nothing(interrupted):
    (note,) = interrupted.folder.glob("*.unfinished")
    note.write_text("{")
    assert interrupted.warnings() == []


def test_questions_and_chats_say_so(interrupted, tiny_settings):
    settings = {"HOME": tiny_settings.home, "MODEL": tiny_settings.model, "DTYPE": "float32", "MAX_TOKENS": 4}
    environment = {f"RAGFUSE_{name}": str(value) for name, value in settings.items()}
    for command in (("ask", "Who?"), ("chat",), ("explain", "Who?")):
        result = CliRunner().invoke(app, [*command, "--index", "places"], input="", env=environment)
        assert result.exit_code == 0, result.output
        assert "was interrupted" in result.stderr
        assert "was interrupted" not in result.stdout
