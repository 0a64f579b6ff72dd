"""The index: files in parts, replaced, resumed, and half-written or damaged parts that harm nobody."""

import json
import threading

import pytest

from ragfuse.cli import library as module
from ragfuse.errors import InputError, SettingsError


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_CHUNKS", 4)


@pytest.fixture
def tokenizer(engine):
    return engine.model.tokenizer


def names(library):
    return sorted(path.name for path in library.folder.iterdir())


def test_a_document_is_cut_into_chunks_that_are_found_by_what_they_mean(library, book, tokenizer):
    lib, seen = library(), []
    chunks = lib.add(book / "lighthouses.txt", tokenizer, seen.append)
    assert len(chunks) >= 20
    assert {source for _, source in chunks} == {str((book / "lighthouses.txt").resolve())}
    assert all(len(tokenizer.tokenize(text)) <= 160 and text == text.strip() for text, _ in chunks)
    assert "".join("".join(text for text, _ in chunks).split()) == "".join(
        (book / "lighthouses.txt").read_text().split()
    )
    found = lib.vector_store().similarity_search("What happened in the year 1817?", k=3)
    assert any("1817" in document.page_content for document in found)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_file_that_is_known_is_not_embedded_again(library, book, tokenizer):
    first = library().add(book / "lighthouses.txt", tokenizer)
    again = library()
    again._embeddings = None  # whoever embeds now loads a model
    assert again.add(book / "lighthouses.txt", tokenizer) == first
    assert again._embeddings is None


def test_a_file_that_is_known_by_another_name_is_not_embedded_again(library, book, tokenizer):
    file, copy = book / "lighthouses.txt", book / "copy.txt"
    first = library().add(file, tokenizer)
    copy.write_bytes(file.read_bytes())
    again = library()
    again._embeddings = None  # whoever embeds now loads a model
    assert again.new_of([file, copy]) == []
    assert again.add(copy, tokenizer) == [(text, str(copy.resolve())) for text, _ in first]
    assert again._embeddings is None
    assert len(set(again.origins().values())) == 1
    vectors = {source: [p.vectors() for p in again._parts() if p.source == source] for source in again.sources()}
    assert all((a == b).all() for a, b in zip(*vectors.values(), strict=True))


def test_a_file_that_is_read_or_cut_otherwise_is_another_document(library, book, tokenizer):
    file, page = book / "lighthouses.txt", book / "lighthouses.html"
    page.write_bytes(file.read_bytes())
    library().add(file, tokenizer)
    assert library().new_of([file, page]) == [page]
    assert library(chunk_tokens=80).new_of([file]) == [file]


def test_what_an_earlier_version_wrote_is_kept_and_gets_what_is_known_of_its_file(library, book, tokenizer):
    lib, file = library(), book / "lighthouses.txt"
    lib.add(file, tokenizer)
    for part in lib.folder.glob("*.json"):
        data = json.loads(part.read_text())
        assert data.pop("content")
        assert data.pop("mount")
        part.write_text(json.dumps(data))
    assert lib.origins() == {str(file.resolve()): module.Origin()}
    assert lib.new_of([file]) == []
    lib.add(file, tokenizer)
    assert lib.origins() == {str(file.resolve()): module.Origin.of(file, file.read_bytes())}


def test_a_changed_file_replaces_what_it_was(library, book, tokenizer):
    lib, file = library(), book / "lighthouses.txt"
    lib.add(file, tokenizer)
    file.write_text("Nothing is left of the lighthouses but one sentence, which is long enough.")
    chunks = lib.add(file, tokenizer)
    assert len(names(lib)) == 2
    found = lib.vector_store().similarity_search("lighthouse", k=9)
    assert [document.page_content for document in found] == [text for text, _ in chunks]


def test_an_interrupted_file_goes_on_where_it_stopped(library, book, tokenizer, embeddings):
    class Stops:
        left = 2

        def embed_documents(self, texts):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return embeddings.embed_documents(texts)

    lib, stops = library(), Stops()
    lib._embeddings = stops
    with pytest.raises(KeyboardInterrupt):
        lib.add(book / "lighthouses.txt", tokenizer)
    assert len(names(lib)) == 4
    assert not [name for name in names(lib) if name.startswith(".")]
    stops.left = 100
    chunks = lib.add(book / "lighthouses.txt", tokenizer)
    assert 100 - stops.left == -(-len(chunks) // 4) - 2
    assert chunks == library("other").add(book / "lighthouses.txt", tokenizer)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"texts": 3}', '{"texts": ["a"], "file": "x"}'])
def test_a_damaged_manifest_is_dropped_and_told_and_its_document_can_be_ingested_again(
    library, book, tokenizer, caplog, text
):
    lib = library()
    chunks = lib.add(book / "lighthouses.txt", tokenizer)
    manifest = sorted(lib.folder.glob("*.json"))[1]
    manifest.write_text(text)
    assert lib.vector_store().index.ntotal == len(chunks) - 4
    assert "ingest" in caplog.text
    assert not manifest.exists()
    assert lib.add(book / "lighthouses.txt", tokenizer) == chunks
    assert lib.vector_store().index.ntotal == len(chunks)


