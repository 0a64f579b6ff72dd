"""Documents over HTTP: split, encoded in the background, searched, deleted; PDFs; what became of
each token.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from ragfuse import Engine, Settings
from ragfuse.cli.files import FILE_TYPES
from ragfuse.errors import InputError, StoreError
from ragfuse.serve import documents, upload_text
from ragfuse.serve.document_records import DocumentRecords
from ragfuse.serve.documents import TenantDocuments
from ragfuse.serve.keys import Keys
from ragfuse.text.file_texts import READERS
from ragfuse.types.keys import token_digest
from tests.serve.kit import Served, process, read_only_disk, said, serving, wait_for
from tests.serve.pdf import pdf
from tests.tiny import CHUNKS

pytest.importorskip("sentence_transformers", reason="the extra of embedded models is not installed")

PATH = "/v1/ragfuse/documents"
BLUE, RED = ({"authorization": f"Bearer a-key-of-the-{name}-tenant"} for name in ("blue", "red"))


def settings_at(folder: Path, model: Path) -> Settings:
    return Settings(
        model=str(model),
        dtype="float32",
        store=folder / "store",
        home=Settings().home,
        max_tokens=4,
        chunk_tokens=150,
        filler_tokens=0,
    )


def has_kv(engine: Engine, text: str) -> bool:
    """Whether the store has KV of a text, in whatever context."""
    wanted = token_digest(engine.tokens(text))
    return wanted in {entry.key.tokens for entry in engine.store.entries()}


def two_tenants() -> Keys:
    return Keys(["blue:a-key-of-the-blue-tenant", "red:a-key-of-the-red-tenant"])


@pytest.fixture(scope="module")
def two(
    varied_path: Path, minilm_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server of two tenants, whose model reads bytes: a passage of ours has about a hundred."""
    home = tmp_path_factory.mktemp("documents")
    with serving(settings_at(home, varied_path), two_tenants()) as served:
        yield served


def sent(served: Served, name: str, key: dict[str, str] = BLUE, **fields: Any) -> dict[str, Any]:
    """Send a document and wait until it is done."""
    answer = served.post(PATH, {"name": name, **fields}, **key)
    assert answer.status_code == 200, answer.text
    id = answer.json()["id"]
    wait_for(lambda: served.get(f"{PATH}/{id}", **key).json()["status"] in ("ready", "failed"))
    return served.get(f"{PATH}/{id}", **key).json()


def test_a_document_is_split_encoded_and_found(two: Served) -> None:
    done = sent(two, "lights.txt", text="\n\n".join(CHUNKS))
    assert (done["status"], done["passages"], done["encoded"]) == (
        "ready",
        len(CHUNKS),
        len(CHUNKS),
    )
    assert done["tokens"] > 0 < done["nbytes"]
    found = two.post(
        f"{PATH}/search", {"query": "Which lighthouse has a blue door?", "top_k": 2}, **BLUE
    ).json()["data"]
    assert found[0]["text"] == CHUNKS[3]
    assert len(found) == 2
    assert found[0]["score"] >= found[1]["score"]
    ask = {
        "model": two.service.model,
        "messages": [said()],
        "documents": [{"text": each["text"]} for each in found],
    }
    trace = two.post("/v1/chat/completions", ask, **BLUE).json()["ragfuse"]
    assert [each["hit"] for each in trace["segments"] if each["kind"] == "chunk"] == [True, True]


def kept(root: str, key: dict[str, str] = BLUE) -> dict[str, int]:
    """Chunks whose KV is stored, by source."""
    found = httpx.get(f"{root}/v1/ragfuse/usage", headers=key, timeout=60).json()["sources"]
    return {each["source"]: each["chunks"] for each in found}


def sources_of(served: Served, text: str) -> list[str]:
    """The sources that the store has of a text."""
    engine = served.service.engine(served.service.keys.tenants[0])
    return [known.source for known in engine.catalog.texts(engine.digest) if known.text == text]


