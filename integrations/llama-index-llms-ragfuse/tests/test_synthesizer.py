"""RagFuseSynthesizer: exact boundaries in every mode that a user expects of a synthesizer."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.ragfuse import RagFuseLLM, RagFuseSynthesizer, traces

from ragfuse import Engine

QUESTION = "What colour is the lighthouse painted?"
NODES = [
    NodeWithScore(node=TextNode(text=text, metadata={"file_name": f"{number}.txt"}))
    for number, text in enumerate(
        (
            (
                "The lighthouse of Port Elling is painted green, because red paint was too dear in the"
                " year it was built."
            ),
            (
                "Its lamp burned whale oil until 1902, then petroleum, and since the year 1957 it has"
                " been electric."
            ),
        )
    )
]


class Paint(BaseModel):
    """What a lighthouse is painted with."""

    colour: Literal["green", "red"]


class Shelf(BaseRetriever):
    """Finds all nodes there are."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return NODES


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


async def said(
    synthesizer: RagFuseSynthesizer, way: str, nodes: list[NodeWithScore]
) -> tuple[Any, str]:
    """The response and its text."""
    response: Any = (
        await synthesizer.asynthesize(QUESTION, nodes)
        if way == "awaited"
        else synthesizer.synthesize(QUESTION, nodes)
    )
    return response, str(response)


@pytest.mark.parametrize("way", ["whole", "awaited"])
async def test_objects_are_synthesized_from_marked_nodes(
    llm: RagFuseLLM, engine: Engine, way: str
) -> None:
    llm.max_tokens = 40
    synthesizer = RagFuseSynthesizer(llm, output_cls=Paint)
    await said(synthesizer, way, NODES)
    engine.flush()
    with traces() as seen:
        response, text = await said(synthesizer, way, NODES)
    assert Paint.model_validate_json(text).colour in ("green", "red")
    assert isinstance(response, PydanticResponse)
    chunks = [(each.source, each.hit) for each in seen[-1].segments if each.kind == "chunk"]
    assert chunks == [("0.txt", True), ("1.txt", True)]


def test_a_structured_llm_asks_for_its_objects(llm: RagFuseLLM) -> None:
    llm.max_tokens = 40
    synthesizer = RagFuseSynthesizer(llm.as_structured_llm(Paint))
    response = RetrieverQueryEngine(Shelf(), synthesizer).query(QUESTION)
    assert isinstance(response.response, Paint)
    assert len(response.source_nodes) == 2


async def test_an_earlier_answer_is_refined(llm: RagFuseLLM) -> None:
    texts = [each.node.get_content() for each in NODES]
    synthesizer = RagFuseSynthesizer(llm)
    with traces() as seen:
        fresh = synthesizer.get_response(QUESTION, texts)
        refined = synthesizer.get_response(QUESTION, texts, prev_response="It is green.")
        assert (
            await synthesizer.aget_response(QUESTION, texts, prev_response="It is green.")
            == refined
        )
    assert isinstance(fresh, str)
    assert seen[0].tokens != seen[1].tokens == seen[2].tokens
