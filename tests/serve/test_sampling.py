"""Fields that shape an answer: penalties, biases, prompts as ids, echo, scoring, thoughts, what
templates are told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ragfuse import Engine
from ragfuse.engine.options import ends_of
from ragfuse.serve.keys import APITenant
from ragfuse.serve.requests import chat_requests
from ragfuse.serve.schema import ChatRequest
from ragfuse.text.chat_template import ChatTemplate
from tests.serve.kit import Served, said, serving, settings_of, with_documents

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


# prompts as ids, echo, scoring


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


def slow_scores(engine: Engine, ids: Sequence[int]) -> list[float]:
    """Of each id but the first, by a forward of all ids before it."""
    found = []
    for at in range(1, len(ids)):
        with torch.no_grad():
            logits = engine.model.model(torch.tensor([list(ids[:at])])).logits[0, -1]
        found.append(float(logits.float().log_softmax(-1)[ids[at]]))
    return found


def test_an_echo_says_the_prompt_and_how_likely_its_tokens_are(served: Served) -> None:
    engine = engine_of(served)
    told = text(served, echo=True, max_tokens=1, logprobs=2)
    choice = told["choices"][0]
    assert choice["text"][:-1] == PROMPT
    assert choice["finish_reason"] == "length"
    ids = list(engine.prompt(PROMPT).token_ids)
    assert told["usage"]["prompt_tokens"] == len(ids)
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
    assert found["token_logprobs"][1:-1] == pytest.approx(slow_scores(engine, ids), abs=1e-3)
    # special tokens are all spelled ""
    assert all(1 <= len(each) <= 2 for each in found["top_logprobs"][1:])
    assert len(found["tokens"]) == len(found["text_offset"]) == len(ids) + 1
    assert "".join(found["tokens"][:-1]) == PROMPT


def test_scores_do_not_depend_on_how_many_tokens_are_computed_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(served)
    ids = engine.tokens(PROMPT)
    whole = [score for _, score in engine.runtime.score(ids)]
    monkeypatch.setattr("ragfuse.hf.model.SCORED_TOKENS", 5)
    parts = [score for _, score in engine.runtime.score(ids)]
    assert [each[0] for each in parts[1:] if each] == pytest.approx(
        [each[0] for each in whole[1:] if each], abs=1e-4
    )


def test_an_echo_stands_before_the_answer_streamed_too(served: Served) -> None:
    plain = text(served, max_tokens=6, logprobs=1)["choices"][0]
    told = text(served, max_tokens=6, logprobs=1, echo=True)
    assert told["choices"][0]["text"] == PROMPT + plain["text"]
    assert told["choices"][0]["logprobs"]["tokens"][-6:] == plain["logprobs"]["tokens"]
    assert told["usage"]["completion_tokens"] == 6
    pieces = [
        each["choices"][0]
        for each in events(served, "/v1/completions", prompt=PROMPT, max_tokens=6, echo=True)
    ]
    assert "".join(each["text"] for each in pieces) == PROMPT + plain["text"]
    assert pieces[0]["text"] == PROMPT
    two = text(served, prompt=["Once", "Twice"], max_tokens=1, echo=True)["choices"]
    assert [(each["index"], each["text"][:-1]) for each in two] == [(0, "Once"), (1, "Twice")]


def test_scores_do_not_depend_on_what_was_drawn(served: Served) -> None:
    """The body of lm-eval's `local-completions`, whose sums leave out the last entry: that of the
    drawn token.
    """
    engine = engine_of(served)
    end, *_ = ends_of(engine.model)
    texts = [f"{PROMPT} counted {number} ships" for number in range(10)]
    prompts = [[*engine.model.bos, *engine.tokens(each)] for each in texts]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for bias in ({}, {"logit_bias": {str(end): 100}}):
        choices = text(served, **body, **bias)["choices"]
        assert [each["index"] for each in choices] == list(range(10))
        for ids, choice in zip(prompts, choices, strict=True):
            found = choice["logprobs"]
            assert (
                len(found["tokens"])
                == len(found["top_logprobs"])
                == len(found["token_logprobs"])
                == len(ids) + 1
            )
            assert found["token_logprobs"][1:-1] == pytest.approx(
                slow_scores(engine, ids), abs=1e-3
            )


def test_an_echo_of_documents_says_them(served: Served) -> None:
    told = text(served, prompt="Who?", max_tokens=1, echo=True, **with_documents(1))["choices"][0][
        "text"
    ]
    assert told.startswith("Passage northern.")
    assert told[:-1].endswith("Who?")
    assert "[[" not in told


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