def names(served: Served, key: dict[str, str] = BLUE) -> list[str]:
    return [each["name"] for each in served.get(PATH, **key).json()["data"]]


def test_documents_are_there_after_a_restart_and_for_a_second_server(
    varied_path: Path, minilm_path: Path, tmp_path: Path
) -> None:
    settings, keys = settings_at(tmp_path, varied_path), two_tenants()
    search = {"query": "Who keeps the northern light?", "top_k": 1}
    with serving(settings, keys) as served:
        done = sent(served, "lights.txt", text="\n\n".join(CHUNKS))
        other = sent(served, "other.txt", text=CHUNKS[0])
        found = served.post(f"{PATH}/search", search, **BLUE).json()["data"]
        sent(served, "red.txt", RED, text=CHUNKS[1])
    with serving(settings, keys) as served:
        assert served.get(f"{PATH}/{done['id']}", **BLUE).json() == done
        assert served.post(f"{PATH}/search", search, **BLUE).json()["data"] == found
        assert (names(served), names(served, RED)) == (["lights.txt", "other.txt"], ["red.txt"])
        with serving(settings, keys) as second:
            assert names(second) == ["lights.txt", "other.txt"]
            replaced = sent(second, "lights.txt", text="\n\n".join(CHUNKS[1:]))
            assert served.get(f"{PATH}/{done['id']}", **BLUE).status_code == 404
            assert served.get(f"{PATH}/{replaced['id']}", **BLUE).json() == replaced
            assert served.delete(f"{PATH}/{other['id']}", **BLUE).json()["nbytes"] > 0
            assert names(second) == ["lights.txt"]
            assert "other.txt" not in kept(second.root)


def test_a_document_that_fails_leaves_the_one_that_it_was_to_replace(two: Served) -> None:
    kept = sent(two, "kept.pdf", text=CHUNKS[0])
    failed = sent(two, "kept.pdf", pdf=base64.b64encode(b"%PDF-1.4 broken").decode())
    assert failed["status"] == "failed"
    assert two.get(f"{PATH}/{kept['id']}", **BLUE).json() == kept
    for id in (kept["id"], failed["id"]):
        assert two.delete(f"{PATH}/{id}", **BLUE).status_code == 200
    assert "kept.pdf" not in names(two)


