"""The generator by itself: messages, options, streams, tools, forms, and errors that say what is
wanted.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any, Literal

import pytest
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.generators.utils import _convert_streaming_chunks_to_chat_message
from haystack.core.component import Component
from haystack.dataclasses import (
    ChatMessage,
    ChatRole,
    ImageContent,
    StreamingChunk,
    TextContent,
    ToolCall,
)
from haystack.tools import Tool, Toolset
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator
from haystack_integrations.components.generators.ragfuse.messages import to_ragfuse_messages
from pydantic import BaseModel

from ragfuse import Engine, InputError, Settings, SettingsError

ASKED = [ChatMessage.from_user("Paint my door.")]


class Paint(BaseModel):
    """Paint a door."""

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


def paint(colour: str, coats: int) -> str:
    return f"The door is {colour} now, {coats} times."


PAINT = Tool(
    name="paint", description="Paint a door.", parameters=Paint.model_json_schema(), function=paint
)
KNOCK = Tool(
    name="knock",
    description="Knock at a door.",
    parameters={"type": "object", "properties": {"times": {"enum": [1, 2]}}, "required": ["times"]},
    function=paint,
)


@pytest.fixture
def llm(engine: Engine) -> RagfuseChatGenerator:
    return RagfuseChatGenerator(engine=engine)


def replied(llm: RagfuseChatGenerator, messages: Any = ASKED, **given: Any) -> ChatMessage:
    (reply,) = llm.run(messages, **given)["replies"]
    return reply


def test_it_is_a_component_with_the_inputs_of_haystacks_own_generators(
    llm: RagfuseChatGenerator,
) -> None:
    assert isinstance(llm, Component)
    theirs = set(inspect.signature(OpenAIChatGenerator.run).parameters) - {"tools_strict"}
    for method in (RagfuseChatGenerator.run, RagfuseChatGenerator.run_async):
        assert set(inspect.signature(method).parameters) == theirs | {"documents"}
    assert llm.__haystack_input__.messages.is_mandatory  # type: ignore[attr-defined]
    assert llm.__haystack_supports_async__  # type: ignore[attr-defined]


def test_a_reply_says_what_haystack_and_ragfuse_know(
    llm: RagfuseChatGenerator, engine: Engine
) -> None:
    reply = replied(llm)
    assert reply.role == ChatRole.ASSISTANT
    answer = engine.answer(to_ragfuse_messages(ASKED))
    assert reply.text == answer.text
    assert (reply.meta["model"], reply.meta["index"], reply.meta["finish_reason"]) == (
        engine.card.name,
        0,
        "length",
    )
    assert reply.meta["usage"]["completion_tokens"] == 12
    assert reply.meta["ragfuse"]["tokens"] == reply.meta["usage"]["prompt_tokens"]
    json.dumps(reply.to_dict())
    assert replied(llm, "Paint my door.").text == reply.text
    assert llm.run([]) == {"replies": []}


def test_a_stream_is_the_reply_in_pieces(engine: Engine) -> None:
    seen: list[StreamingChunk] = []
    llm = RagfuseChatGenerator(engine=engine, streaming_callback=seen.append)
    reply = replied(llm)
    assert len(seen) > 3
    assert "".join(chunk.content for chunk in seen) == reply.text
    assert [chunk.start for chunk in seen] == [True, *[False] * (len(seen) - 1)]
    assert [chunk.index for chunk in seen] == [*[0] * (len(seen) - 1), None]
    assert seen[0].component_info is not None
    assert seen[0].component_info.type.endswith("RagfuseChatGenerator")
    assert reply.meta["completion_start_time"] == seen[0].meta["received_at"]
    others: list[StreamingChunk] = []
    assert replied(llm, streaming_callback=others.append).text == reply.text
    assert len(others) == len(seen)


def test_haystack_reads_back_from_a_stream_what_the_reply_says(llm: RagfuseChatGenerator) -> None:
    seen: list[StreamingChunk] = []
    options = {"max_tokens": 90, "tool_choice": "required"}
    for given in ({}, {"tools": [PAINT, KNOCK], "generation_kwargs": options}):
        seen.clear()
        reply = replied(llm, streaming_callback=seen.append, **given)
        joined = _convert_streaming_chunks_to_chat_message(seen)
        assert (joined.text or None, joined.tool_calls) == (reply.text or None, reply.tool_calls)
        for name in ("model", "finish_reason", "usage", "completion_start_time"):
            assert joined.meta[name] == reply.meta[name]
        assert [chunk.index for chunk in seen[:-1]] == sorted(chunk.index for chunk in seen[:-1])
    assert reply.tool_calls


async def test_awaited_answers_are_the_same(llm: RagfuseChatGenerator) -> None:
    whole, seen = replied(llm), list[StreamingChunk]()

    async def callback(chunk: StreamingChunk) -> None:
        seen.append(chunk)

    several = await asyncio.gather(
        llm.run_async(ASKED),
        llm.run_async("Paint my door."),
        llm.run_async(ASKED, streaming_callback=callback),
    )
    assert [each["replies"][0].text for each in several] == [whole.text] * 3
    assert "".join(chunk.content for chunk in seen) == whole.text
    assert await llm.run_async([]) == {"replies": []}


def test_an_error_of_a_callback_ends_the_generation(llm: RagfuseChatGenerator) -> None:
    def callback(chunk: StreamingChunk) -> None:
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        llm.run(ASKED, callback, {"max_tokens": 2000})
    assert replied(llm).text is not None


# options


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"stop": "F"},
        {"temperature": 0.9, "seed": 5},
    ],
)
def test_options_hold_for_the_generator_and_for_a_call(
    change: dict[str, Any], engine: Engine
) -> None:
    plain = RagfuseChatGenerator(engine=engine)
    fixed = RagfuseChatGenerator(engine=engine, generation_kwargs=change)
    said = replied(plain, generation_kwargs=change)
    assert said.text == replied(fixed).text
    assert said.text != replied(plain).text
    assert (
        replied(fixed, generation_kwargs={"max_tokens": 1}).meta["usage"]["completion_tokens"] == 1
    )


def test_a_misspelt_argument_or_option_is_refused_by_its_name(
    llm: RagfuseChatGenerator, engine: Engine
) -> None:
    saved = RagfuseChatGenerator(settings=engine.settings).to_dict()
    saved["init_parameters"]["generation_kwarg"] = {}
    with pytest.raises(SettingsError, match="generation_kwargs"):
        RagfuseChatGenerator.from_dict(saved)
    with pytest.raises(SettingsError, match="no argument 'n'"):
        RagfuseChatGenerator(engine=engine, generation_kwargs={"n": 3})
    for strange in ({"loudness": 3}, {"ratio": 3}):
        with pytest.raises(SettingsError, match=next(iter(strange))):
            llm.run(ASKED, generation_kwargs=strange)


@pytest.mark.parametrize(
    "form",
    [
        Paint,
        {"type": "json_schema", "json_schema": {"schema": Paint.model_json_schema()}},
    ],
    ids=["class", "schema"],
)
def test_an_answer_follows_its_form(form: Any, llm: RagfuseChatGenerator) -> None:
    reply = replied(llm, generation_kwargs={"response_format": form, "max_tokens": 90})
    Paint.model_validate_json(reply.text or "")


# tools


@pytest.mark.parametrize(
    "tools", [[PAINT], Toolset([PAINT]), [Toolset([PAINT])]], ids=["list", "toolset", "both"]
)
def test_a_tool_that_must_be_called_is_called(tools: Any, llm: RagfuseChatGenerator) -> None:
    options = {"max_tokens": 90, "tool_choice": "required"}
    reply = replied(llm, tools=tools, generation_kwargs=options)
    call = reply.tool_call
    assert call is not None
    assert (call.tool_name, bool(call.id), reply.text) == ("paint", True, None)
    assert PAINT.invoke(**call.arguments).startswith("The door is ")
    assert reply.meta["finish_reason"] == "tool_calls"


# messages


def test_messages_keep_roles_calls_results_and_thoughts() -> None:
    call = ToolCall("paint", {"colour": "red"}, id="call_1")
    found = to_ragfuse_messages(
        [
            ChatMessage.from_system("Be brief."),
            ChatMessage.from_user("Paint."),
            ChatMessage.from_assistant("Yes.", tool_calls=[call], reasoning="A door."),
            ChatMessage.from_tool("Done.", origin=call),
            ChatMessage.from_tool([TextContent("One."), TextContent("Two.")], origin=call),
        ]
    )
    assert [each.role for each in found] == ["system", "user", "assistant", "tool", "tool"]
    assert (found[2].reasoning, found[2].tool_calls[0].name, found[2].tool_calls[0].id) == (
        "A door.",
        "paint",
        "call_1",
    )
    assert (found[3].content, found[3].name, found[3].tool_call_id) == ("Done.", "paint", "call_1")
    assert found[4].content == "One.\nTwo."


def test_what_a_text_model_cannot_read_is_refused() -> None:
    image = ImageContent(base64_image="aGk=", mime_type="image/png", validation=False)
    for messages, said in (
        ([ChatMessage.from_user(content_parts=["Look", image])], "'image' cannot be read"),
        ([ChatMessage.from_tool([image], origin=ToolCall("eye", {}))], "'image' cannot be read"),
        ([ChatMessage.from_user("")], "The messages are empty"),
    ):
        with pytest.raises(InputError, match=said):
            to_ragfuse_messages(messages)  # type: ignore[arg-type]


# places


def test_a_loaded_model_answers_and_cannot_be_serialised(
    tiny_settings: Settings, engine: Engine
) -> None:
    loaded, tokenizer = engine.model.model, engine.model.tokenizer
    llm = RagfuseChatGenerator(loaded, tokenizer=tokenizer, settings=tiny_settings)
    assert replied(llm).text == replied(RagfuseChatGenerator(engine=engine)).text
    with pytest.raises(InputError, match="Save it to a folder"):
        llm.to_dict()
    with pytest.raises(SettingsError, match="dtype is float16"):
        RagfuseChatGenerator(loaded, tokenizer=tokenizer, dtype="float16")
