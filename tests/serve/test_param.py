"""Which field of a request an error is about, in `param`: what the engine refuses has the name that the client gave."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.kit import Served, said

LONG = "word " * 9000
MANY = 1_000_000


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **fields}}


CHAT = [
    ({"max_tokens": MANY}, "max_tokens"),
    ({"max_completion_tokens": MANY}, "max_completion_tokens"),
    ({"messages": [said(LONG)]}, "messages"),
    ({"documents": [LONG]}, "messages"),
    ({"messages": []}, "messages"),
    ({"session_id": "a\nb"}, "session_id"),
    ({"ragfuse": {"policy": "hkdv"}}, "ragfuse.policy"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool("no name")]}, "tools"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools"),
    ({"tools": [tool()], "tool_choice": "none such"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "none"}}}}, "response_format"),
    ({"guided_grammar": "start: start"}, "guided_grammar"),
    ({"tools": [tool(parameters={"properties": {"a": {"type": "none"}}})]}, "tools"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    ({"min_tokens": MANY}, "min_tokens"),
    ({"chat_template_kwargs": {"none": 1}}, "chat_template_kwargs"),
    (
        {"messages": [said(), {"role": "assistant", "content": ""}], "continue_final_message": True},
        "continue_final_message",
    ),
    ({"messages": [], "pml": "<prompt schema='none'/>"}, "pml"),
    ({"messages": [], "pml": "<prompt schema='none'/>", "session_id": "x"}, "session_id"),
    ({"messages": [], "pml": "<prompt schema='none'/>", "tools": [tool()]}, "tools"),
]
OTHERS = [
    ("completions", {"prompt": "Who?", "max_tokens": MANY}, "max_tokens"),
    ("completions", {"prompt": LONG}, "prompt"),
    ("completions", {"prompt": [1, 2], "session_id": "x"}, "prompt"),
    ("responses", {"input": "Who?", "max_output_tokens": MANY}, "max_output_tokens"),
    ("responses", {"input": LONG}, "input"),
    ("responses", {"input": ""}, "input"),
    ("responses", {"input": "Who?", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ("responses", {"input": "Who?", "text": {"verbosity": "low"}}, "text.verbosity"),
    ("responses", {"input": "Who?", "text": {"format": {"type": "none"}}}, "text.format"),
    ("ragfuse/explain", {"prompt": "Who?", "max_tokens": MANY}, "max_tokens"),
    ("ragfuse/explain", {"messages": [said()], "session_id": "a\nb"}, "session_id"),
    ("ragfuse/tokens", {"messages": [said(LONG)]}, "messages"),
    ("ragfuse/tokens", {"messages": [said()], "tools": [tool(), tool()]}, "tools"),
    ("ragfuse/schemas", {"pml": f"<schema name='s'>{LONG}</schema>"}, "pml"),
    ("ragfuse/documents", {"name": "a", "text": " "}, "text"),
    ("ragfuse/documents", {"name": "a", "pdf": "%"}, "pdf"),
]


def error_of(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    model = {} if path.startswith("ragfuse/") else {"model": served.service.model}
    answer = httpx.post(f"{served.url}/{path}", json={**model, **body}, timeout=100)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize(("body", "param"), CHAT, ids=range(len(CHAT)))
def test_a_chat_that_is_refused_names_its_field(served: Served, body: dict[str, Any], param: str) -> None:
    assert error_of(served, "chat/completions", {"messages": [said()], **body})["param"] == param


@pytest.mark.parametrize("is_streamed", [True, False])
def test_so_does_one_that_was_to_be_streamed(served: Served, is_streamed: bool) -> None:
    body = {"messages": [said()], "max_tokens": MANY, "stream": is_streamed}
    error = error_of(served, "chat/completions", body)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize(("path", "body", "param"), OTHERS, ids=range(len(OTHERS)))
def test_other_requests_that_are_refused_name_theirs(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(served, path, body)["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"messages": [said()], "session_id": "a\nb"}, "session_id is "),
        ("chat/completions", {"messages": [said()], "min_tokens": MANY}, f"min_tokens is {MANY}"),
        ("responses", {"input": "Who?", "reasoning": {"effort": "low"}}, "reasoning.effort is 'low'"),
    ],
)
def test_the_message_has_the_name_of_the_field(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    assert error_of(served, path, body)["message"].startswith(words)


@pytest.mark.parametrize(("query", "status"), [("key=abc", 400), ("source=a&all=true", 400), ("key=0123456789ab", 404)])
def test_a_parameter_of_a_path_has_its_own_name(served: Served, query: str, status: int) -> None:
    answer = httpx.delete(f"{served.url}/ragfuse/entries?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "key")
