"""Function calling and structured prediction: held by constrained decoding, so that a random model
holds them too.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.program import FunctionCallingProgram, LLMTextCompletionProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import PydanticSingleSelector
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM, traces
from llama_index.llms.ragfuse.convert import to_ragfuse_messages

import ragfuse
from ragfuse import Engine, Grammar, InputError, ToolCall

QUESTION = "How many ships came in on Tuesday?"
ASKED = PromptTemplate("Look at this. {question}")
NODE = TextNode(
    text=(
        "The harbour of Port Elling was dug in 1847 by sailors who had lost their ship in a winter"
        " storm."
    )
)


class Ship(BaseModel):
    """A ship that came in."""

    rig: Literal["sloop", "brig"]
    masts: int = Field(ge=1, le=3)
    is_new: bool


class Book(BaseRetriever):
    """Finds one node, whatever is asked."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=NODE, score=1.0)]


class Rig(BaseModel):
    """What may be counted."""

    rig: Literal["sloop", "brig"]


class Load(BaseModel):
    """What may be weighed."""

    is_full: bool


class Rigs(BaseModel):
    """What may be asked."""

    input: Literal["sloops", "brigs"]


def count(rig: str) -> str:
    """Count ships of a rig."""
    return f"forty of {rig}"


def weigh(is_full: bool) -> str:
    """Weigh ships."""
    return f"tons of {is_full}"


TOOLS = [
    FunctionTool.from_defaults(count, fn_schema=Rig),
    FunctionTool.from_defaults(weigh, fn_schema=Load),
]


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine, max_tokens=120)


# functions


@pytest.mark.parametrize(
    "choice",
    ["weigh", {"type": "function", "function": {"name": "weigh"}}, {"name": "weigh"}],
    ids=str,
)
def test_a_tool_is_chosen_by_name(llm: RagFuseLLM, choice: Any) -> None:
    response = llm.chat_with_tools(TOOLS, QUESTION, tool_choice=choice)
    (call,) = llm.get_tool_calls_from_response(response)
    assert (call.tool_name, set(call.tool_kwargs)) == ("weigh", {"is_full"})
    assert isinstance(call.tool_kwargs["is_full"], bool)
    assert response.raw["finish_reason"] == "tool_calls"
    assert response.message.content is None
    (told,) = response.message.additional_kwargs["tool_calls"]
    assert (told["id"], told["function"]["name"]) == (call.tool_id, "weigh")


async def test_any_tool_may_be_required_and_none_may_be_wanted(llm: RagFuseLLM) -> None:
    for wish in ({"tool_required": True}, {"tool_choice": "any"}, {"tool_choice": "required"}):
        response = await llm.achat_with_tools(TOOLS, QUESTION, **wish)
        assert len(llm.get_tool_calls_from_response(response)) == 1
    text = llm.chat_with_tools(TOOLS, QUESTION, tool_choice="none", max_tokens=4)
    assert llm.get_tool_calls_from_response(text, error_on_no_tool_call=False) == []
    with pytest.raises(InputError, match="tool_required"):
        llm.get_tool_calls_from_response(text)
    assert llm.chat_with_tools([], QUESTION, tool_required=True, max_tokens=4).message.content


async def test_streams_say_calls_in_their_last_response(llm: RagFuseLLM) -> None:
    stream = await llm.astream_chat_with_tools(TOOLS, QUESTION, tool_choice="count")
    got = [each async for each in stream]
    got_sync = list(llm.stream_chat_with_tools(TOOLS, QUESTION, tool_choice="count"))
    for *early, last in (got, got_sync):
        assert [
            each for each in early if each.delta or llm.get_tool_calls_from_response(each, False)
        ] == []
        assert llm.get_tool_calls_from_response(last)[0].tool_name == "count"
        assert not last.delta


