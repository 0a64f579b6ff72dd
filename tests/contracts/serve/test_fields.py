"""Each field that may be sent, one by one: done, streamed or not; a label; or refused at what it
cannot have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from ragfuse.serve.requests import chat_requests
from ragfuse.serve.schema import INERT, ChatRequest, StreamOptions, TextRequest
from tests.kits.serve import CHAT as CHAT_PATH
from tests.kits.serve import TEXT as TEXT_PATH
from tests.kits.serve import Served, events, refused, said, with_documents
from tests.kits.tiny import ROOT

Fields = Mapping[str, Any]
WARM = {"temperature": 1.5, "seed": 7}
TOOL = {
    "type": "function",
    "function": {"name": "fan", "parameters": {"type": "object", "properties": {}}},
}
LETTERS = list(range(71, 97))
"""Ids of the tiny model's a to z, of which its answers are, with spaces between them."""
PLAIN: Fields = MappingProxyType({})
BOTH: dict[str, tuple[Fields, Fields]] = {
    "model": (PLAIN, {"model": "another"}),
    "stream": (PLAIN, {"stream": True}),
    "stream_options": ({"stream": True}, {"stream_options": {"include_usage": True}}),
    "max_tokens": (PLAIN, {"max_tokens": 3}),
    "temperature": ({"seed": 7}, {"temperature": 1.5}),
    "top_p": (WARM, {"top_p": 0.01}),
    "top_k": (WARM, {"top_k": 1}),
    "min_p": (WARM, {"min_p": 1.0}),
    "presence_penalty": (PLAIN, {"presence_penalty": 2}),
    "frequency_penalty": (PLAIN, {"frequency_penalty": -2}),
    "repetition_penalty": (PLAIN, {"repetition_penalty": 3}),
    "logit_bias": (PLAIN, {"logit_bias": {str(LETTERS[0]): 100}}),
    "n": (PLAIN, {"n": 2}),
    "stop": (PLAIN, {"stop": list("abcdefmoqrstuvw ")}),
    "stop_token_ids": (PLAIN, {"stop_token_ids": LETTERS}),
    "min_tokens": ({"stop_token_ids": LETTERS[:20]}, {"min_tokens": 8}),
    "seed": (WARM, {"seed": 8}),
    "session_id": (PLAIN, {"session_id": "fields"}),
    # this server has no place
    "kv_transfer_params": (PLAIN, {"kv_transfer_params": {"do_remote_decode": True}}),
    "ragfuse": (PLAIN, {"ragfuse": {"ratio": 0.5}}),
    "structured_outputs": (PLAIN, {"structured_outputs": {"choice": ["ab"], "json": None}}),
}
"""Of both kinds of completion, by field: what else is sent, and what makes a difference to that."""
CHAT: dict[str, tuple[Fields, Fields]] = {
    **BOTH,
    # at ratio 1, as they are encoded after the first answer
    "documents": ({**PLAIN, "ragfuse": {"ratio": 1}}, with_documents(1)),
    "pml": (PLAIN, {"pml": "<prompt schema='none'/>"}),
    "messages": (PLAIN, {"messages": [said("Another?")]}),
    "max_completion_tokens": (PLAIN, {"max_completion_tokens": 3}),
    "logprobs": (PLAIN, {"logprobs": True}),
    "top_logprobs": ({"logprobs": True}, {"top_logprobs": 2}),
    "tools": (PLAIN, {"tools": [TOOL]}),
    "tool_choice": ({"tools": [TOOL]}, {"tool_choice": "none"}),
    "parallel_tool_calls": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fan"}}},
        {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100},
    ),
    "response_format": (PLAIN, {"response_format": {"type": "json_object"}, "max_tokens": 30}),
    "reasoning_effort": (PLAIN, {"reasoning_effort": "high"}),
    "verbosity": (PLAIN, {"verbosity": "low"}),
    "enable_thinking": (PLAIN, {"enable_thinking": True}),
    "chat_template_kwargs": (PLAIN, {"chat_template_kwargs": {"mood": "good"}}),
}
TEXT: dict[str, tuple[Fields, Fields]] = {
    **BOTH,
    "prompt": (PLAIN, {"prompt": "Another text"}),
    "max_tokens": (PLAIN, {"max_tokens": 2}),
    "logprobs": (PLAIN, {"logprobs": 0}),
}
LABELS: dict[str, Any] = {
    "user": "somebody",
    "metadata": {"run": "7"},
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}
PATHS = {"chat": CHAT_PATH, "text": TEXT_PATH}


def asked(served: Served, kind: str, *fields: Fields) -> Any:
    body: dict[str, Any] = {"model": served.service.model}
    body |= {"messages": [said()]} if kind == "chat" else {"prompt": "The keeper of the lighthouse"}
    for each in fields:
        body |= each
    return served.post(PATHS[kind], body)


def joined(found: list[Any]) -> dict[int, Any]:
    """What the events of a stream, or one whole answer, say by choice."""
    told: dict[int, Any] = {}
    for choice in (choice for event in found for choice in event["choices"]):
        each = told.setdefault(choice["index"], {"text": "", "calls": 0, "why": None, "tokens": 0})
        delta = choice.get("delta") or choice.get("message") or {}
        logprobs = choice["logprobs"] or {}
        each["text"] += choice.get("text", "") or delta.get("content") or ""
        each["calls"] += len(delta.get("tool_calls", ()))
        each["why"] = choice["finish_reason"] or each["why"]
        each["tokens"] += len(logprobs.get("content") or logprobs.get("tokens") or ())
    return told


