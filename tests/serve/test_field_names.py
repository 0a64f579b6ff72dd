"""Fields that are wrong: named as they were sent, without the validator's words, and unknown ones with the nearest."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError

from ragfuse.serve.body import read_as
from ragfuse.serve.document_routes import DocumentRequest
from ragfuse.serve.embedding_schema import EmbeddingRequest
from ragfuse.serve.entry_routes import SelectionBody
from ragfuse.serve.refusals import APIError, unreadable
from ragfuse.serve.response_schema import ResponseRequest
from ragfuse.serve.schema import ChatRequest, ExplainRequest, RequestBody, TextRequest
from tests.serve.kit import Served, said

CHAT = {"model": "m", "messages": [said()]}


def told(model: type[RequestBody], fields: dict[str, Any]) -> APIError:
    with pytest.raises(RequestValidationError) as raised:
        read_as(model, json.dumps(fields).encode())
    return unreadable(raised.value.errors())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "m", "prompt": "x"}),
        ("/v1/responses", {"model": "m", "input": "x"}),
        ("/v1/ragfuse/explain", {**CHAT, "temperature": 0, "stream": True}),
    ],
)
def test_an_unknown_field_has_the_nearest_one_on_every_route(served: Served, path: str, fields: dict[str, Any]) -> None:
    answer = served.post(path, {**fields, "documnets": ["x"]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "There is no field 'documnets' here; did you mean 'documents'?"
    assert (error["param"], error["code"]) == ("documnets", "unknown_field")


@pytest.mark.parametrize(
    ("model", "fields", "name", "nearest"),
    [
        (ChatRequest, {**CHAT, "ragfuse": {"polcy": "query"}}, "ragfuse.polcy", "ragfuse.policy"),
        (ChatRequest, {**CHAT, "documents": [{"txt": "x"}]}, "documents.0.txt", "documents.0.text"),
        (ChatRequest, {"model": "m", "mesages": []}, "mesages", "messages"),
        (ResponseRequest, {"model": "m", "input": "x", "text": {"fromat": {}}}, "text.fromat", "text.format"),
        (EmbeddingRequest, {"model": "m", "input": "x", "dimension": 5}, "dimension", "dimensions"),
        (DocumentRequest, {"nam": "x", "text": "x"}, "nam", "name"),
        (SelectionBody, {"keyz": ["abc"]}, "keyz", "keys"),
    ],
)
def test_the_nearest_field_is_of_the_same_object(
    model: type[RequestBody], fields: dict[str, Any], name: str, nearest: str
) -> None:
    error = told(model, fields)
    assert error.message == f"There is no field '{name}' here; did you mean '{nearest}'?"
    assert error.param == name


def test_a_field_like_none_is_to_be_left_out() -> None:
    error = told(ChatRequest, {**CHAT, "wibble": 1})
    assert error.message == "There is no field 'wibble' here; leave it out."


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (EmbeddingRequest, {"model": "m", "input": ""}, "input: string should have at least 1 character; found ''."),
        (
            EmbeddingRequest,
            {"model": "m", "input": ["a", ""]},
            "input.1: string should have at least 1 character; found ''.",
        ),
        (EmbeddingRequest, {"model": "m", "input": []}, "input: list should have at least 1 item; found []."),
        (TextRequest, {"model": "m", "prompt": 5}, "prompt: wanted a valid string or a list; found 5."),
        (
            TextRequest,
            {"model": "m", "prompt": [-1]},
            "prompt.0: input should be greater than or equal to 0; found -1.",
        ),
        (ChatRequest, {**CHAT, "documents": [5]}, "documents.0: wanted a valid string or an object; found 5."),
        (
            ChatRequest,
            {**CHAT, "documents": [{"text": ""}]},
            "documents.0.text: string should have at least 1 character; found ''.",
        ),
        (ChatRequest, {**CHAT, "ragfuse": 5}, "ragfuse: wanted an object; found 5."),
        (ChatRequest, {**CHAT, "stop": [7]}, "stop.0: wanted a valid string; found 7."),
        (ChatRequest, {**CHAT, "logit_bias": {"5": "x"}}, "logit_bias.5: wanted a number; found 'x'."),
        (ChatRequest, {"model": "m", "messages": None}, "messages: wanted a list; found null."),
        (ChatRequest, {**CHAT, "n": True}, "n: wanted an integer; found true."),
        (ChatRequest, {**CHAT, "temperature": inf}, "temperature: input should be a finite number; found Infinity."),
        (
            ChatRequest,
            {**CHAT, "stop": [{"a": [None, "b"]}]},
            'stop.0: wanted a valid string; found {"a": [null, "b"]}.',
        ),
        (ChatRequest, {**CHAT, "tool_choice": 5}, "tool_choice: wanted a valid string or an object; found 5."),
        (ChatRequest, {"model": "m", "messages": [said([5])]}, "messages.0.content.0: wanted an object; found 5."),
        (ResponseRequest, {"model": "m", "input": []}, "input: list should have at least 1 item; found []."),
        (ExplainRequest, {"messages": 5}, "messages: wanted a list; found 5."),
    ],
)
def test_a_wrong_value_is_told_without_the_validators_own_words(
    model: type[RequestBody], fields: dict[str, Any], message: str
) -> None:
    error = told(model, fields)
    assert error.message == message
    assert error.param == message.partition(":")[0]


def test_a_parameter_of_a_query_is_named_as_it_was_sent(served: Served) -> None:
    error = served.get("/v1/ragfuse/entries?limit=0").json()["error"]
    assert error["param"] == "limit"
    assert error["message"].startswith("limit: ")


REQUIRED = {
    "/v1/chat/completions": "fields 'model' and 'messages' are",
    "/v1/completions": "fields 'model' and 'prompt' are",
    "/v1/responses": "fields 'model' and 'input' are",
    "/v1/embeddings": "fields 'model' and 'input' are",
    "/v1/ragfuse/documents": "field 'name' is",
    "/v1/ragfuse/documents/search": "field 'query' is",
    "/v1/ragfuse/schemas": "field 'pml' is",
}
"""What is told of a body without any field, by path."""


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_field_is_named_on_every_route(served: Served, path: str) -> None:
    error = served.post(path, {}).json()["error"]
    it = "it" if "field '" in REQUIRED[path] else "them"
    assert error["message"] == f"The {REQUIRED[path]} missing; give {it}."
    assert error["param"] == REQUIRED[path].split("'")[1]
    assert error["code"] == "missing"


@pytest.mark.parametrize("path", [*REQUIRED, "/v1/ragfuse/explain", "/v1/ragfuse/tokens", "/v1/ragfuse/entries/pin"])
@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "The body is empty; wanted "),
        (b" \n", "The body is empty; wanted "),
        (b"null", "The body is null; wanted "),
        (b"[]", "The body is a list; wanted "),
        (b'"x"', "The body is a string; wanted "),
        (b"1", "The body is a number; wanted "),
        (b"{", "The body is not valid JSON: expecting property name enclosed in double quotes. Wanted "),
    ],
)
def test_a_body_that_is_no_object_says_what_is_wanted_on_every_route(
    served: Served, path: str, body: bytes, found: str
) -> None:
    answer = httpx.post(served.root + path, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{found}a JSON object")
    names = REQUIRED[path].split("'")[1::2] if path in REQUIRED else []
    assert [name for name in names if f"'{name}'" not in message] == []


def test_every_route_with_a_body_is_tried(served: Served) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    others = {"/v1/ragfuse/explain", "/v1/ragfuse/tokens", "/v1/ragfuse/entries/pin", "/v1/ragfuse/entries/unpin"}
    assert {path for path, told in paths.items() if "post" in told} == REQUIRED.keys() | others


def test_chunks_to_delete_are_chosen_by_names_of_that_route(served: Served) -> None:
    error = served.delete("/v1/ragfuse/entries").json()["error"]
    assert (error["message"], error["param"]) == (
        "Give one of key, source and all=true; found none or several.",
        "key",
    )
    error = served.post("/v1/ragfuse/entries/pin", {}).json()["error"]
    assert (error["message"], error["param"]) == (
        "Give one of keys, source and all: true; found none or several.",
        "keys",
    )