def test_a_document_that_cannot_be_saved_has_failed_and_is_deleted_with_its_kv(
    two: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreError("a full disk")

    with monkeypatch.context() as patched:
        patched.setattr(DocumentRecords, "add", full)
        done = sent(two, "unsaved.txt", text=CHUNKS[0])
    assert done["status"] == "failed"
    assert two.delete(f"{PATH}/{done['id']}", **BLUE).status_code == 200
    assert "unsaved.txt" not in kept(two.root)


def test_another_embedder_embeds_saved_passages_anew(
    two: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = sent(two, "embedded.txt", text=CHUNKS[0])
    records = DocumentRecords(two.service.settings, "another")
    monkeypatch.setattr(two.service, "documents", records)
    listed = TenantDocuments(two.service, two.service.keys.tenants[0])
    found = listed.get(done["id"])
    read = records.read(two.service.keys.tenants[0].salt, done["id"])
    assert read is not None
    assert len(found.vectors) == len(read.vectors) == done["passages"]
    records.close()


def test_no_tenant_sees_or_finds_another_ones_documents(two: Served) -> None:
    done = sent(
        two,
        "secret.txt",
        RED,
        text="The red tenant keeps a secret lighthouse of its own on the far side.",
    )
    assert done["id"] not in [each["id"] for each in two.get(PATH, **BLUE).json()["data"]]
    assert two.get(f"{PATH}/{done['id']}", **BLUE).status_code == 404
    assert two.delete(f"{PATH}/{done['id']}", **BLUE).status_code == 404
    body = {"query": "a secret lighthouse", "top_k": 50}
    assert not any(
        "secret" in each["text"] for each in two.post(f"{PATH}/search", body, **BLUE).json()["data"]
    )
    assert (
        two.post(f"{PATH}/search", {**body, "documents": [done["id"]]}, **BLUE).status_code == 404
    )


def test_a_document_that_is_deleted_while_it_is_encoded_leaves_nothing(two: Served) -> None:
    id = two.post(PATH, {"name": "ships.txt", "text": SHIPS}, **BLUE).json()["id"]
    wait_for(lambda: two.get(f"{PATH}/{id}", **BLUE).json()["encoded"] > 0)
    assert two.delete(f"{PATH}/{id}", **BLUE).json()["deleted"] is True
    last = sent(
        two, "after.txt", text="The next document is encoded after the one that was deleted."
    )
    assert last["status"] == "ready"
    assert "ships.txt" not in kept(two.root)


SHIPS = "\n\n".join(
    f"Ship {at} passed the lighthouse in the night, and nobody waved to it from land."
    for at in range(60)
)


def goes_on(root: str, done: int) -> None:
    """A server ended while it encoded SHIPS; the next one goes on where that was, and deletes all
    of it.
    """
    left = kept(root)["ships.txt"]
    assert done <= left < 60
    assert httpx.get(f"{root}{PATH}").json()["data"] == []
    id = httpx.post(f"{root}{PATH}", json={"name": "ships.txt", "text": SHIPS}).json()["id"]
    wait_for(lambda: httpx.get(f"{root}{PATH}/{id}").json()["status"] in ("ready", "failed"))
    again = httpx.get(f"{root}{PATH}/{id}").json()
    assert (again["status"], again["encoded"], again["nbytes"] > 0) == ("ready", 60, True)
    assert kept(root)["ships.txt"] == 60
    assert httpx.delete(f"{root}{PATH}/{id}").json()["nbytes"] >= again["nbytes"]
    assert "ships.txt" not in kept(root)


def begun(root: str) -> int:
    """Send SHIPS, and return how many passages are done once some are."""
    id = httpx.post(f"{root}{PATH}", json={"name": "ships.txt", "text": SHIPS}).json()["id"]
    wait_for(lambda: httpx.get(f"{root}{PATH}/{id}").json()["encoded"] > 0)
    return int(httpx.get(f"{root}{PATH}/{id}").json()["encoded"])


def test_an_upload_that_a_server_did_not_finish_goes_on_when_it_is_sent_again(
    varied_path: Path, minilm_path: Path, tmp_path: Path
) -> None:
    settings = settings_at(tmp_path, varied_path)
    with serving(settings) as served:
        done = begun(served.root)
    with serving(settings) as served:
        goes_on(served.root, done)


@pytest.mark.slow
def test_an_upload_goes_on_after_its_server_was_killed(
    varied_path: Path, minilm_path: Path, tmp_path: Path
) -> None:
    settings = settings_at(tmp_path, varied_path)
    told = {"RAGFUSE_CHUNK_TOKENS": "150", "RAGFUSE_FILLER_TOKENS": "0"}
    with process(settings, **told) as (run, root):
        done = begun(root)
        run.kill()
        run.wait()
    with process(settings, **told) as (_, root):
        goes_on(root, done)


def test_a_deleted_document_leaves_the_kv_that_the_store_had_before(two: Served) -> None:
    engine = two.service.engine(two.service.keys.tenants[0])
    ingested, asked, own = (
        "The harbour master writes each arrival into a book with a green cover.",
        "The pilot boat leaves the harbour an hour before the tide turns.",
        "The tide tables hang beside the door of the harbour office.",
    )
    engine.ingest([(ingested, "harbour.txt")])
    ask = {"model": two.service.model, "messages": [said()], "documents": [{"text": asked}]}
    assert two.post("/v1/chat/completions", ask, **BLUE).status_code == 200
    engine.flush()
    done = [sent(two, f"{at}.txt", text=text) for at, text in enumerate((ingested, asked, own))]
    assert [each["nbytes"] > 0 for each in done] == [False, False, True]
    freed = [two.delete(f"{PATH}/{each['id']}", **BLUE).json()["nbytes"] for each in done]
    assert freed[:2] == [0, 0] < freed[1:]
    assert [has_kv(engine, text) for text in (ingested, asked, own)] == [True, True, False]


def test_a_deleted_document_leaves_kv_that_another_source_has_got_since(two: Served) -> None:
    engine = two.service.engine(two.service.keys.tenants[0])
    text = "The lamp of the pier burns green, and that of the mole burns red."
    done = sent(two, "pier.txt", text=text)
    engine.ingest([(text, "/docs/lamps.md")])
    assert sources_of(two, text) == ["pier.txt", "/docs/lamps.md"]
    assert two.delete(f"{PATH}/{done['id']}", **BLUE).json()["nbytes"] == 0
    assert sources_of(two, text) == ["/docs/lamps.md"]
    sent(two, "pier.txt", text=text)
    sent(two, "pier.txt", text="The pier has no lamp any more since the storm of last winter.")
    wait_for(lambda: sources_of(two, text) == ["/docs/lamps.md"])


def test_a_document_takes_what_questions_about_its_passages_encoded_again_with_it(
    two: Served,
) -> None:
    name = "quay \\d.txt"  # no pattern
    engine = two.service.engine(two.service.keys.tenants[0])
    text = (
        "The lantern of Quay Nine is lit by the baker, who is up before everybody else in the"
        " harbour."
    )
    done = sent(two, name, text=text)
    deleted = two.delete(f"/v1/ragfuse/entries?{urlencode({'source': name})}", **BLUE).json()
    assert deleted["chunks"] == 1
    query = {"query": "Who lights the lantern of Quay Nine?", "top_k": 1, "documents": [done["id"]]}
    found = two.post(f"{PATH}/search", query, **BLUE).json()["data"][0]
    assert found["source"] == f"{name} #1"
    documents = [{"text": found["text"], "title": found["source"]}]
    ask = {"model": two.service.model, "messages": [said()], "documents": documents}
    for _ in range(2):
        assert two.post("/v1/chat/completions", ask, **BLUE).status_code == 200
        engine.flush()
    assert sources_of(two, text) == [f"{name} #1"]
    assert two.delete(f"{PATH}/{done['id']}", **BLUE).json()["nbytes"] > 0
    assert not has_kv(engine, text)


def test_entries_that_are_deleted_by_source_stay_where_another_source_has_them(two: Served) -> None:
    before = two.get("/v1/ragfuse/usage", **BLUE).json()["nbytes"]["disk"]
    both = "Every boat of the harbour has a number on its bow, painted white, a hand high."
    own = "The numbers are given out by the harbour master on the first of May, for herring."
    sent(two, "boats.txt", text=both)
    sent(two, "numbers.txt", text=f"{both}\n\n{own}")
    done = two.delete("/v1/ragfuse/entries?source=numbers.txt", **BLUE).json()
    assert (done["chunks"], done["kept"], done["nbytes"] > 0) == (1, 1, True)
    assert sources_of(two, both) == ["boats.txt"]
    there = two.get("/v1/ragfuse/usage", **BLUE).json()["nbytes"]["disk"]
    done = two.delete("/v1/ragfuse/entries?source=boats.txt", **BLUE).json()
    assert (done["chunks"], done["kept"]) == (1, 0)
    left = two.get("/v1/ragfuse/usage", **BLUE).json()["nbytes"]["disk"]
    assert left == there - done["tiers"]["disk"] == before


def test_a_copy_of_a_document_takes_no_room_among_what_is_found(two: Served) -> None:
    texts = CHUNKS[:3]
    ids = [
        sent(two, name, text="\n\n".join(texts))["id"]
        for name in ("ferries.txt", "copy of ferries.txt")
    ]
    query = {"query": "Which lighthouse has a blue door?", "top_k": 3, "documents": ids}
    found = two.post(f"{PATH}/search", query, **BLUE).json()["data"]
    assert sorted(each["text"] for each in found) == sorted(texts)
    assert {each["name"] for each in found} == {"ferries.txt"}
    for id in ids:
        two.delete(f"{PATH}/{id}", **BLUE)


def test_a_document_whose_kv_cannot_be_deleted_stays_in_the_list_until_it_can(two: Served) -> None:
    text = (
        "A lantern of the ferry hangs from the third post, and it is lit by the one who comes last."
    )
    done = sent(two, "lantern.txt", text=text)
    two.service.engine(two.service.keys.tenants[0]).flush()
    with read_only_disk(two):
        failed = two.delete(f"{PATH}/{done['id']}", **BLUE)
        assert failed.status_code == 503
        assert "may still be stored in disk" in failed.json()["error"]["message"]
        assert failed.headers["retry-after"]
        assert done["id"] in {each["id"] for each in two.get(PATH, **BLUE).json()["data"]}
    again = two.delete(f"{PATH}/{done['id']}", **BLUE)
    assert (again.status_code, again.json()["deleted"]) == (200, True)
    assert again.json()["tiers"]["disk"] > 0
    assert two.get(f"{PATH}/{done['id']}", **BLUE).status_code == 404
    assert "lantern.txt" not in kept(two.root)


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        (
            "page.html",
            (
                "<html><head><title>Lamp</title><script>var secret = 1;</script></head><p>It"
                " burns.</p></html>"
            ),
            "Lamp\nIt burns.",
        ),
        ("lamp.json", '\ufeff{"l\\u00e4mp": "\\ud800"}', '{\n "l\xe4mp": "\ufffd"\n}'),
        ("tags.txt", "<p>A tag <i>stays</i>.</p>", "<p>A tag <i>stays</i>.</p>"),
    ],
)
def test_a_text_is_read_by_its_type_as_an_ingest_reads_it(
    two: Served, name: str, text: str, read: str
) -> None:
    done = sent(two, name, text=text)
    assert done["status"] == "ready", done
    query = {"query": "lamp", "top_k": 9, "documents": [done["id"]]}
    found = two.post(f"{PATH}/search", query, **BLUE).json()["data"]
    assert (
        "\n\n".join(each["text"] for each in sorted(found, key=lambda each: each["number"])) == read
    )
    two.delete(f"{PATH}/{done['id']}", **BLUE)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("broken.json", "{", "cannot be read: JSONDecodeError"),
        ("script.html", "<script>var secret = 1;</script>", "has no text"),
        ("deep.json", "[" * 100_000, "cannot be read: RecursionError"),
    ],
)
def test_a_text_that_its_type_does_not_fit_fails_and_says_so(
    two: Served, name: str, text: str, why: str
) -> None:
    done = sent(two, name, text=text)
    assert (done["status"], why in done["error"]) == ("failed", True), done
    two.delete(f"{PATH}/{done['id']}", **BLUE)


