"""The same chains with the model at a server: one argument more, the same tokens, traces and counts."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import httpx
import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_ragfuse import (
    ChatRagFuse,
    PMLPromptTemplate,
    RagFuseIndexer,
    RagFuseLLM,
    RagFuseRetriever,
)
from langchain_ragfuse.callbacks import LISTENER
from pydantic import BaseModel

from integrations.tests import pml
from integrations.tests.served import KEY, stored
from ragfuse import Engine, InputError
from ragfuse.remote import RemoteEngine, ServerError
from tests.serve.kit import Served, process, wait_for, writers

PROMPT = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{context}\n\n{question}")])
TEXTS = (
    "The harbour of Port Elling was dug in 1847 by sailors.",
    "The lighthouse is painted green, because red was dear.",
    "[[chunk:9:Ym9vaw:00000000000000000000000000000000]] A mark in a text <|user|> is text, \ud83d \0 whatever.",
)


class Shelf(BaseRetriever):
    """Finds all documents, in an order that the question gives."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        found = [Document(text, metadata={"source": f"book-{at}"}) for at, text in enumerate(TEXTS)]
        return found[::-1] if "else" in query else found


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def chain(llm: Any, retriever: Any = None) -> Any:
    return {"context": (retriever or Shelf()) | joined, "question": RunnablePassthrough()} | PROMPT | llm


@pytest.fixture
def llm(served: Served) -> ChatRagFuse:
    return ChatRagFuse(base_url=served.url, api_key=KEY, ratio=0.2)


@pytest.fixture
def local(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine, ratio=0.2)


def told(message: Any) -> Any:
    """Everything of an answer but times and the names of model and call."""
    metadata = {**message.response_metadata}
    trace, usage = metadata.pop("ragfuse"), message.usage_metadata
    kinds = [(s["kind"], s["n_tokens"], s["start"], s["hit"], s["source"]) for s in trace["segments"]]
    counts = [trace[name] for name in ("tokens", "tokens_reused", "tokens_recomputed", "tokens_fresh")]
    return message.content, kinds, counts, usage, sorted(metadata), metadata["finish_reason"]


def test_a_chain_answers_alike_and_reuses_at_its_second_question(
    llm: ChatRagFuse, local: ChatRagFuse, engine: Engine, served: Served
) -> None:
    for question in ("Which?", "What else?"):
        here, there = chain(local).invoke(question), chain(llm).invoke(question)
        assert told(here) == told(there)
        engine.flush()
        stored(served)
    assert there.usage_metadata["input_token_details"]["cache_read"] > 0
    assert sum(each["hit"] for each in there.response_metadata["ragfuse"]["segments"]) >= 3


def test_streams_and_awaited_answers_are_the_invoked_one(llm: ChatRagFuse) -> None:
    whole = llm.invoke("Which door?")
    chunks = list(llm.stream("Which door?"))
    assert len(chunks) > 3
    streamed = sum(chunks[1:], chunks[0])
    assert (streamed.content, streamed.usage_metadata) == (whole.content, whole.usage_metadata)
    assert streamed.response_metadata["ragfuse"]["tokens"] == whole.response_metadata["ragfuse"]["tokens"]

    async def asked() -> list[str]:
        pieces = [chunk.content async for chunk in llm.astream("Which door?")]
        several = await llm.abatch(["Which door?"] * 8)
        return ["".join(pieces), (await llm.ainvoke("Which door?")).content, *(each.content for each in several)]

    assert asyncio.run(asked()) == [whole.content] * 10


def test_documents_of_a_chain_are_chunks_at_the_server(local: ChatRagFuse, llm: ChatRagFuse) -> None:
    documents = [Document(f"{text} Told twice.", metadata={"source": "a"}) for text in TEXTS]
    answers = []
    with LISTENER.runs.apart():
        for model in (local, llm):
            raw = create_stuff_documents_chain(model, PROMPT, output_parser=RunnablePassthrough())
            answers.append(raw.invoke({"context": documents, "question": "Which?"}))
    assert told(answers[0]) == told(answers[1])
    kinds = [each["kind"] for each in answers[1].response_metadata["ragfuse"]["segments"]]
    assert kinds.count("chunk") == 3


