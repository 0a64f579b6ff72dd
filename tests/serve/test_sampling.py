"""Fields that shape an answer: penalties, biases, prompts as ids, thoughts, what templates
are told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragfuse import Engine
from ragfuse.serve.keys import APITenant
from ragfuse.serve.requests import chat_requests
from ragfuse.serve.schema import ChatRequest
from ragfuse.text.chat_template import ChatTemplate
from tests.serve.kit import Served, said, serving, settings_of

PROMPT = "The keeper of the northern lighthouse"


def engine_of(served: Served) -> Engine:
    return served.service.engine(APITenant(""))


def text(served: Served, **fields: Any) -> Any:
    answer = served.post(
        "/v1/completions", {"model": served.service.model, "prompt": PROMPT, **fields}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def chatted(served: Served, **fields: Any) -> Any:
    answer = served.chat(**fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(served: Served, path: str, **fields: Any) -> list[Any]:
    answer = served.post(path, {"model": served.service.model, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    lines = [
        line.removeprefix("data: ")
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


# prompts as ids


def test_a_prompt_of_token_ids_is_the_text_that_they_are(served: Served) -> None:
    engine = engine_of(served)
    ids = [*engine.model.bos, *engine.tokens(PROMPT)]
    wanted = text(served, max_tokens=8)["choices"][0]["text"]
    assert text(served, prompt=ids, max_tokens=8)["choices"][0]["text"] == wanted
    both = text(served, prompt=[ids, ids[:-3]], max_tokens=8)
    assert both["choices"][0]["text"] == wanted
    assert both["usage"]["prompt_tokens"] == 2 * len(ids) - 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[5], [10**6]]}, "prompt"),
        ({"prompt": [5], "documents": ["A text."]}, "documents"),
        ({"prompt": [5], "pml": "<prompt schema='x'/>"}, "pml"),
    ],
)
def test_ids_that_cannot_be_a_prompt_are_told(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    body = {"model": served.service.model, **fields}
    assert refused(served.post("/v1/completions", body))["param"] == param


# tools

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("fan", "lamp", "door")
]


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_a_call_that_there_is_no_room_for_ends_at_the_length(served: Served, limit: int) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "fan"}}):
        told = chatted(served, tools=TOOLS, tool_choice=choice, max_tokens=limit)
        assert told["choices"][0]["finish_reason"] == "length"
        assert told["usage"]["completion_tokens"] == limit


# what the template is told


def test_what_a_template_reads_is_found_in_its_code() -> None:
    source = (
        "think or not {# reasoning_effort #}{% for each in messages %}{% endfor %}{% if"
        " enable_thinking is defined and not enable_thinking %}verbosity{% endif %}{{ 'in text' +"
        " messages[0].effort + (budget | default('x')) }}{% set mood = 'good' %}{{ mood }}{% macro"
        " told(content) %}{{ content | trim }}{% endmacro %}{{ told(messages[0].content) }}{%"
        " generation %}{% if effort is not defined %}{% set effort = strftime_now('%d') %}{% endif"
        " %}{{ effort }}{% endgeneration %}"
    )
    names = ChatTemplate.of(source, ()).names
    assert names == {"enable_thinking", "budget", "effort"}
    assert ChatTemplate.of("{% if", ()).names == frozenset()
    assert "budget" in ChatTemplate.of({"default": "x", "tool_use": source}, ()).names
    assert ChatTemplate.of(None, ()) == ChatTemplate()


def test_no_effort_turns_off_the_thoughts_of_a_template_that_has_a_switch() -> None:
    reads = ChatTemplate.of(
        "{% if enable_thinking %}{{ reasoning_effort }}{% endif %}", ["<think>", "</think>"]
    )
    body = {"model": "m", "messages": [said()]}

    def told(template: ChatTemplate = reads, **fields: Any) -> Any:
        return chat_requests(ChatRequest(**body, **fields), template)[0].ask.chat_template_kwargs

    assert told() == {}
    assert told(enable_thinking=False) == {"enable_thinking": False}
    assert told(reasoning_effort="low", chat_template_kwargs={"enable_thinking": True}) == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }
    nothing = ChatTemplate()  # of which no model thinks anything
    assert told(nothing, enable_thinking=False) == {"enable_thinking": False}
    assert told(nothing, reasoning_effort="none") == {"reasoning_effort": "none"}
    switch = ChatTemplate.of("{% if enable_thinking %}<think>{% endif %}", ["<think>", "</think>"])
    assert told(switch, reasoning_effort="none") == {"enable_thinking": False}
    # which that template reads itself
    assert told(reasoning_effort="none") == {"reasoning_effort": "none"}


# thoughts


@pytest.fixture(scope="module")
def thinking(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a model whose template opens a thought in every prompt, and whose words are
    mostly its end.
    """
    from tests.thinking import thinking_model

    home = tmp_path_factory.mktemp("thinking")
    folder = thinking_model(tiny_path, home / "model")
    settings = settings_of(folder, home, max_tokens=40)
    with serving(settings) as made:
        yield made


def test_thoughts_come_apart_from_the_answer_streamed_too(thinking: Served) -> None:
    both = (
        (ask, message)
        for seed in range(20)
        for ask in ({"temperature": 1.0, "seed": seed, "max_tokens": 40},)
        if len(message := chatted(thinking, **ask)["choices"][0]["message"]) == 4
        and message["content"]
    )
    ask, message = next(both)
    assert message["reasoning_content"]
    assert "</think>" not in message["content"] + message["reasoning_content"]
    deltas = [
        each["choices"][0]["delta"]
        for each in events(thinking, "/v1/chat/completions", messages=[said()], **ask)
    ]
    assert (
        "".join(each.get("reasoning_content", "") for each in deltas)
        == message["reasoning_content"]
    )
    assert "".join(each.get("content", "") for each in deltas) == message["content"]
    kinds = ["reasoning_content" in each for each in deltas if each and "role" not in each]
    assert kinds == sorted(kinds, reverse=True)  # all thoughts before all text
    assert sum(kinds) > 1


def test_a_text_is_gone_on_with_as_it_stands(thinking: Served) -> None:
    choice = text(thinking, prompt="<think>", temperature=1.0, seed=5, max_tokens=40)["choices"][0]
    assert "reasoning_content" not in choice
    assert "</think>" in choice["text"]