def test_the_page_offers_the_files_that_are_read(two: Served) -> None:
    page = two.get("/", **BLUE).text
    offered = set(page.split('accept="')[1].split('"')[0].split(","))
    assert {*READERS, ".pdf"} <= offered <= set(FILE_TYPES)


def test_a_pdf_is_read_and_a_broken_one_says_so(two: Served) -> None:
    data = base64.b64encode(pdf("The lamp was lit in the year of the great storm.")).decode()
    done = sent(two, "lamp.pdf", pdf=data)
    assert done["status"] == "ready", done
    found = two.post(
        f"{PATH}/search", {"query": "When was the lamp lit?", "top_k": 1}, **BLUE
    ).json()["data"]
    assert found[0]["text"] == "The lamp was lit in the year of the great storm."
    broken = sent(two, "broken.pdf", pdf=base64.b64encode(b"%PDF-1.4 broken").decode())
    assert broken["status"] == "failed"
    assert broken["error"].startswith("The pdf document cannot be read")


def test_an_upload_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_text, "TIMEOUT_S", 0.01)
    with pytest.raises(InputError, match=r"^The pdf document could not be read within"):
        upload_text.text_of(pdf("x"), ".pdf", 400_000)
    with pytest.raises(InputError, match=r"^The html document could not be read within"):
        upload_text.text_of(b"<a x='" * 60_000, ".html", 400_000)  # the parser takes minutes for it


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": "x", "pdf": "eA=="},
        {"text": "x" * (documents.MAX_DOCUMENT_CHARS + 1)},
    ],
)
def test_what_is_no_document_is_refused(two: Served, fields: dict[str, Any]) -> None:
    answer = two.post(PATH, {"name": "x.txt", **fields}, **BLUE)
    assert answer.status_code == 400, answer.text


