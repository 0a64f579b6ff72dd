"""Tools and structured output in every form that LangChain has for them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_ragfuse import ChatRagFuse
from typing_extensions import TypedDict

from integrations.tests.doors import Paint, paint
from ragfuse import Engine, InputError


class PaintDict(TypedDict):
    """Paint a door."""

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


SCHEMA = {**Paint.model_json_schema(), "title": "paint_it"}
TOOL = tool(paint)
ASKED = "Paint my door."


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine, max_tokens=150)


@pytest.mark.parametrize("given", [TOOL, Paint, PaintDict, SCHEMA, convert_to_openai_tool(TOOL)])
def test_a_tool_comes_in_every_form(given: Any, llm: ChatRagFuse) -> None:
    message = llm.bind_tools([given], tool_choice="any", strict=True).invoke(ASKED)
    ((name, arguments),) = ((call["name"], call["args"]) for call in message.tool_calls)
    assert name == convert_to_openai_tool(given)["function"]["name"]
    assert Paint.model_validate(arguments)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Paint, PaintDict, SCHEMA])
async def test_structured_output_has_its_schema(method: Any, schema: Any, llm: ChatRagFuse) -> None:
    structured = llm.with_structured_output(schema, method=method)
    found = structured.invoke(ASKED)
    assert isinstance(found, Paint if schema is Paint else dict)
    assert Paint.model_validate(found if isinstance(found, dict) else found.model_dump())
    assert list(structured.stream(ASKED))[-1] == found
    raw = await llm.with_structured_output(schema, method=method, include_raw=True).ainvoke(ASKED)
    assert (raw["parsed"], raw["parsing_error"]) == (found, None)
    assert raw["raw"].usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Paint, SCHEMA])
def test_a_structured_answer_that_is_cut_off_is_an_error(
    method: Any, schema: Any, llm: ChatRagFuse
) -> None:
    llm = ChatRagFuse(engine=llm.get_engine(), max_tokens=2)
    structured = llm.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="max_tokens"):
        structured.invoke(ASKED)
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(structured.stream(ASKED))
    found = llm.with_structured_output(schema, method=method, include_raw=True).invoke(ASKED)
    assert (found["parsed"], type(found["parsing_error"])) == (None, OutputParserException)


def test_a_method_that_does_not_exist_is_refused_by_its_name(llm: ChatRagFuse) -> None:
    with pytest.raises(InputError, match="yaml"):
        llm.with_structured_output(Paint, method="yaml")  # type: ignore[arg-type]
