"""Documents over HTTP: split, encoded in the background, searched, deleted; PDFs; what became of
each token.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from ragfuse import Settings
from ragfuse.cli.files import FILE_TYPES
from ragfuse.errors import InputError, StoreError
from ragfuse.serve import documents, upload_text
from ragfuse.serve.keys import Keys
from ragfuse.serve.records import DocumentRecords
from ragfuse.text.file_texts import READERS
from ragfuse.types.keys import token_digest
from tests.kits.pdf import pdf
from tests.kits.serve import (
    BLUE,
    CHAT,
    GREEN,
    TENANTS,
    Served,
    read_only_disk,
    refused,
    serving,
    settings_of,
    wait_for,
)
from tests.kits.tiny import CHUNKS

pytest.importorskip("sentence_transformers", reason="the extra of embedded models is not installed")

PATH = "/v1/ragfuse/documents"
FIELDS = {"max_tokens": 4, "chunk_tokens": 150, "filler_tokens": 0}


def settings_at(folder: Path, model: Path) -> Settings:
    # with the embedder that the user's cache has
    settings = settings_of(model, folder, **FIELDS)
    return settings.model_copy(update={"home": Settings().home})


@pytest.fixture(scope="module")
def two(make_server: Callable[..., Served], minilm_path: Path) -> Served:
    """A server of two tenants, asked by the blue one, whose model reads bytes: a passage of ours
    has about a hundred.
    """
    return make_server(TENANTS, **FIELDS).of(BLUE)


def sent(served: Served, name: str, **fields: Any) -> dict[str, Any]:
    """Send a document and wait until it is done."""
    answer = served.post(PATH, {"name": name, **fields})
    assert answer.status_code == 200, answer.text
    id = answer.json()["id"]
    wait_for(lambda: shown(served, id)["status"] in ("ready", "failed"))
    return shown(served, id)


def shown(served: Served, id: str) -> dict[str, Any]:
    return served.get(f"{PATH}/{id}").json()


def deleted(served: Served, id: str) -> dict[str, Any]:
    answer = served.delete(f"{PATH}/{id}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def found(served: Served, query: str, *ids: str, top_k: int = 9) -> list[dict[str, Any]]:
    body = {"query": query, "top_k": top_k, **({"documents": ids} if ids else {})}
    return served.post(f"{PATH}/search", body).json()["data"]


def names(served: Served) -> list[str]:
    return [each["name"] for each in served.get(PATH).json()["data"]]


def kept(served: Served) -> dict[str, int]:
    """Chunks whose KV is stored, by source."""
    told = served.get("/v1/ragfuse/store").json()
    return {each["source"]: each["chunks"] for each in told["sources"]}


def has_kv(served: Served, text: str) -> bool:
    """Whether the store has KV of a text, in whatever context."""
    engine = served.engine()
    wanted = token_digest(engine.tokens(text))
    return wanted in {entry.key.tokens for entry in engine.store.entries()}


def sources_of(served: Served, text: str) -> list[str]:
    """The sources that the store has of a text."""
    engine = served.engine()
    return [known.source for known in engine.catalog.texts(engine.digest) if known.text == text]


def test_a_document_is_split_encoded_and_found(two: Served) -> None:
    done = sent(two, "lights.txt", text="\n\n".join(CHUNKS))
    assert done["status"] == "ready"
    assert done["passages"] == done["encoded"] == len(CHUNKS)
    assert done["nbytes"] > 0
    first, second = found(two, "Which lighthouse has a blue door?", top_k=2)
    assert first["text"] == CHUNKS[3]
    texts = [{"text": each["text"]} for each in (first, second)]
    trace = two.chat(documents=texts).json()["ragfuse"]
    assert [each["hit"] for each in trace["segments"] if each["kind"] == "chunk"] == [True, True]


def test_documents_outlive_their_server_and_are_shared_with_a_second_one(
    varied_path: Path, minilm_path: Path, tmp_path: Path
) -> None:
    settings, keys = settings_at(tmp_path, varied_path), Keys(TENANTS)
    query = "Who keeps the northern light?"
    with serving(settings, keys) as served:
        blue = served.of(BLUE)
        done = sent(blue, "lights.txt", text="\n\n".join(CHUNKS))
        other = sent(blue, "other.txt", text=CHUNKS[0])
        before = found(blue, query)
        sent(served.of(GREEN), "green.txt", text=CHUNKS[1])
    with serving(settings, keys) as served, serving(settings, keys) as second:
        one, two = served.of(BLUE), second.of(BLUE)
        assert shown(one, done["id"]) == done
        assert found(one, query) == before
        assert names(one) == names(two) == ["lights.txt", "other.txt"]
        assert names(served.of(GREEN)) == ["green.txt"]
        replaced = sent(two, "lights.txt", text="\n\n".join(CHUNKS[1:]))
        assert one.get(f"{PATH}/{done['id']}").status_code == 404
        assert shown(one, replaced["id"]) == replaced
        assert deleted(one, other["id"])["nbytes"] > 0
        assert names(two) == ["lights.txt"]
        assert "other.txt" not in kept(two)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("kept.pdf", {"pdf": base64.b64encode(b"%PDF-1.4 broken").decode()}),
        ("kept.json", {"text": "[" * 100_000}),
    ],
)
def test_a_document_that_fails_leaves_the_one_that_it_was_to_replace(
    two: Served, name: str, fields: dict[str, str]
) -> None:
    before = sent(two, name, text='"The lamp is lit."')
    failed = sent(two, name, **fields)
    assert failed["status"] == "failed"
    assert failed["error"]
    assert shown(two, before["id"]) == before
    for id in (before["id"], failed["id"]):
        deleted(two, id)
    assert name not in names(two)


def test_a_document_that_cannot_be_saved_has_failed_and_is_deleted_with_its_kv(
    two: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreError("a full disk")

    with monkeypatch.context() as patched:
        patched.setattr(DocumentRecords, "add", full)
        done = sent(two, "unsaved.txt", text=CHUNKS[0])
    assert done["status"] == "failed"
    deleted(two, done["id"])
    assert "unsaved.txt" not in kept(two)


def test_no_tenant_sees_or_finds_another_ones_documents(two: Served) -> None:
    text = "The green tenant keeps a secret lighthouse of its own on the far side."
    id = sent(two.of(GREEN), "secret.txt", text=text)["id"]
    assert "secret.txt" not in names(two)
    assert two.get(f"{PATH}/{id}").status_code == two.delete(f"{PATH}/{id}").status_code == 404
    query = "a secret lighthouse"
    assert not any("secret" in each["text"] for each in found(two, query, top_k=50))
    body = {"query": query, "documents": [id]}
    assert two.post(f"{PATH}/search", body).status_code == 404


SHIPS = "\n\n".join(
    f"Ship {at} passed the lighthouse in the night, and nobody waved to it from land."
    for at in range(60)
)


def test_an_upload_that_a_server_did_not_finish_goes_on_when_it_is_sent_again(
    varied_path: Path, minilm_path: Path, tmp_path: Path
) -> None:
    settings = settings_at(tmp_path, varied_path)
    with serving(settings) as served:
        id = served.post(PATH, {"name": "ships.txt", "text": SHIPS}).json()["id"]
        wait_for(lambda: shown(served, id)["encoded"] > 0)
        done = shown(served, id)["encoded"]
    with serving(settings) as served:
        assert done <= kept(served)["ships.txt"] < 60
        assert names(served) == []
        again = sent(served, "ships.txt", text=SHIPS)
        assert (again["status"], again["encoded"], again["nbytes"] > 0) == ("ready", 60, True)
        assert kept(served)["ships.txt"] == 60
        assert deleted(served, again["id"])["nbytes"] >= again["nbytes"]
        assert "ships.txt" not in kept(served)


def test_a_document_that_is_deleted_while_it_is_encoded_leaves_nothing(two: Served) -> None:
    id = two.post(PATH, {"name": "ships.txt", "text": SHIPS}).json()["id"]
    wait_for(lambda: shown(two, id)["encoded"] > 0)
    assert deleted(two, id)["deleted"] is True
    sent(two, "after.txt", text="The next document is encoded after the one that was deleted.")
    assert "ships.txt" not in kept(two)


def test_a_deleted_document_leaves_kv_that_has_another_source(two: Served) -> None:
    engine = two.engine()
    ingested, asked, own, since = (
        "The harbour master writes each arrival into a book with a green cover.",
        "The pilot boat leaves the harbour an hour before the tide turns.",
        "The tide tables hang beside the door of the harbour office.",
        "The lamp of the pier burns green, and that of the mole burns red.",
    )
    engine.ingest([(ingested, "harbour.txt")])
    assert two.chat(documents=[{"text": asked}]).status_code == 200
    engine.flush()
    texts = (ingested, asked, own, since)
    done = [sent(two, f"{at}.txt", text=text) for at, text in enumerate(texts)]
    assert [each["nbytes"] > 0 for each in done] == [False, False, True, True]
    engine.ingest([(since, "/docs/lamps.md")])
    assert sources_of(two, since) == ["3.txt", "/docs/lamps.md"]
    freed = [deleted(two, each["id"])["nbytes"] > 0 for each in done]
    assert freed == [False, False, True, False]
    assert [has_kv(two, text) for text in texts] == [True, True, False, True]
    assert sources_of(two, since) == ["/docs/lamps.md"]


def test_a_document_takes_what_questions_about_its_passages_encoded_again_with_it(
    two: Served,
) -> None:
    name = "quay \\d.txt"  # no pattern
    text = (
        "The lantern of Quay Nine is lit by the baker, who is up before everybody else in the"
        " harbour."
    )
    done = sent(two, name, text=text)
    entries = two.delete(f"/v1/ragfuse/entries?{urlencode({'source': name})}").json()
    assert entries["chunks"] == 1
    (passage,) = found(two, "Who lights the lantern of Quay Nine?", done["id"])
    assert passage["source"] == f"{name} #1"
    for _ in range(2):
        asked = [{"text": passage["text"], "title": passage["source"]}]
        assert two.chat(documents=asked).status_code == 200
        two.engine().flush()
    assert sources_of(two, text) == [f"{name} #1"]
    assert deleted(two, done["id"])["nbytes"] > 0
    assert not has_kv(two, text)


def test_a_copy_of_a_document_takes_no_room_among_what_is_found(two: Served) -> None:
    text = "\n\n".join(CHUNKS[:3])
    ids = [sent(two, name, text=text)["id"] for name in ("ferries.txt", "copy of ferries.txt")]
    passages = found(two, "Which lighthouse has a blue door?", *ids, top_k=3)
    assert sorted(each["text"] for each in passages) == sorted(CHUNKS[:3])
    assert {each["name"] for each in passages} == {"ferries.txt"}
    for id in ids:
        deleted(two, id)


def test_a_document_whose_kv_cannot_be_deleted_is_listed_until_it_can(two: Served) -> None:
    text = (
        "A lantern of the ferry hangs from the third post, and it is lit by the one who comes last."
    )
    id = sent(two, "lantern.txt", text=text)["id"]
    two.engine().flush()
    with read_only_disk(two):
        failed = two.delete(f"{PATH}/{id}")
        assert "disk" in refused(failed, 503)["message"]
        assert failed.headers["retry-after"]
        assert "lantern.txt" in names(two)
    assert deleted(two, id)["tiers"]["disk"] > 0
    assert two.get(f"{PATH}/{id}").status_code == 404
    assert "lantern.txt" not in kept(two)


LAMP = "The lamp was lit in the year of the great storm."


@pytest.mark.parametrize(
    ("name", "fields", "read"),
    [
        (
            "page.html",
            {
                "text": "<html><head><title>Lamp</title><script>var secret = 1;</script></head><p>It"
                " burns.</p></html>"
            },
            "Lamp\nIt burns.",
        ),
        ("lamp.pdf", {"pdf": base64.b64encode(pdf(LAMP)).decode()}, LAMP),
    ],
)
def test_a_file_is_read_by_its_type(
    two: Served, name: str, fields: dict[str, str], read: str
) -> None:
    done = sent(two, name, **fields)
    assert done["status"] == "ready", done
    passages = sorted(found(two, "lamp", done["id"]), key=lambda each: each["number"])
    assert "\n\n".join(each["text"] for each in passages) == read
    deleted(two, done["id"])


def test_the_page_offers_the_files_that_are_read(two: Served) -> None:
    offered = set(two.get("/").text.split('accept="')[1].split('"')[0].split(","))
    assert {*READERS, ".pdf"} <= offered <= set(FILE_TYPES)


@pytest.mark.parametrize(("data", "kind"), [(pdf("x"), ".pdf"), (b"<a x='" * 60_000, ".html")])
def test_an_upload_that_takes_too_long_to_read_is_given_up(
    data: bytes, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_text, "TIMEOUT_S", 0.01)
    with pytest.raises(InputError):
        upload_text.text_of(data, kind, 400_000)  # the parser of HTML would take minutes


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"text": "x", "pdf": "eA=="}, None),
        ({"text": "x" * (documents.MAX_DOCUMENT_CHARS + 1)}, None),
        ({"text": "x"}, 0),
    ],
)
def test_no_document_is_taken_that_is_none_or_beyond_the_limits(
    two: Served, fields: dict[str, Any], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most is not None:
        monkeypatch.setattr(documents, "MAX_LISTED", most)
    refused(two.post(PATH, {"name": "x.txt", **fields}))


def test_what_became_of_each_token_adds_up(two: Served) -> None:
    sent(two, "three.txt", text="\n\n".join(CHUNKS[:3]))
    body = {
        "model": two.service.model,
        "messages": [{"role": "user", "content": "Which?"}],
        "documents": [{"text": text, "title": f"p{at}"} for at, text in enumerate(CHUNKS[:3])],
    }

    def trace(**options: Any) -> dict[str, Any]:
        return two.post(CHAT, {**body, "ragfuse": options}).json()["ragfuse"]

    fused = {"token_trace": True, "policy": "hkvd", "ratio": 0.3}
    first = trace(**fused)
    told = first["token_trace"]
    assert len(told["texts"]) == len(told["fates"]) == told["tokens"] == first["tokens"]
    assert "Which?" in "".join(told["texts"])
    assert told["fates"].count("f") == first["tokens_fresh"]
    assert told["fates"].count("p") == first["tokens_prefix"]
    assert told["fates"].count("c") == sum(each["recomputed"] for each in first["segments"]) > 0
    for each in first["segments"]:  # positions are those of the letters
        letters = set(told["fates"][each["start"] : each["start"] + each["n_tokens"]])
        known = {"r", "c"} if each["kind"] == "chunk" else {"p"}
        assert letters <= known if each["hit"] else letters == {"f"}
    assert "token_trace" not in trace()


def test_live_counts_the_asker_alone(two: Served) -> None:
    live = two.get("/v1/ragfuse/live").json()
    assert live["running"] == live["waiting"] == 0
    assert len(live["ttft"]) == len(live["ttft_bounds_s"]) + 1
    hits = [
        sum(n for name, n in told["counts"].items() if name.startswith("hit "))
        for told in (live, two.of(GREEN).get("/v1/ragfuse/live").json())
    ]
    assert hits[0] > hits[1] == 0