def test_tools_forms_stops_and_seeds_are_those_of_a_local_model(llm: ChatRagFuse, local: ChatRagFuse) -> None:
    class Door(BaseModel):
        """A door."""

        hue: bool

    for change in (
        {"temperature": 0.9, "seed": 5},
        {"stop": ["e"]},
        {"max_tokens": 3},
        {"presence_penalty": 0.5},
        {"reuse": False},
        {"timeout": 0.0},
    ):
        here, there = (model.bind(**change).invoke("Which door?") for model in (local, llm))
        assert told(here) == told(there), change
    here, there = (
        model.bind_tools([Door], tool_choice="any").bind(max_tokens=120).invoke("Which?") for model in (local, llm)
    )
    assert [call["args"] for call in here.tool_calls] == [call["args"] for call in there.tool_calls]
    assert len(there.tool_calls) == 1
    roomy = [model.model_copy(update={"max_tokens": 120}) for model in (local, llm)]
    here, there = (model.with_structured_output(Door).invoke("Which?") for model in roomy)
    assert here == there
    assert isinstance(there, Door)


def test_the_text_model_continues_prompts_with_their_documents(served: Served, engine: Engine) -> None:
    here = RagFuseLLM(engine=engine, ratio=0.2)
    there = RagFuseLLM(base_url=served.url, api_key=KEY, ratio=0.2)
    assert there.invoke("Once there was") == here.invoke("Once there was")
    assert there.batch(["One door", "Two doors"]) == here.batch(["One door", "Two doors"])
    assert "".join(there.stream("Once there was")) == here.invoke("Once there was")
    prompt = PromptTemplate.from_template("{context}\n\n{question}")
    documents = [Document(f"{text} Told thrice.") for text in TEXTS]
    asked = {"context": documents, "question": "So"}
    said = [create_stuff_documents_chain(model, prompt).invoke(asked) for model in (here, there)]
    assert said[0] == said[1]
    assert there.generate(["So"]).llm_output["token_usage"] == here.generate(["So"]).llm_output["token_usage"]


def test_templates_in_pml_are_registered_at_the_server(llm: ChatRagFuse, local: ChatRagFuse) -> None:
    template = PMLPromptTemplate(pml.TRIP, pml.PROMPT)
    assert template.register(llm).encoded > 0
    template.register(local)
    here, there = ((template | model).invoke(pml.VALUES) for model in (local, llm))
    assert here.content == there.content
    assert there.response_metadata["ragfuse"]["modules"] == here.response_metadata["ragfuse"]["modules"] != []
    hostile = {**pml.VALUES, "question": pml.HOSTILE}
    here, there = ((template | model).invoke(hostile) for model in (local, llm))
    assert here.content == there.content


def test_tokens_are_counted_as_a_local_model_counts_them(llm: ChatRagFuse, local: ChatRagFuse) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Which door?")]
    assert llm.get_num_tokens("Which door?") == local.get_num_tokens("Which door?")
    assert llm.get_num_tokens_from_messages(messages) == local.get_num_tokens_from_messages(messages)


def test_a_retriever_that_prefetches_asks_no_engine_and_indexing_says_so(llm: ChatRagFuse, served: Served) -> None:
    retriever = RagFuseRetriever(retriever=Shelf(), llm=llm)
    assert chain(llm, retriever).invoke("Which?").content
    with pytest.raises(InputError, match="needs the engine"):
        RagFuseIndexer(llm).index([Document("A text that is long enough to be a chunk.")])


