"""What the generator has beside the contract of all frameworks: Haystack's inputs, chunks, toolsets."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.core.component import Component
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk, ToolCall
from haystack.tools import Toolset, create_tool_from_function
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator
from haystack_integrations.components.generators.ragfuse.messages import to_ragfuse_messages

from integrations.tests.doors import paint
from ragfuse import Engine, InputError

ASKED = "Paint my door."
PAINT = create_tool_from_function(paint)


@pytest.fixture
def llm(engine: Engine) -> RagfuseChatGenerator:
    return RagfuseChatGenerator(engine=engine)


def replied(llm: RagfuseChatGenerator, **given: Any) -> ChatMessage:
    (reply,) = llm.run(ASKED, **given)["replies"]
    return reply


def test_it_is_a_component_with_the_inputs_of_haystacks_own_generators(
    llm: RagfuseChatGenerator,
) -> None:
    assert isinstance(llm, Component)
    theirs = set(inspect.signature(OpenAIChatGenerator.run).parameters) - {"tools_strict"}
    for method in (RagfuseChatGenerator.run, RagfuseChatGenerator.run_async):
        assert set(inspect.signature(method).parameters) == theirs | {"documents"}


async def test_no_messages_have_no_replies(llm: RagfuseChatGenerator) -> None:
    assert llm.run([]) == await llm.run_async([]) == {"replies": []}


def test_a_reply_can_be_written_as_json(llm: RagfuseChatGenerator, engine: Engine) -> None:
    written = json.loads(json.dumps(replied(llm).to_dict()))
    assert (written["meta"]["model"], written["meta"]["index"]) == (engine.card.name, 0)


def test_a_stream_is_the_reply_in_pieces(engine: Engine) -> None:
    seen, others = list[StreamingChunk](), list[StreamingChunk]()
    llm = RagfuseChatGenerator(engine=engine, streaming_callback=seen.append)
    reply = replied(llm)
    assert "".join(chunk.content for chunk in seen) == reply.text
    assert [chunk.start for chunk in seen] == [True, *[False] * (len(seen) - 1)]
    assert [chunk.index for chunk in seen] == [*[0] * (len(seen) - 1), None]
    assert seen[0].component_info is not None
    assert seen[0].component_info.type.endswith("RagfuseChatGenerator")
    assert replied(llm, streaming_callback=others.append).text == reply.text
    assert len(others) == len(seen) > 3


async def test_awaited_answers_call_a_callback_of_either_kind(llm: RagfuseChatGenerator) -> None:
    seen, others = list[StreamingChunk](), list[StreamingChunk]()

    async def callback(chunk: StreamingChunk) -> None:
        seen.append(chunk)

    both = await asyncio.gather(
        llm.run_async(ASKED, streaming_callback=callback),
        llm.run_async(ASKED, streaming_callback=others.append),
    )
    text = replied(llm).text
    assert [each["replies"][0].text for each in both] == [text] * 2
    for chunks in (seen, others):
        assert "".join(chunk.content for chunk in chunks) == text


def test_an_error_of_a_callback_ends_the_generation(llm: RagfuseChatGenerator) -> None:
    def callback(chunk: StreamingChunk) -> None:
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        llm.run(ASKED, callback, {"max_tokens": 2000})
    assert llm.get_engine().model.batcher.wait_idle(60.0)  # type: ignore[union-attr]


def test_openai_s_name_of_the_limit_is_taken(llm: RagfuseChatGenerator) -> None:
    reply = replied(llm, generation_kwargs={"max_completion_tokens": 3})
    assert reply.meta["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("tools", [[PAINT], Toolset([PAINT]), [Toolset([PAINT])]])
def test_tools_come_alone_and_in_toolsets(tools: Any, llm: RagfuseChatGenerator) -> None:
    options = {"max_tokens": 90, "tool_choice": "required"}
    call = replied(llm, tools=tools, generation_kwargs=options).tool_call
    assert call is not None
    assert PAINT.invoke(**call.arguments).startswith("The door is ")


def test_an_image_of_a_tool_is_refused_by_its_name() -> None:
    image = ImageContent(base64_image="aGk=", mime_type="image/png", validation=False)
    with pytest.raises(InputError, match="image"):
        to_ragfuse_messages([ChatMessage.from_tool([image], origin=ToolCall("eye", {}))])
