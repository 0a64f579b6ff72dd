"""KVPrecompute: nodes into the store ahead of the questions, and out of it when no document has
them any more.
"""

from __future__ import annotations

import pickle

import pytest
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, TextNode
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM

from integrations.tests.kit import hits
from ragfuse import Engine, InputError, Settings

GREEN, OIL, TREES = (
    "The lighthouse of Port Elling is painted green, for red paint was too dear in that year.",
    "Its lamp burned whale oil until 1902, then petroleum, and since 1957 it has been electric.",
    "Every October the village holds a fair at which the oldest walnut tree is given a name.",
)
SPLITTER = SentenceSplitter(chunk_size=30, chunk_overlap=0, paragraph_separator="\n\n")


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


def kept(llm: RagFuseLLM) -> set[str]:
    """Which of the texts come from the store in a prompt."""
    llm.get_engine().flush()
    asked = ((text, llm.complete(f"Read this.\n\n{text}\n\nWhy?")) for text in (GREEN, OIL, TREES))
    return {text for text, answer in asked if hits(answer.raw["ragfuse"])}


def nodes(*texts: str) -> list[BaseNode]:
    return [TextNode(text=text) for text in texts]


def test_a_pipeline_precomputes_what_its_splitter_makes(llm: RagFuseLLM, engine: Engine) -> None:
    step = KVPrecompute(llm)
    made = IngestionPipeline(transformations=[SPLITTER, step]).run(
        documents=[Document(text=f"{GREEN}\n\n{OIL}")]
    )
    assert [node.get_content() for node in made] == [GREEN, OIL]
    assert kept(llm) == {GREEN, OIL}
    assert step.ensure(made).encoded == 0
    assert step.to_dict()["model"] == engine.digest


async def test_nodes_are_ensured_with_progress_and_without_empty_ones(llm: RagFuseLLM) -> None:
    step, seen = KVPrecompute(llm), list[int]()
    first = nodes(GREEN)
    assert await step.acall(first) == first
    done = step.ensure(
        nodes(GREEN, "", " \n", OIL, GREEN), lambda so_far: seen.append(so_far.encoded)
    )
    assert (done.chunks, done.encoded, seen) == (3, 1, [0, 1, 1])
    assert step.ensure([]).chunks == 0


def test_the_kv_of_deleted_nodes_is_forgotten(llm: RagFuseLLM) -> None:
    step = KVPrecompute(llm)
    step.ensure(nodes(GREEN, OIL))
    assert step.forget(nodes(GREEN)) > 0
    assert kept(llm) == {OIL}
    assert step.forget(nodes(GREEN)) == 0


def test_several_workers_are_refused(llm: RagFuseLLM) -> None:
    with pytest.raises(InputError, match="num_workers"):
        pickle.dumps(KVPrecompute(llm))


def test_a_written_step_goes_by_the_digest_and_holds_no_salt(tiny_settings: Settings) -> None:
    with Engine(tiny_settings.model_copy(update={"salt": "blue-7f31c0"})) as engine:
        told = KVPrecompute(RagFuseLLM(engine=engine)).to_dict()
        assert told["model"] == engine.digest
    assert "blue-7f31c0" not in str(told)