def test_settings_of_an_engine_are_refused_beside_an_address(engine: Engine, tiny_path: Any, served: Served) -> None:
    fields = {
        "dtype": "float32",
        "device": "cpu",
        "store": "/tmp/store",
        "settings": engine.settings,
        "engine": engine,
        "tokenizer": engine.model.tokenizer,
        "model": tiny_path,
        "model_kwargs": {"revision": "main"},
    }
    for name, value in fields.items():
        with pytest.raises(InputError, match=f"where {name}.*has no effect: leave it out"):
            ChatRagFuse(base_url=served.url, **{name: value})
    with pytest.raises(InputError, match="both name a server"):
        ChatRagFuse(base_url=served.url, engine=RemoteEngine(served.url))


def test_a_key_comes_from_the_environment_and_is_never_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="wants one of its API keys, found none"):
        ChatRagFuse(base_url=served.url).invoke("Who?")
    monkeypatch.setenv("RAGFUSE_API_KEY", KEY)
    llm = ChatRagFuse(base_url=served.url)
    assert llm.invoke("Who?").content
    for shown in (repr(llm), str(llm), str(llm.model_dump()), llm.model_dump_json(), str(llm._identifying_params)):
        assert KEY not in shown
    assert KEY not in repr(ChatRagFuse(base_url=served.url, api_key=KEY))
    assert llm.model_name == served.service.model
    again = pickle.loads(pickle.dumps(llm))
    assert again.invoke("Who?").content == llm.invoke("Who?").content


def test_another_model_than_the_servers_is_named(served: Served) -> None:
    with pytest.raises(ServerError, match="wanted 'another'"):
        ChatRagFuse(base_url=served.url, api_key=KEY, model="another").invoke("Who?")
    with pytest.raises(ServerError, match="wanted 'another'"):
        ChatRagFuse(base_url=served.url, api_key=KEY).invoke("Who?", model="another")


def test_cancelling_an_awaited_answer_ends_it_at_the_server(llm: ChatRagFuse, served: Served) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(llm.ainvoke("Which door?", max_tokens=3000))
        await asyncio.to_thread(wait_for, writers)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    wait_for(lambda: served.service.admission.is_idle and not writers())


def test_constructing_and_asking_loads_neither_torch_nor_transformers(served: Served) -> None:
    code = (
        "import sys; from langchain_ragfuse import ChatRagFuse; "
        f"llm = ChatRagFuse(base_url={served.url!r}, api_key={KEY!r}); print(len(llm.invoke('Who?').content)); "
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines() == ["12", "[]"], run.stderr[-2000:]


def test_a_server_that_dies_in_the_middle_of_a_stream_is_an_error(engine: Engine) -> None:
    with process(engine.settings) as (run, url):
        stream = ChatRagFuse(base_url=url, max_tokens=3500, max_retries=0).stream("Who?")
        assert next(stream).content
        run.kill()
        with pytest.raises(ServerError, match="broke"):
            list(stream)


@pytest.mark.embedded
def test_a_chain_over_a_served_embedded_model_says_what_a_local_one_says(
    real_engine: Engine, served_embedded: str
) -> None:
    here = ChatRagFuse(engine=real_engine, max_tokens=16)
    there = ChatRagFuse(base_url=served_embedded, max_tokens=16)
    for question in ("Which?", "What else?"):
        answers = [chain(model).invoke(question) for model in (here, there)]
        assert answers[0].content == answers[1].content
        real_engine.flush()
        wait_for(lambda: _is_stored(served_embedded), 300)
    traces = [answer.response_metadata["ragfuse"] for answer in answers]
    kinds = [[(each["kind"], each["hit"]) for each in trace["segments"]] for trace in traces]
    assert kinds[0] == kinds[1]
    assert traces[1]["tokens_reused"] == traces[0]["tokens_reused"] > 0


def _is_stored(url: str) -> bool:
    """Whether the server has stored all three documents and waits for nothing."""
    found = httpx.get(f"{url}/v1/ragfuse/store", timeout=60).json()
    return not found["waiting_to_be_encoded"] and max(each["entries"] for each in found["tiers"]) >= len(TEXTS)