def test_calls_and_results_are_turns_of_the_conversation() -> None:
    openai = {
        "id": "1",
        "type": "function",
        "function": {"name": "count", "arguments": '{"rig": "brig"}'},
    }
    said = {"tool_call_id": "1", "name": "count"}
    turns = to_ragfuse_messages(
        [
            ChatMessage(role="user", content="Count."),
            ChatMessage(role="user", content="Now."),
            ChatMessage(
                role="assistant",
                blocks=[ThinkingBlock(content="Hm."), ToolCallBlock(tool_name="weigh")],
            ),
            ChatMessage(role="tool", content="ten", additional_kwargs={"tool_call_id": "0"}),
            ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [openai]}),
            ChatMessage(
                role="function",
                blocks=[TextBlock(text="four"), TextBlock(text="ty")],
                additional_kwargs=said,
            ),
        ]
    )
    assert turns == [
        ragfuse.ChatMessage("user", ["Count.", "\n", "Now."]),
        ragfuse.ChatMessage("assistant", [], (ToolCall("weigh", {}),), reasoning="Hm."),
        ragfuse.ChatMessage("tool", ["ten"], tool_call_id="0"),
        ragfuse.ChatMessage("assistant", [""], (ToolCall("count", {"rig": "brig"}, "1"),)),
        ragfuse.ChatMessage("tool", ["four", "ty"], tool_call_id="1", name="count"),
    ]


async def test_an_agent_asks_a_query_engine_and_answers(llm: RagFuseLLM) -> None:
    """Its first step calls the tool, whose own answer comes from the store; so does the node in the
    second step.
    """
    KVPrecompute(llm).ensure([NODE])
    short = llm.model_copy(update={"max_tokens": 16})
    book = RetrieverQueryEngine(
        Book(), get_response_synthesizer(llm=short, response_mode="compact")
    )
    tool = QueryEngineTool.from_defaults(book, name="book", description="Knows the harbour.")
    tool.metadata.fn_schema = Rigs
    for streaming in (True, False):
        agent = FunctionAgent(
            tools=[tool], llm=llm, initial_tool_choice="book", streaming=streaming
        )
        with traces() as seen:
            response = await agent.run(QUESTION)
        assert [call.tool_name for call in response.tool_calls] == ["book"]
        assert response.tool_calls[0].tool_kwargs["input"] in ("sloops", "brigs")
        assert isinstance(response.response.content, str)
        assert len(seen) == 3
        assert [[each.hit for each in trace.segments if each.kind == "chunk"] for trace in seen][
            1
        ] == [True]


# objects


def test_programs_and_selectors_of_the_house_hold_too(llm: RagFuseLLM) -> None:
    program = FunctionCallingProgram.from_defaults(Ship, prompt=ASKED, llm=llm)
    assert isinstance(program(question=QUESTION), Ship)
    held = {"grammar": Grammar.json(Ship.model_json_schema())}
    text = LLMTextCompletionProgram.from_defaults(
        output_cls=Ship, prompt=ASKED.model_copy(), llm=llm
    )
    assert isinstance(text(llm_kwargs=held, question=QUESTION), Ship)
    functions = RagFuseLLM(
        engine=llm.get_engine(), max_tokens=120, pydantic_program_mode=PydanticProgramMode.FUNCTION
    )
    assert isinstance(functions.structured_predict(Ship, ASKED, question=QUESTION), Ship)
    assert PydanticSingleSelector.from_defaults(llm=llm)


# what cannot be held


def test_a_schema_that_cannot_be_compiled_is_named(llm: RagFuseLLM) -> None:
    bad = Grammar.json(
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=never)x("}}}
    )
    parameters = {"type": "object", "properties": {"a": 1}}
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    for wish in ({"grammar": bad}, {"tools": [tool], "tool_choice": "required"}):
        with pytest.raises(InputError, match=r"[Ss]chema|tool 't'"):
            llm.chat([ChatMessage(content=QUESTION)], **wish)


def test_arguments_that_are_no_json_are_refused(llm: RagFuseLLM) -> None:
    calls = [{"id": "1", "function": {"name": "count", "arguments": "rig=brig"}}]
    messages = [
        ChatMessage(content=QUESTION),
        ChatMessage(role="assistant", additional_kwargs={"tool_calls": calls}),
    ]
    with pytest.raises(InputError, match="rig=brig"):
        llm.chat(messages)
    with pytest.raises(InputError, match="'image' cannot be read"):
        llm.chat([ChatMessage(role="tool", blocks=[ImageBlock(url="http://x/y.png")])])
