"""Stored responses: they outlive the process, are shared by processes, bounded, and apart by
tenant.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragfuse import Settings
from ragfuse.errors import StoreError
from ragfuse.serve import records as record_files
from ragfuse.serve.records import RESPONSES_FILE, ResponseRecords
from ragfuse.serve.refusals import APIError
from ragfuse.serve.schema import INPUT
from tests.kits.serve import Served, client_of, serving, settings_of

ODD = "caf\u00e9 \U0001f600 \ud800 \x00 'quoted'; DROP TABLE responses"


def add(
    records: ResponseRecords, id: str, session: str = "", salt: str = "s", text: str = ""
) -> None:
    messages = INPUT.validate_python(text or f"Said {id}.")
    records.add(salt, {"id": id}, messages, session or id)


def texts(records: ResponseRecords, id: str) -> list[str]:
    return [message.content[0].text for message in records.get("s", id).messages]


def has(records: ResponseRecords, id: str, salt: str = "s") -> bool:
    try:
        return bool(records.get(salt, id))
    except APIError:
        return False


@pytest.fixture(params=["disk", "memory"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    disk = {} if request.param == "disk" else {"disk_bytes": 0}
    made = ResponseRecords(Settings(store=tmp_path / "store", **disk))
    yield made
    made.close()
    assert (tmp_path / "store").exists() == (request.param == "disk")


def test_a_response_is_kept_with_its_conversation_until_it_is_deleted(
    records: ResponseRecords,
) -> None:
    add(records, "a", text=ODD)
    add(records, "b", "a")
    assert records.get("s", "a").response == {"id": "a"}
    assert texts(records, "a") == [ODD]
    assert records.get("s", "b").session == "a"
    assert (records.delete("s", "a"), records.delete("s", "b")) == (None, "a")
    assert not has(records, "a")


def test_the_latest_are_kept(records: ResponseRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MAX_RECORDS", 3)
    for number in range(5):
        add(records, f"r{number}")
        add(records, f"r{number}", salt="other")
    kept = [number for number in range(5) if has(records, f"r{number}")]
    assert kept == [2, 3, 4]
    monkeypatch.setattr(record_files, "MAX_RECORD_NBYTES", 1000)
    add(records, "long", text="x" * 5000)
    assert has(records, "long")
    assert not has(records, "r4")
    assert has(records, "r4", "other")


def test_conversations_go_when_their_sessions_do(tmp_path: Path) -> None:
    now = [1000.0]
    records = ResponseRecords(Settings(store=tmp_path, session_ttl_s=60), clock=lambda: now[0])
    add(records, "a")
    now[0] += 50
    add(records, "b", "a")
    add(records, "alone")
    now[0] += 50
    assert has(records, "a")  # as its conversation was continued
    now[0] += 50
    assert not any(has(records, id) for id in ("a", "b", "alone"))
    records.close()


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    one, other = (ResponseRecords(Settings(store=tmp_path)) for _ in range(2))
    add(one, "a")
    assert texts(other, "a") == ["Said a."]
    assert stat.S_IMODE(os.stat(tmp_path / RESPONSES_FILE).st_mode) == 0o600
    one.close()
    other.close()


def test_a_damaged_record_is_a_missing_one_and_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    records = ResponseRecords(Settings(store=tmp_path))
    add(records, "a")
    with sqlite3.connect(tmp_path / RESPONSES_FILE) as connection:
        connection.execute("UPDATE turns SET messages = '[{}]'")
    connection.close()
    assert not has(records, "a")
    records.close()
    (tmp_path / RESPONSES_FILE).write_bytes(b"no database" * 1000)
    records = ResponseRecords(Settings(store=tmp_path))
    add(records, "c")
    assert texts(records, "c") == ["Said c."]
    assert (tmp_path / f"{RESPONSES_FILE}.bad").exists()
    records.close()


def test_a_conversation_goes_on_after_a_restart(varied_path: Path, tmp_path: Path) -> None:
    settings = settings_of(varied_path, tmp_path, max_tokens=8)
    with serving(settings) as served:
        first = client_of(served).respond("Tell me of the keeper who lost his lamp.")
    with serving(settings) as served:
        client = client_of(served)
        second = client.respond("And then?", previous_response_id=first.id)
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        assert client.openai.responses.retrieve(first.id).output_text == first.output_text
        for id in (second.id, first.id):
            client.openai.responses.delete(id)
        assert not list(served.engine().sessions.ls())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_comes_although_it_cannot_be_stored(
    make_server: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def full(*_: object) -> None:
        raise StoreError("a full disk")

    monkeypatch.setattr(ResponseRecords, "add", full)
    made = client_of(make_server(max_tokens=4)).respond(stream=stream)
    found = list(made)[-1].response if stream else made
    assert found.output_text
    assert found.store is False
