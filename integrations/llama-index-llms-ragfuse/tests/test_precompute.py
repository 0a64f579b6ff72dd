"""KVPrecompute: nodes into the store ahead of the questions, and out of it when no document has them any more."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.bridge.pydantic import Field
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM
from llama_index.llms.ragfuse.ledger import FILE

from ragfuse import Engine, Ingested, InputError, Settings, StoreError
from ragfuse.types.plan import LoadPlan

GREEN = "The lighthouse of Port Elling is painted green, because red paint was too dear in the year it was built."
GREY = "The lighthouse of Port Elling is painted grey, because green paint was too dear when it was repaired."
OIL = "Its lamp burned whale oil until 1902, then petroleum, and since the year 1957 it has been electric."
TREES = "Every October the village of the walnut valley holds a fair at which the oldest tree is given a name."
SPLITTER = SentenceSplitter(chunk_size=30, chunk_overlap=0, paragraph_separator="\n\n")


class Counting(KVPrecompute):
    """One that counts how often it is asked."""

    asked: list[int] = Field(exclude=True)

    def ensure(self, nodes: Any, *args: Any, **kwargs: Any) -> Ingested:
        self.asked.append(len(nodes))
        return super().ensure(nodes, *args, **kwargs)


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


def document(name: str, *texts: str) -> Document:
    return Document(id_=name, text="\n\n".join(texts))


def pipeline(step: KVPrecompute, strategy: DocstoreStrategy, **more: Any) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[SPLITTER, step],
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore(),
        docstore_strategy=strategy,
        **more,
    )


def kept(llm: RagFuseLLM, *more: str) -> set[str]:
    """Which of the texts would come from the store, were they in a prompt."""
    engine = llm.get_engine()
    engine.flush()
    plans = {text: engine.plan(f"Read this.\n\n{text}\n\nWhy is that?") for text in (GREEN, GREY, OIL, TREES, *more)}
    return {text for text, plan in plans.items() if len(engine.tokens(text)) in _fetched(plan)}


def _fetched(plan: LoadPlan) -> set[int]:
    """Tokens of each segment that would come from the store."""
    return {len(plan.prompt.segments[fetch.segment].tokens) for fetch in plan.fetches}


def nodes(*texts: str) -> list[BaseNode]:
    return [TextNode(text=text) for text in texts]


def test_a_pipeline_precomputes_what_its_splitter_makes(llm: RagFuseLLM, engine: Engine) -> None:
    step = KVPrecompute(llm)
    made = IngestionPipeline(transformations=[SPLITTER, step]).run(documents=[document("a", GREEN, OIL)])
    assert [node.get_content() for node in made] == [GREEN, OIL]
    assert kept(llm) == {GREEN, OIL}
    assert step.ensure(made).encoded == 0
    assert step.to_dict()["model"] == engine.digest


async def test_nodes_are_ensured_with_progress_and_without_empty_ones(llm: RagFuseLLM) -> None:
    step, seen = KVPrecompute(llm), list[int]()
    first = nodes(GREEN)
    assert await step.acall(first) == first
    done = step.ensure(nodes(GREEN, "", " \n", OIL, GREEN), lambda so_far: seen.append(so_far.encoded))
    assert (done.chunks, done.encoded, seen) == (3, 1, [0, 1, 1])
    assert step.ensure([]).chunks == 0


@pytest.mark.parametrize(("is_terminal", "wanted"), [(True, True), (True, False), (False, True)])
def test_a_bar_is_shown_on_terminals_where_it_is_wanted(
    llm: RagFuseLLM, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, wanted: bool
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    KVPrecompute(llm, show_progress=wanted)(nodes(GREEN, OIL))
    assert ("Encoding nodes" in screen.getvalue()) is (is_terminal and wanted)
    KVPrecompute(llm, show_progress=wanted).ensure(nodes(TREES), show_progress=False)
    assert screen.getvalue().count("1/1") == 0


def test_an_updated_document_loses_what_it_no_longer_says(llm: RagFuseLLM) -> None:
    step = KVPrecompute(llm)
    ingest = pipeline(step, DocstoreStrategy.UPSERTS)
    ingest.run(documents=[document("a", GREEN, OIL), document("b", OIL, TREES)])
    assert step.collect(ingest.docstore) == 0
    ingest.run(documents=[document("a", GREY), document("b", OIL, TREES)])
    assert kept(llm) == {GREEN, GREY, OIL, TREES}
    assert step.collect(ingest.docstore) > 0
    assert kept(llm) == {GREY, OIL, TREES}
    assert step.collect(ingest.docstore) == 0


async def test_a_deleted_document_leaves_what_others_say_too(llm: RagFuseLLM) -> None:
    step = KVPrecompute(llm)
    ingest = pipeline(step, DocstoreStrategy.UPSERTS_AND_DELETE)
    await ingest.arun(documents=[document("a", GREEN, OIL), document("b", OIL, TREES)])
    await ingest.arun(documents=[document("a", GREEN, OIL)])
    step.collect(ingest.docstore)
    assert kept(llm) == {GREEN, OIL}
    await ingest.arun(documents=[document("c", TREES)])
    step.collect(ingest.docstore)
    assert kept(llm) == {TREES}


def test_a_pipelines_cache_skips_what_is_there_and_not_what_was_forgotten(llm: RagFuseLLM) -> None:
    step = Counting(llm, asked=[])
    ingest = pipeline(step, DocstoreStrategy.UPSERTS)
    one, two = document("a", GREEN), document("a", GREY)
    for version in (one, two, one):
        ingest.run(documents=[version])
    assert step.asked == [1, 1]  # the third time the cache knew the nodes
    assert step.collect(ingest.docstore) == 0  # and the docstore's version is in use, as is the newest seen
    ingest.run(documents=[two])
    step.ensure(nodes(GREY))
    step.collect([*SPLITTER([two])])
    assert kept(llm) == {GREY}
    ingest.run(documents=[one])
    assert kept(llm) == {GREEN, GREY}


def test_all_nodes_there_are_say_what_is_in_use(llm: RagFuseLLM) -> None:
    step = KVPrecompute(llm)
    step.ensure(nodes(GREEN, OIL, TREES))
    assert step.collect(nodes(OIL, f"\n{TREES} ")) > 0
    assert kept(llm) == {OIL, TREES}
    for nothing in ([], SimpleDocumentStore()):  # such as one that was never loaded
        with pytest.raises(InputError, match=r"all KV of the collection.*none_left=True"):
            step.collect(nothing)
    assert kept(llm) == {OIL, TREES}
    step.collect([], none_left=True)
    assert kept(llm) == set()


def test_what_others_brought_is_never_collected(llm: RagFuseLLM, engine: Engine) -> None:
    step, other = KVPrecompute(llm), KVPrecompute(llm, collection="valley")
    engine.ingest([(GREY, "by hand")])
    step.ensure(nodes(GREEN, OIL))
    other.ensure(nodes(OIL, TREES))
    step.collect([], none_left=True)
    assert kept(llm) == {GREY, OIL, TREES}
    other.collect(SimpleDocumentStore(), none_left=True)
    assert kept(llm) == {GREY}


def test_a_node_with_nul_or_half_a_character_stays_while_it_is_there(llm: RagFuseLLM) -> None:
    step, odd = KVPrecompute(llm), OIL.replace("whale", "\ud835 whale \0")
    step.ensure(nodes(odd, GREEN))
    assert step.collect(nodes(odd, GREEN)) == 0
    assert kept(llm, odd) == {odd, GREEN}
    assert step.collect(nodes(GREEN)) > 0
    assert kept(llm, odd) == {GREEN}


def test_parts_of_one_document_given_apart_all_stay(llm: RagFuseLLM) -> None:
    step, docstore = KVPrecompute(llm), SimpleDocumentStore()
    whole = document("a", GREEN, OIL)
    docstore.add_documents([whole])
    docstore.set_document_hash(whole.id_, whole.hash)
    for node in SPLITTER([whole]):
        step([node])
    assert step.collect(docstore) == 0
    assert kept(llm) == {GREEN, OIL}


def test_an_indexs_own_docstore_says_it_too(llm: RagFuseLLM) -> None:
    step = KVPrecompute(llm)
    index = VectorStoreIndex.from_documents(
        [document("a", GREEN, OIL), document("b", OIL, TREES)],
        storage_context=StorageContext.from_defaults(vector_store=SimpleVectorStore()),
        embed_model=MockEmbedding(4),
        transformations=[SPLITTER, step],
    )
    assert step.collect(index.docstore) == 0
    index.update_ref_doc(document("a", GREY, OIL))
    step.collect(index.docstore)
    assert kept(llm) == {GREY, OIL, TREES}
    index.delete_ref_doc("b", delete_from_docstore=True)
    step.collect(index.docstore)
    assert kept(llm) == {GREY, OIL}


def test_a_later_process_collects_what_an_earlier_one_brought(tiny_settings: Settings) -> None:
    with Engine(tiny_settings) as engine:
        ingest = pipeline(KVPrecompute(RagFuseLLM(engine=engine)), DocstoreStrategy.UPSERTS_AND_DELETE)
        ingest.run(documents=[document("a", GREEN), document("b", OIL)])
    with Engine(tiny_settings) as engine:
        llm = RagFuseLLM(engine=engine)
        step = KVPrecompute(llm)
        ingest.transformations = [SPLITTER, step]
        ingest.run(documents=[document("a", GREEN)])
        assert kept(llm) == {GREEN, OIL}
        step.collect(ingest.docstore)
        assert kept(llm) == {GREEN}


def test_a_store_without_a_disk_is_looked_after_in_memory(tiny_settings: Settings) -> None:
    with Engine(tiny_settings.model_copy(update={"disk_bytes": 0})) as engine:
        llm = RagFuseLLM(engine=engine)
        step = KVPrecompute(llm)
        step.ensure(nodes(GREEN, OIL))
        step.collect(nodes(OIL))
        assert kept(llm) == {OIL}
    assert not (tiny_settings.store_path / FILE).exists()


def test_a_damaged_list_of_documents_is_refused(llm: RagFuseLLM, tiny_settings: Settings) -> None:
    Path(tiny_settings.store_path / FILE).write_bytes(b"nothing that SQLite knows" * 50)
    with pytest.raises(StoreError, match=rf"{FILE} cannot be used.*delete the file"):
        KVPrecompute(llm).collect([], none_left=True)


def test_several_workers_are_refused(llm: RagFuseLLM) -> None:
    step = KVPrecompute(llm)
    with pytest.raises(InputError, match=r"Run the pipeline with num_workers=None.*ensure\(nodes\)"):
        pickle.dumps(step)
    ingest = IngestionPipeline(transformations=[SPLITTER, step], disable_cache=True)
    documents = [document("a", GREEN), document("b", OIL)]
    with pytest.raises(InputError, match="num_workers=None"):
        ingest.run(documents=documents, num_workers=2)