def test_a_list_has_an_end(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LISTED", 0)
    answer = two.post(PATH, {"name": "one more.txt", "text": "x"}, **BLUE)
    assert answer.status_code == 400
    assert "of at most 0" in answer.json()["error"]["message"]


def test_what_became_of_each_token_adds_up(two: Served) -> None:
    done = sent(two, "three.txt", text="\n\n".join(CHUNKS[:3]))
    assert done["status"] == "ready"
    documents = [{"text": text, "title": f"p{at}"} for at, text in enumerate(CHUNKS[:3])]
    body = {
        "model": two.service.model,
        "messages": [said("Which?")],
        "documents": documents,
        "ragfuse": {"token_trace": True, "policy": "hkvd", "ratio": 0.3},
    }
    trace = two.post("/v1/chat/completions", body, **BLUE).json()["ragfuse"]
    told = trace["token_trace"]
    assert len(told["texts"]) == len(told["fates"]) == told["tokens"] == trace["tokens"]
    assert "Which?" in "".join(told["texts"])
    assert told["fates"].count("f") == trace["tokens_fresh"]
    assert told["fates"].count("p") == trace["tokens_prefix"]
    assert told["fates"].count("c") == sum(each["recomputed"] for each in trace["segments"]) > 0
    for each in trace["segments"]:  # positions are those of the letters
        letters = set(told["fates"][each["start"] : each["start"] + each["n_tokens"]])
        assert (
            letters <= ({"r", "c"} if each["kind"] == "chunk" else {"p"})
            if each["hit"]
            else letters == {"f"}
        )
    again = two.post(
        "/v1/chat/completions", {**body, "ragfuse": {"token_trace": True, "reuse": False}}, **BLUE
    ).json()
    assert set(again["ragfuse"]["token_trace"]["fates"]) == {"f"}
    two.service.engine(two.service.keys.tenants[0]).flush()
    last = two.post("/v1/chat/completions", body, **BLUE).json()["ragfuse"]
    assert last["token_trace"]["fates"].count("p") == last["tokens_prefix"] > 0
    plain = two.post("/v1/chat/completions", {**body, "ragfuse": {}}, **BLUE).json()["ragfuse"]
    assert "token_trace" not in plain


def test_live_tells_of_the_asker_alone(two: Served) -> None:
    found = two.get("/v1/ragfuse/live", **BLUE).json()
    assert found["running"] == found["waiting"] == 0
    assert len(found["ttft"]) == len(found["ttft_bounds_s"]) + 1
    assert sum(n for name, n in found["counts"].items() if name.startswith("hit ")) > 0
    red = two.get("/v1/ragfuse/live", **RED).json()["counts"]
    assert not [name for name in red if name.startswith("hit ")]