@pytest.mark.parametrize("data", [b"", b"nonsense", None])
def test_lost_or_damaged_vectors_are_dropped_and_made_again(library, book, tokenizer, data):
    lib = library()
    chunks = lib.add(book / "lighthouses.txt", tokenizer)
    vectors = sorted(lib.folder.glob("*.safetensors"))[0]
    if data is None:
        vectors.unlink()
    else:
        vectors.write_bytes(data)
    assert lib.vector_store().index.ntotal == len(chunks) - 4
    assert lib.add(book / "lighthouses.txt", tokenizer) == chunks
    assert lib.vector_store().index.ntotal == len(chunks)


def test_half_written_files_and_strangers_are_not_seen(library, book, tokenizer):
    lib = library()
    chunks = lib.add(book / "lighthouses.txt", tokenizer)
    (lib.folder / ".abc-00000.json.123").write_text("{")
    (lib.folder / "notes.txt").write_text("hello")
    assert lib.vector_store().index.ntotal == len(chunks)


def test_a_copy_of_a_document_takes_no_room_among_what_is_found(library, book, tokenizer):
    lib = library(top_k=4)
    chunks = lib.add(book / "lighthouses.txt", tokenizer)
    alone = [text for text, _ in lib.search("lighthouse")]
    (book / "copy.txt").write_bytes((book / "lighthouses.txt").read_bytes())
    assert lib.add(book / "copy.txt", tokenizer)[0][0] == chunks[0][0]
    found = [text for text, _ in lib.search("lighthouse")]
    assert sorted(found) == sorted(alone)
    assert len(set(found)) == 4


def test_an_empty_index_says_how_to_fill_it(library):
    with pytest.raises(InputError, match=r"ragfuse ingest PATH$"):
        library().vector_store()
    with pytest.raises(InputError, match=r"ragfuse ingest PATH --index other$"):
        library("other").vector_store()


def test_vectors_of_another_embedder_are_not_mixed_in(library, book, tokenizer):
    library().add(book / "lighthouses.txt", tokenizer)
    with pytest.raises(InputError, match="empty"):
        library(embedder="another").vector_store()


def test_a_document_that_is_removed_is_not_found_and_its_texts_are_told_with_who_holds_them_too(
    library, book, tokenizer
):
    lib, sentence = library(), "Another document, of one sentence only."
    (book / "other.txt").write_text(sentence)
    (book / "copy.txt").write_text(sentence)
    for file in book.iterdir():
        lib.add(file, tokenizer)
    library("second").add(book / "other.txt", tokenizer)
    others = lib.remove([str((book / "lighthouses.txt").resolve())])
    assert len(others) >= 20
    assert set(others.values()) == {""}
    assert {d.page_content for d in lib.vector_store().similarity_search("x", k=9)} == {sentence}
    assert lib.remove([str((book / "other.txt").resolve())])[sentence]  # copy.txt, or the other index
    assert lib.remove([str((book / "copy.txt").resolve())]) == {sentence: str((book / "other.txt").resolve())}
    assert library("second").remove([str((book / "other.txt").resolve())]) == {sentence: ""}
    assert names(lib) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "é/"])
def test_an_index_has_a_plain_name(library, name):
    with pytest.raises(SettingsError, match="letters"):
        library(name)


def test_of_an_empty_index_those_are_named_that_a_person_named(library, book, tokenizer):
    for name in (module.index_of(book), "docs-2026", "docs-0123456789ag", "notes"):
        library(name).add(book / "lighthouses.txt", tokenizer)
    with pytest.raises(InputError, match="Others are not: docs-0123456789ag, docs-2026, notes \\(choose"):
        library("nope").require()


def test_an_overlap_as_long_as_a_chunk_is_refused(library):
    with pytest.raises(SettingsError, match="chunk_overlap"):
        library(chunk_overlap=160)


def test_an_index_that_cannot_be_written_is_refused(library, book, tokenizer, tmp_path):
    (tmp_path / "indexes").write_text("a file")
    with pytest.raises(SettingsError, match="run the same command again, which goes on from here, or set RAGFUSE_HOME"):
        library().add(book / "lighthouses.txt", tokenizer)


def test_many_who_ingest_the_same_file_at_once_leave_one_copy(library, book, tokenizer):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(library().add(book / "lighthouses.txt", tokenizer)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2]
    assert library().vector_store().index.ntotal == len(found[0])
    assert not [name for name in names(library()) if name.startswith(".")]


def test_a_long_text_is_cut_in_blocks_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(module, "SPLIT_BLOCK_CHARS", 50)
    words = "one two three\n\nfour five six seven eight\nnine ten " * 20
    assert "".join(module._blocks(words)) == words
    assert all(block[-1].isspace() for block in list(module._blocks(words))[:-1])
    assert list(module._blocks("x" * 120)) == ["x" * 50, "x" * 50, "x" * 20]
    assert list(module._blocks("")) == [""]


def test_texts_that_are_no_unicode_are_kept(library, tmp_path, tokenizer):
    file = tmp_path / "odd.txt"
    file.write_bytes(b"A line with nul \0 and a bell \a and some more words.")
    chunks = library().add(file, tokenizer)
    assert chunks == library().add(file, tokenizer) != []
    assert json.loads(sorted(library().folder.glob("*.json"))[0].read_text())["texts"] == [text for text, _ in chunks]
