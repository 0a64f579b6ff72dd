"""Prompts in PML through LangChain's pipes: both models, sync, async, streamed and in batches;
values stay text.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnablePassthrough
from langchain_ragfuse import ChatRagFuse, PMLPromptTemplate, RagFuseLLM

from integrations.tests.pml import HOSTILE, PROMPT, TRIP, VALUES, WHOLE, journey
from ragfuse import Engine, InputError
from ragfuse.errors import PMLError
from ragfuse.schemas.pml import parse_prompt


@pytest.fixture
def template() -> PMLPromptTemplate:
    return PMLPromptTemplate(schema=TRIP, prompt=PROMPT)


def trace_of(message: Any) -> dict[str, Any]:
    return message.response_metadata["ragfuse"]


async def test_a_pipe_answers_as_the_engine_does_and_says_what_was_reused(
    template: PMLPromptTemplate, engine: Engine
) -> None:
    chain = template | ChatRagFuse(engine=engine)
    first = chain.invoke(VALUES)
    assert trace_of(first)["modules"] == [".", "plan"]
    assert engine.schemas.names() == ["trip"]
    expected = engine.answer(parse_prompt(WHOLE))
    assert first.content == (await chain.ainvoke(VALUES)).content == expected.text != ""
    assert first.usage_metadata is not None
    assert (
        first.usage_metadata["input_token_details"]["cache_read"] == expected.trace.tokens_found > 0
    )
    streamed = list(chain.stream(VALUES))
    assert "".join(str(chunk.content) for chunk in streamed) == expected.text
    assert trace_of(streamed[-1])["modules"] == [".", "plan"]
    assert "".join([str(chunk.content) async for chunk in chain.astream(VALUES)]) == expected.text
    others = [VALUES, {**VALUES, "question": "Where?"}]
    assert [each.content for each in chain.batch(others)] == [
        each.content for each in await chain.abatch(others)
    ]


@pytest.mark.parametrize("variable", ["days", "question"])
def test_values_are_text_whatever_they_look_like(
    template: PMLPromptTemplate, engine: Engine, variable: str
) -> None:
    values = {**VALUES, variable: HOSTILE}
    value = template.invoke(values)
    message, text = (
        ChatRagFuse(engine=engine).invoke(value),
        RagFuseLLM(engine=engine).generate_prompt([value]),
    )
    for trace in (trace_of(message), (text.generations[0][0].generation_info or {})["ragfuse"]):
        assert trace["modules"] == [".", "plan"]
    prompt = engine.prompt(template.template.fill(values).request)
    assert HOSTILE in engine.model.text(list(prompt.token_ids))
    assert trace_of(message)["tokens"] == len(prompt)


def test_a_schema_is_registered_once(template: PMLPromptTemplate, engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine).bind(max_tokens=2)
    (template | llm).batch([VALUES, VALUES, VALUES])
    assert template.register(llm, progress=False).encoded == 0
    heard: list[Any] = []
    edited = PMLPromptTemplate(TRIP.replace("Fridays", "Sundays"), PROMPT)
    assert edited.register(llm, progress=heard.append).encoded == heard[-1].encoded == 1


def test_a_prompt_function_and_partial_values_are_taken(engine: Engine) -> None:
    template = PMLPromptTemplate(journey, question="{question}")
    assert (template.input_variables, template.optional_variables) == (
        ["days", "question"],
        ["by_train"],
    )
    chain = (
        {"question": RunnablePassthrough()}
        | template.partial(days="a week")
        | ChatRagFuse(engine=engine)
    )
    answer = chain.invoke("What do I pack?")
    assert answer.content == engine.answer(journey("a week").asking("What do I pack?")).text
    by_train = (template | ChatRagFuse(engine=engine)).invoke({**VALUES, "by_train": True})
    assert trace_of(by_train)["modules"] == [".", "by_train"]
    with pytest.raises(KeyError, match="question"):
        template.invoke({"days": "a week"})


def test_it_stands_alone_and_wants_a_model_of_ragfuse(
    template: PMLPromptTemplate, engine: Engine
) -> None:
    llm, messages = ChatRagFuse(engine=engine), template.invoke(VALUES).to_messages()
    with pytest.raises(InputError, match="only message"):
        llm.invoke([*messages, HumanMessage("And now?")])
    with pytest.raises(PMLError, match="days"):
        (template | llm).invoke({**VALUES, "days": "d" * 99})
    assert llm.get_num_tokens_from_messages(messages) == len(engine.prompt(parse_prompt(WHOLE)))
