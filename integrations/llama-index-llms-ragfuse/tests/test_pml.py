"""Prompts in PML through LlamaIndex's LLM: predictions, chats, completions, all eight calls; values
stay text.
"""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.llms.ragfuse import PMLPromptTemplate, RagFuseLLM, traces
from pydantic import BaseModel

from integrations.tests.pml import PROMPT, TRIP, VALUES, WHOLE, journey
from ragfuse import Engine, InputError
from ragfuse.errors import PMLError
from ragfuse.schemas.pml import parse_prompt

RICH = """{% chat role="system" %}You know everything about {{ topic }}, and say it well.{% endchat %}
{% chat role="user" %}{{ query_str }}{% endchat %}"""


class Door(BaseModel):
    """A door."""

    is_open: bool


@pytest.fixture
def template() -> PMLPromptTemplate:
    return PMLPromptTemplate(schema=TRIP, prompt=PROMPT)


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


async def last(stream: Any) -> Any:
    return [response async for response in await stream][-1]


async def test_every_call_answers_as_the_engine_does_and_says_what_was_reused(
    template: PMLPromptTemplate, llm: RagFuseLLM, engine: Engine
) -> None:
    with traces() as seen:
        first = llm.predict(template, **VALUES)
    assert [trace.modules for trace in seen] == [(".", "plan")]
    expected = engine.answer(parse_prompt(WHOLE))
    assert first == await llm.apredict(template, **VALUES) == expected.text != ""
    assert "".join(llm.stream(template, **VALUES)) == expected.text
    assert "".join([text async for text in await llm.astream(template, **VALUES)]) == expected.text
    messages, text = template.format_messages(**VALUES), template.format(**VALUES)
    chats = [llm.chat(messages), await llm.achat(messages), list(llm.stream_chat(messages))[-1]]
    chats.append(await last(llm.astream_chat(messages)))
    completions = [
        llm.complete(text, formatted=True),
        await llm.acomplete(text),
        list(llm.stream_complete(text))[-1],
    ]
    completions.append(await last(llm.astream_complete(text, formatted=True)))
    assert {each.message.content for each in chats} | {each.text for each in completions} == {
        expected.text
    }
    for response in (*chats, *completions):
        assert response.raw["ragfuse"]["modules"] == [".", "plan"]
        assert (
            response.raw["usage"]["prompt_tokens_details"]["cached_tokens"]
            == expected.trace.tokens_reused
            > 0
        )


def test_a_prompt_function_and_some_values_ahead_are_taken(llm: RagFuseLLM, engine: Engine) -> None:
    template = PMLPromptTemplate(journey, question="{question}")
    week = template.partial_format(days="a week")
    assert (
        llm.predict(week, question="Where?")
        == engine.answer(journey("a week").asking("Where?")).text
    )
    assert template.kwargs == {}
    with pytest.raises(InputError, match="variable 'days' is missing"):
        llm.predict(template, question="Where?")


async def test_an_object_is_asked_for_behind_it(
    template: PMLPromptTemplate, engine: Engine
) -> None:
    llm = RagFuseLLM(engine=engine, max_tokens=60)
    with traces() as seen:
        found = llm.structured_predict(Door, template, **VALUES)
    assert isinstance(found, Door)
    assert seen[0].modules == (".", "plan")
    assert seen[0].tokens > len(engine.prompt(parse_prompt(WHOLE))) + len("is_open")
    assert await llm.astructured_predict(Door, template, **VALUES) == found


def test_it_stands_alone(template: PMLPromptTemplate, engine: Engine) -> None:
    told = RagFuseLLM(engine=engine, system_prompt="Be brief.")
    with pytest.raises(InputError, match="only message"):
        told.predict(template, **VALUES)
    with pytest.raises(PMLError, match="days"):
        RagFuseLLM(engine=engine).predict(template, **{**VALUES, "days": "d" * 99})
