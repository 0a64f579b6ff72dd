"""The index: what is new is embedded, what is gone leaves, and an interrupted or damaged one harms
nobody.
"""

import pytest
from rich.console import Console

from ragfuse.cli import library as module
from ragfuse.cli.ingest import split_documents
from ragfuse.errors import InputError, SettingsError


@pytest.fixture
def embedded(library, monkeypatch):
    """The texts that are embedded."""
    texts, own = list[str](), type(library().embeddings).embed_documents

    def embed(self, given):
        texts.extend(given)
        return own(self, given)

    monkeypatch.setattr(type(library().embeddings), "embed_documents", embed)
    return texts


def chunks(*names, n=3):
    return [
        (f"The keeper of lighthouse {name} counted ships on day {day}.", name)
        for name in names
        for day in range(n)
    ]


def test_a_document_is_cut_into_chunks_that_are_found_by_what_they_mean(library, book, engine):
    lib, tokenizer, file = library(), engine.model.tokenizer, book / "lighthouses.txt"
    chunks, _ = split_documents([file], lib.settings, tokenizer, Console(quiet=True))
    texts = [text for text, _ in chunks]
    assert len(texts) >= 20
    assert all(len(tokenizer.tokenize(text)) <= 160 and text == text.strip() for text in texts)
    assert "".join("".join(texts).split()) == "".join(file.read_text().split())
    lib.update([book], chunks)
    assert any("1817" in text for text, _ in lib.search("What happened in the year 1817?"))


def test_what_is_known_is_not_embedded_again_and_what_is_gone_leaves(library, embedded, tmp_path):
    a, b, c = (str(tmp_path / "docs" / name) for name in "abc")
    library().update([tmp_path / "docs"], chunks(a, b))
    assert sorted(embedded) == sorted(text for text, _ in chunks(a, b))
    embedded.clear()
    library().update([tmp_path / "docs"], [*chunks(a, n=2), *chunks(c)])
    assert embedded == [text for text, _ in chunks(c)]
    assert sorted(library().chunks()) == sorted([*chunks(a, n=2), *chunks(c)])
    library().update([tmp_path / "other"], [])
    assert library().sources() == {a: 2, c: 3}
    library().update([tmp_path / "docs" / "a"], [])
    assert {source for _, source in library().search("Who counted?")} == {c}


def test_an_interrupted_update_keeps_what_was_embedded(library, embedded, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNKS_A_BATCH", 2)
    name = str(tmp_path / "a")

    def stopped():
        yield from chunks(name, n=4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library().update([tmp_path], stopped())
    assert library().sources() == {name: 4}
    embedded.clear()
    library().update([tmp_path], chunks(name, n=5))
    assert len(embedded) == 1


def test_vectors_of_another_embedder_are_not_mixed_in(library, tmp_path):
    library().update([tmp_path], chunks(str(tmp_path / "a")))
    with pytest.raises(InputError, match="embedder 'minilm-l6'"):
        library(embedder="another").sources()


def test_a_damaged_index_says_what_to_do(library, tmp_path):
    lib = library()
    lib.update([tmp_path], chunks(str(tmp_path / "a")))
    lib.file.write_bytes(lib.file.read_bytes()[:-7])
    with pytest.raises(InputError, match="index"):
        lib.sources()


def test_an_index_that_cannot_be_written_is_refused(library, tmp_path):
    (tmp_path / "indexes").write_text("a file")
    with pytest.raises(SettingsError, match="set RAGFUSE_HOME"):
        library().update([tmp_path], chunks(str(tmp_path / "a")))
