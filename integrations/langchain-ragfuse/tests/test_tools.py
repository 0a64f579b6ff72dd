"""Tools, structured output and grammars: what is asked for comes out, also of a random model."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_ragfuse import ChatRagFuse, RagFuseLLM
from langchain_ragfuse.messages import to_ragfuse_messages
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from ragfuse import Engine, Grammar, InputError


class Paint(BaseModel):
    """Paint a door."""

    colour: Literal["red", "green", "blue"] = Field(description="which paint to take")
    coats: Literal[1, 2, 3]


class PaintDict(TypedDict):
    """Paint a door."""

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


@tool
def paint(colour: Literal["red", "green", "blue"], coats: Literal[1, 2, 3]) -> str:
    """Paint a door."""
    return f"The door is {colour} now."


@tool
def knock(times: Literal[1, 2]) -> str:
    """Knock at a door."""
    return "Nobody is there."


SCHEMA = {**Paint.model_json_schema(), "title": "paint_it"}


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine, max_tokens=150)


def check(message: Any, name: str) -> None:
    """One call of a tool, that it can be called with."""
    (call,) = message.tool_calls
    assert (call["name"], call["type"], bool(call["id"])) == (name, "tool_call", True)
    Paint.model_validate(call["args"])
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert message.content == ""
    usage = message.usage_metadata
    assert usage["output_tokens"] > 5
    assert set(usage["input_token_details"]) == {"cache_read", "cache_creation"}


@pytest.mark.parametrize(
    "choice",
    ["any", "required", True, "paint", {"type": "function", "function": {"name": "paint"}}],
)
def test_a_tool_that_must_be_called_is_called(choice: Any, llm: ChatRagFuse) -> None:
    message = llm.bind_tools([paint], tool_choice=choice).invoke("Paint my door.")
    check(message, "paint")
    assert paint.invoke(message.tool_calls[0]).content.startswith("The door is ")


def test_of_several_tools_the_named_one_is_called_or_none(llm: ChatRagFuse) -> None:
    found = {
        choice: llm.bind_tools([paint, knock], tool_choice=choice).invoke("Hello?")
        for choice in ("knock", "any", "none")
    }
    names = {choice: [call["name"] for call in each.tool_calls] for choice, each in found.items()}
    assert names["knock"] == ["knock"]
    assert set(names["any"]) <= {"paint", "knock"}
    assert names["any"]
    assert names["none"] == []
    assert found["none"].content
    assert "<tool_call>" not in found["none"].content


@pytest.mark.parametrize("given", [paint, Paint, PaintDict, SCHEMA, convert_to_openai_tool(paint)])
def test_tools_come_in_every_form(given: Any, llm: ChatRagFuse) -> None:
    name = convert_to_openai_tool(given)["function"]["name"]
    check(llm.bind_tools([given], tool_choice="any", strict=True).invoke("Paint my door."), name)


async def test_a_stream_has_its_calls_in_the_last_chunk(llm: ChatRagFuse) -> None:
    bound = llm.bind_tools([paint], tool_choice="any")
    streams = [
        list(bound.stream("Paint my door.")),
        [each async for each in bound.astream("Paint my door.")],
    ]
    for chunks in streams:
        assert all(not chunk.tool_call_chunks and chunk.content == "" for chunk in chunks[:-1])
        assert [each["index"] for each in chunks[-1].tool_call_chunks] == [0]
        assert chunks[-1].chunk_position == "last"
        total = sum(chunks[1:], chunks[0])
        assert isinstance(total, AIMessageChunk)
        check(total, "paint")


def test_a_conversation_with_tools_reaches_the_template(llm: ChatRagFuse, engine: Engine) -> None:
    args = {"colour": "green", "coats": 2}
    call = {"name": "paint", "args": args, "id": "abc123", "type": "tool_call"}
    used = {"type": "tool_use", "id": "abc123", "name": "paint", "input": args}
    said = [{"type": "text", "text": "I will."}, {"type": "thinking", "thinking": "Green?"}, used]
    messages: list[BaseMessage] = [
        HumanMessage("Paint my door."),
        AIMessage(said, tool_calls=[call]),
        ToolMessage("The door is green now.", tool_call_id="abc123"),
    ]
    turns = to_ragfuse_messages(messages)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    (asked,) = turns[1].tool_calls
    assert (asked.name, asked.arguments) == ("paint", args)
    assert (turns[2].tool_call_id, turns[2].name) == ("abc123", "paint")
    text = engine.model.tokenizer.decode(engine.prompt(turns).token_ids)
    for part in ("Paint my door.", "I will.", '"green"', "The door is green now."):
        assert part in text
    assert "Green?" not in text
    assert llm.bind_tools([paint]).invoke(messages).usage_metadata is not None
    plain, shown = (llm.get_num_tokens_from_messages(messages, tools) for tools in (None, [paint]))
    assert plain == len(engine.prompt(turns)) < shown


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Paint, PaintDict, SCHEMA])
async def test_structured_output_has_its_schema(method: Any, schema: Any, llm: ChatRagFuse) -> None:
    structured = llm.with_structured_output(schema, method=method)
    found = structured.invoke("Paint my door.")
    assert isinstance(found, Paint if schema is Paint else dict)
    Paint.model_validate(found if isinstance(found, dict) else found.model_dump())
    assert list(structured.stream("Paint my door."))[-1] == found
    whole = llm.with_structured_output(schema, method=method, include_raw=True)
    told = await whole.ainvoke("Paint my door.")
    assert (told["parsed"], told["parsing_error"]) == (found, None)
    assert told["raw"].usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Paint, PaintDict, SCHEMA])
def test_a_structured_answer_that_is_cut_off_says_so(
    method: Any, schema: Any, engine: Engine
) -> None:
    short = ChatRagFuse(engine=engine, max_tokens=2)
    structured = short.with_structured_output(schema, method=method)
    for call in (structured.invoke, lambda asked: list(structured.stream(asked))):
        with pytest.raises(OutputParserException, match="max_tokens"):
            call("Paint my door.")
    whole = short.with_structured_output(schema, method=method, include_raw=True)
    found = whole.invoke("Paint my door.")
    assert (found["parsed"], type(found["parsing_error"])) == (None, OutputParserException)


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
def test_a_grammar_holds_every_answer(kind: Any, engine: Engine) -> None:
    def said(llm: Any, **call: Any) -> str:
        answer = llm.invoke("Is the door green?", **call)
        return str(answer if isinstance(answer, str) else answer.content)

    llm = kind(engine=engine, grammar=Grammar.choice(["yes", "no"]))
    assert said(llm) in ("yes", "no")
    assert said(llm, grammar=Grammar.regex("[0-9]{4}")).isdigit()
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    Paint.model_validate_json(said(llm, response_format=form, max_tokens=90))
    (answer,) = kind(engine=engine, grammar=Grammar.regex("[ab]{5}")).batch(["Well?"])
    assert re.fullmatch("[ab]{5}", answer if isinstance(answer, str) else answer.content)


BROKEN = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
BAD = {"type": "function", "function": {"name": "broken", "parameters": BROKEN}}


def test_a_schema_that_cannot_be_compiled_is_named(llm: ChatRagFuse) -> None:
    with pytest.raises(InputError, match=r"'broken'"):
        llm.bind_tools([paint, BAD]).invoke("Well?")
    with pytest.raises(InputError, match=r"nonsense"):
        llm.with_structured_output(BROKEN).invoke("Well?")
    with pytest.raises(InputError, match=r"web_search"):
        llm.bind_tools([{"type": "web_search"}]).invoke("Well?")
    with pytest.raises(InputError, match="knows no method 'yaml'"):
        llm.with_structured_output(Paint, method="yaml")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave one of them out"):
        llm.bind_tools([paint, knock], tool_choice="any").invoke(
            "Well?", grammar=Grammar.regex("a")
        )