def shape(answer: Any) -> Any:
    """What of an answer its request decides."""
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["param"]
    if answer.headers["content-type"].startswith("text/event-stream"):
        found = events(answer)
        return joined(found), [event["usage"] for event in found if event.get("usage")]
    told = answer.json()
    traces = told["ragfuse"] if isinstance(told["ragfuse"], list) else [told["ragfuse"]]
    for choice in told["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    usage = [told["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    return (
        told["choices"],
        usage,
        [(each["session"] == "fields", each["ratio"]) for each in traces],
    )


def test_every_field_is_in_one_of_these_tables_and_in_the_guide() -> None:
    assert set(ChatRequest.model_fields) == {*CHAT, *LABELS}
    assert set(TextRequest.model_fields) == {*TEXT, *LABELS}
    guide = (ROOT / "docs" / "guides" / "http-api.md").read_text(encoding="utf-8")
    names = {*CHAT, *TEXT, *LABELS, *StreamOptions.model_fields}
    assert {name for name in names if f"`{name}`" not in guide} == set()


@pytest.mark.parametrize(
    ("kind", "name"), [("chat", name) for name in CHAT] + [("text", name) for name in TEXT]
)
def test_a_field_makes_its_difference_streamed_too(served: Served, kind: str, name: str) -> None:
    common, more = (CHAT if kind == "chat" else TEXT)[name]
    with_it, without = asked(served, kind, common, more), asked(served, kind, common)
    assert without.status_code == 200, without.text
    assert shape(with_it) != shape(without)
    if name in ("session_id", "stream", "stream_options"):  # the first is another turn each time
        return
    streamed = asked(served, kind, common, more, {"stream": True})
    if with_it.status_code != 200:
        assert refused(streamed, with_it.status_code) == refused(with_it, with_it.status_code)
    else:
        assert joined(events(streamed)) == joined([with_it.json()])


@pytest.mark.parametrize("kind", PATHS)
def test_labels_change_nothing(served: Served, kind: str) -> None:
    assert shape(asked(served, kind, LABELS)) == shape(asked(served, kind))


@pytest.mark.parametrize("kind", PATHS)
def test_a_field_of_another_server_is_taken_where_it_changes_nothing_and_else_refused(
    served: Served, kind: str
) -> None:
    known = (ChatRequest if kind == "chat" else TextRequest).model_fields
    inert = {name: values for name, values in INERT.items() if name not in known}
    neutral = {name: values[0] if values else None for name, values in inert.items()}
    assert shape(asked(served, kind, neutral)) == shape(asked(served, kind))
    for name in inert:
        assert refused(asked(served, kind, {name: {"a": 1}}))["param"] == name
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert asked(served, kind, stream).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 1}, "mirostat"),
        ({"min_tokens": 3, "stop": "x"}, "min_tokens"),
        ({"stop_token_ids": [5], "structured_outputs": {"regex": "a"}}, "stop_token_ids"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "grammar"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_an_unknown_or_impossible_field_is_refused_by_its_name(
    served: Served, fields: Fields, param: str
) -> None:
    for kind in PATHS:
        assert refused(asked(served, kind, fields))["param"].startswith(param)


def test_minus_one_is_no_limit(served: Served) -> None:
    window = served.engine().model.max_context
    text = "q" * (window - 100)  # so that an answer without a limit is short
    bias = {"logit_bias": {str(LETTERS[0]): 100}}
    for kind, name, body in (
        ("chat", "max_completion_tokens", {"messages": [said(text)]}),
        ("text", "max_tokens", {"prompt": text}),
    ):
        answer = asked(served, kind, body, bias, {name: -1})
        assert answer.json()["usage"]["total_tokens"] >= window
    body = {"model": served.service.model, "input": text, "max_output_tokens": -1}
    assert served.post("/v1/responses", body).status_code == 200


def test_a_plan_is_of_the_prompt_that_the_same_fields_make(served: Served) -> None:
    def plan(**fields: Any) -> Any:
        body = {"model": served.service.model, "messages": [said()], **fields}
        return served.post("/v1/ragfuse/explain", body)

    tools, none, plain = (
        plan(**fields).json()["tokens"]
        for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {})
    )
    assert tools > none == plain


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_who_speaks_and_what_an_assistant_thought_are_handed_to_the_template(
    served: Served, name: str
) -> None:
    messages = [
        {**said(), "name": "Ann"},
        {**said("Hm", "assistant"), name: "I count."},
        {**said("Sure?"), name: "not mine"},
    ]
    ask = chat_requests(ChatRequest(model="m", messages=messages))[0]
    assert [turn.reasoning for turn in ask.question] == ["", "I count.", ""]
    assert [turn.name for turn in ask.question] == ["Ann", "", ""]
    answer = asked(served, "chat", {"messages": [{**said(), "name": "<|user|>"}]})
    assert refused(answer)["param"] == "messages.0.name"


@pytest.mark.parametrize(("n", "status"), [(256, 200), (257, 400)])
def test_a_title_has_256_characters_at_most(served: Served, n: int, status: int) -> None:
    answer = served.chat(max_tokens=1, documents=[{"text": "A text.", "title": "ü" * n}])
    assert answer.status_code == status
