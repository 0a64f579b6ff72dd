"""Tools and objects in the ways that LlamaIndex has beside the contract: choices, programs, agents."""

from __future__ import annotations

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM, traces

from integrations.tests.doors import Paint, knock, paint
from integrations.tests.kit import LETTERS
from ragfuse import Engine, InputError

QUESTION = "Which door?"
ASKED = PromptTemplate("Look at this. {question}")
NODE = TextNode(text=LETTERS.split("\n\n")[0])
TOOLS = [FunctionTool.from_defaults(each) for each in (paint, knock)]


class Book(BaseRetriever):
    """Finds one node, whatever is asked."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=NODE, score=1.0)]


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine, max_tokens=120)


async def test_any_tool_may_be_required_and_one_call_comes_back(llm: RagFuseLLM) -> None:
    for wish in (
        {"tool_required": True},
        {"tool_choice": "any"},
        {"tool_choice": {"name": "knock"}},
    ):
        response = await llm.achat_with_tools(TOOLS, QUESTION, **wish)
        (call,) = llm.get_tool_calls_from_response(response)
        (told,) = response.message.additional_kwargs["tool_calls"]
        assert (told["id"], told["function"]["name"]) == (call.tool_id, call.tool_name)
    assert call.tool_name == "knock"
    text = llm.chat_with_tools([], QUESTION, tool_required=True, max_tokens=4)
    assert llm.get_tool_calls_from_response(text, error_on_no_tool_call=False) == []
    with pytest.raises(InputError, match="tool_required"):
        llm.get_tool_calls_from_response(text)


async def test_an_agent_asks_a_query_engine_and_answers(llm: RagFuseLLM) -> None:
    """Its first step calls the tool, whose own answer comes from the store."""
    KVPrecompute(llm).ensure([NODE])
    short = llm.model_copy(update={"max_tokens": 16})
    book = RetrieverQueryEngine(
        Book(), get_response_synthesizer(llm=short, response_mode="compact")
    )
    tool = QueryEngineTool.from_defaults(book, name="book", description="Knows the harbour.")
    tool.metadata.fn_schema = Paint
    for streaming in (True, False):
        agent = FunctionAgent(
            tools=[tool], llm=llm, initial_tool_choice="book", streaming=streaming
        )
        with traces() as seen:
            response = await agent.run(QUESTION)
        assert [call.tool_name for call in response.tool_calls] == ["book"]
        assert isinstance(response.response.content, str)
        assert len(seen) == 3
        assert [each.hit for each in seen[1].segments if each.kind == "chunk"] == [True]


def test_objects_may_be_asked_for_as_calls_and_by_programs(llm: RagFuseLLM) -> None:
    program = FunctionCallingProgram.from_defaults(Paint, prompt=ASKED, llm=llm)
    assert isinstance(program(question=QUESTION), Paint)
    mode = PydanticProgramMode.FUNCTION
    functions = RagFuseLLM(engine=llm.get_engine(), max_tokens=120, pydantic_program_mode=mode)
    assert isinstance(functions.structured_predict(Paint, ASKED, question=QUESTION), Paint)
