"""What the line of an ingest says of the chunks that were not encoded."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from ragfuse import Settings
from ragfuse.cli.ingest import _encoded_in_words, split_documents
from ragfuse.errors import InputError
from ragfuse.types.ingested import Ingested


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (
            Ingested(18, 6, 900, 2_000_000, 1.24),
            "6 encoded now (900 tokens, 2.0 MB, 1.2 s), the other 12 were stored already",
        ),
        (
            Ingested(18, 6, 900, 2_000_000, 1.24, short=11),
            "6 encoded now (900 tokens, 2.0 MB, 1.2 s), the other 1 was stored already, 11 are too short to be stored",
        ),
        (Ingested(3, 3, 9, 1_000, 1), "3 encoded now (9 tokens, 1.0 KB, 1.0 s)"),
        (Ingested(3), "all were stored already"),
        (Ingested(1), "it was stored already"),
        (Ingested(3, short=1), "2 were stored already, 1 is too short to be stored"),
        (
            Ingested(114, 110, 900, 2_000_000, 1.24, short=2, repeated=2),
            "110 encoded now (900 tokens, 2.0 MB, 1.2 s), 2 have the text of another, 2 are too short to be stored",
        ),
        (
            Ingested(20, 6, 900, 2_000_000, 1.24, repeated=1, elsewhere=4),
            "6 encoded now (900 tokens, 2.0 MB, 1.2 s), the other 9 were stored already, "
            "4 were stored meanwhile by a worker that died or by another run, 1 has the text of another",
        ),
        (Ingested(3, unsaved=3), "none had to be encoded now"),
        (Ingested(), "none had to be encoded now"),
    ],
)
def test_it_says_what_became_of_each(done, said):
    assert _encoded_in_words(done) == said


def test_files_in_an_old_encoding_are_named_once_for_all(tmp_path, capsys):
    files = [tmp_path / f"{number}.txt" for number in range(7)]
    for file in files:
        file.write_bytes("Müller's café.".encode("utf-8" if file.name == "0.txt" else "cp1252"))
    split_documents(files, Settings(), SimpleNamespace(tokenize=str.split), Console())
    lines = [line for line in capsys.readouterr().out.splitlines() if "read as" in line]
    assert lines == [
        "read as Windows-1252: 1.txt, 2.txt, 3.txt, 4.txt, 5.txt and 1 more: not valid UTF-8; convert what is in "
        "another encoding"
    ]


def test_what_is_split_leaves_out_what_cannot_be_read_until_nothing_is_left(tmp_path, capsys):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.json"
    good.write_text("Some words.")
    bad.write_text("{bad")
    tokenizer, console = SimpleNamespace(tokenize=str.split), Console()
    assert split_documents([bad, good], Settings(), tokenizer, console) == [(str(good), ["Some words."])]
    assert "left out: '" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"found none in 1 file; the lines above say why\. Mend these"):
        split_documents([bad], Settings(), tokenizer, console)
