"""Fields that shape an answer: penalties, biases, prompts as ids, thoughts, what templates
are told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragfuse.serve.requests import chat_requests
from ragfuse.serve.schema import ChatRequest
from ragfuse.text.chat_template import ChatTemplate
from tests.kits.serve import CHAT, TEXT, TOOL, Served, events, refused, said
from tests.kits.thinking import thinking_model

PROMPT = "The keeper of the northern lighthouse"


def text(served: Served, **fields: Any) -> Any:
    answer = served.post(TEXT, {"model": served.service.model, "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(served: Served, path: str, **fields: Any) -> list[Any]:
    body = {"model": served.service.model, "stream": True, **fields}
    return [each["choices"][0] for each in events(served.post(path, body))]


# prompts as ids


def test_a_prompt_of_token_ids_is_the_text_that_they_are(served: Served) -> None:
    engine = served.engine()
    ids = [*engine.model.bos, *engine.tokens(PROMPT)]
    wanted = text(served, max_tokens=8)["choices"][0]["text"]
    both = text(served, prompt=[ids, ids[:-3]], max_tokens=8)
    assert both["choices"][0]["text"] == wanted
    assert both["usage"]["prompt_tokens"] == 2 * len(ids) - 3
    assert text(served, prompt=ids, max_tokens=8)["choices"][0]["text"] == wanted


def test_ids_that_cannot_be_a_prompt_are_refused(served: Served) -> None:
    body = {"model": served.service.model, "prompt": [[5], [10**6]]}
    assert refused(served.post(TEXT, body))["param"] == "prompt"


# tools


@pytest.mark.parametrize("limit", [1, 20])
def test_a_call_that_there_is_no_room_for_ends_at_the_length(served: Served, limit: int) -> None:
    tools = [{"type": "function", "function": TOOL}]
    told = served.chat(tools=tools, tool_choice="required", max_tokens=limit).json()
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

    def names(template: object) -> frozenset[str]:
        return ChatTemplate(SimpleNamespace(chat_template=template)).names

    assert names(source) == {"enable_thinking", "budget", "effort"}
    assert names("{% if") == names(None) == frozenset()
    assert "budget" in names({"default": "x", "tool_use": source})


def test_variables_of_a_template_are_handed_to_it() -> None:
    fields = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}
    request = ChatRequest(model="m", messages=[said()], **fields)
    told = {"enable_thinking": True, "reasoning_effort": "low"}
    assert chat_requests(request)[0].ask.chat_template_kwargs == told


# thoughts


@pytest.fixture(scope="module")
def thinking(
    make_server: Callable[..., Served], tiny_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A server over a model whose template opens a thought in every prompt, and whose words are
    mostly its end.
    """
    folder = tmp_path_factory.mktemp("thinking") / "model"
    return make_server(model=thinking_model(tiny_path, folder), max_tokens=40)


def test_thoughts_come_apart_from_the_answer_streamed_too(thinking: Served) -> None:
    for seed in range(20):
        ask = {"temperature": 1.0, "seed": seed, "max_tokens": 40}
        message = thinking.chat(**ask).json()["choices"][0]["message"]
        if message.get("reasoning_content") and message["content"]:
            break
    thought, content = message["reasoning_content"], message["content"]
    assert thought
    assert content
    assert "</think>" not in content + thought
    choices = streamed(thinking, CHAT, messages=[said()], **ask)
    deltas = [each["delta"] for each in choices]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == thought
    assert "".join(each.get("content", "") for each in deltas) == content
    kinds = ["reasoning_content" in each for each in deltas if each and "role" not in each]
    assert kinds == sorted(kinds, reverse=True)  # all thoughts before all text
    assert sum(kinds) > 1


def test_thoughts_in_a_plain_text_stay_in_it(thinking: Served) -> None:
    choice = text(thinking, prompt="<think>", temperature=1.0, seed=5, max_tokens=40)["choices"][0]
    assert "reasoning_content" not in choice
    assert "</think>" in choice["text"]
