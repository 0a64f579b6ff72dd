"""Vectors of the demo's passages are those of these passages and this embedder, whole, or none."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ragfuse.demo import run
from ragfuse.demo.vectors import KeptVectors

VECTORS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    folder = tmp_path / "embedder"
    folder.mkdir()
    (folder / "weights").write_text("weights")
    return folder


@pytest.fixture
def kept(tmp_path: Path, embedder: Path) -> KeptVectors:
    made = KeptVectors.of(tmp_path / "store" / "vectors", "short", ["a", "b"], embedder)
    assert made.read() is None
    made.write(VECTORS)
    return made


def test_vectors_are_those_that_were_kept(kept: KeptVectors, embedder: Path) -> None:
    found = KeptVectors.of(kept.folder, "short", ["a", "b"], embedder).read()
    assert found is not None
    assert found.dtype == np.float32
    assert (found == VECTORS).all()


def test_those_of_other_passages_or_of_another_embedder_are_none(kept: KeptVectors, embedder: Path) -> None:
    assert KeptVectors.of(kept.folder, "short", ["a", "c"], embedder).read() is None
    assert KeptVectors.of(kept.folder, "long", ["a", "b"], embedder).read() is None
    (embedder / "weights").write_text("others")
    assert KeptVectors.of(kept.folder, "short", ["a", "b"], embedder).read() is None


def test_an_embedder_whose_files_are_not_known_keeps_nothing(tmp_path: Path) -> None:
    made = KeptVectors.of(tmp_path, "short", ["a", "b"], "somebody/embedder")
    made.write(VECTORS)
    assert made.read() is None
    assert list(tmp_path.iterdir()) == []


def test_a_set_has_one_file_and_others_stay(kept: KeptVectors, embedder: Path) -> None:
    other = KeptVectors.of(kept.folder, "long", ["a", "b"], embedder)
    other.write(VECTORS + 1)
    KeptVectors.of(kept.folder, "short", ["c"], embedder).write(VECTORS[:1])
    assert len(list(kept.folder.iterdir())) == 2
    assert other.read() is not None


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "strange", "pickled", "fewer"])
def test_what_is_damaged_or_foreign_is_none(kept: KeptVectors, damage: str) -> None:
    (path,) = kept.folder.iterdir()
    data = path.read_bytes()
    changed = {
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "cut": data[:-4],
        "empty": b"",
        "strange": b"strange" * 99,
        "pickled": pickle.dumps(VECTORS),
    }
    if damage == "fewer":
        path.unlink()
        kept.write(VECTORS[:1])
    else:
        path.write_bytes(changed[damage])
    assert kept.read() is None
    kept.write(VECTORS)
    assert (kept.read() == VECTORS).all()


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, embedder: Path) -> None:
    (tmp_path / "file").write_text("")
    made = KeptVectors.of(tmp_path / "file" / "vectors", "short", ["a", "b"], embedder)
    made.write(VECTORS)
    assert made.read() is None


def test_the_demo_embeds_its_passages_once(engine, minilm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [("Ada is the mayor.", "a.md"), ("Walnuts are harvested in October.", "b.md")]
    monkeypatch.setattr(run, "_split_corpus", lambda engine, chunk_tokens: texts)
    monkeypatch.setattr(run, "resolve_embedder", lambda name, home: minilm_path)
    counted, plain = [], run.Demo._embedded
    monkeypatch.setattr(run.Demo, "_embedded", lambda *given: counted.append(1) or plain(*given))
    found = []
    for _ in range(2):
        demo = run.Demo(engine, {"human": "{context} {question}"}, 100)
        demo._index(Console(quiet=True))
        found.append([document.page_content for document in demo.retriever.invoke("Who is the mayor?")])
    assert counted == [1]
    assert found[0] == found[1] == [text for text, _ in texts]
