"""What cannot be answered is refused with what was wanted, and what is cut short leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_ragfuse import (
    ChatRagFuse,
    PMLPromptTemplate,
    RagFuseByteStore,
    RagFuseIndexer,
    RagFuseLLM,
    RagFuseRetriever,
)

from ragfuse import Engine, Grammar, InputError, ModelError, RagFuseError, Settings, SettingsError

PML = "<schema name='a'>A door.</schema>"
TEXT = "The lighthouse keeper counted forty ships that night and wrote all their names down."


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (ChatRagFuse, {"modle": "x"}, "ChatRagFuse has no argument 'modle'. Did you mean model?"),
        (
            ChatRagFuse,
            {"stop_sequence": []},
            "has no argument 'stop_sequence'. Did you mean stop_sequences?",
        ),
        (ChatRagFuse, {"calbacks": []}, "ChatRagFuse has no argument 'calbacks'. Did you mean callbacks?"),
        (ChatRagFuse, {"ratio": 3}, "ratio: Input should be less than or equal to 1, found 3."),
        (
            ChatRagFuse,
            {"dtype": "flot32"},
            "'bfloat16' or 'float16', found 'flot32'.",
        ),
        (ChatRagFuse, {"engine": "x"}, "engine: wanted a ragfuse.Engine or a ragfuse.RemoteEngine, found a str."),
        (RagFuseLLM, {"modle": "x"}, "RagFuseLLM has no argument 'modle'. Did you mean model?"),
        (RagFuseRetriever, {"retriver": None}, "RagFuseRetriever has no argument 'retriver'. Did you mean retriever?"),
        (RagFuseRetriever, {"llm": None}, "RagFuseRetriever needs the argument 'retriever', which is missing."),
        (RagFuseIndexer, {"document_promt": 1}, "has no argument 'document_promt'. Did you mean document_prompt?"),
        (RagFuseByteStore, {"namespce": "a"}, "has no argument 'namespce'. Did you mean namespace?"),
        (PMLPromptTemplate, {"schema": PML, "progres": True}, "has no argument 'progres'. Did you mean progress?"),
    ],
)
def test_a_misspelt_argument_is_told_with_what_is_meant(kind: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        kind(**given)
    assert str(refused.value).endswith(told)


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine, callbacks=[], tags=["a"], metadata={"b": 1}, stop_sequences=["."], cache=False)
    assert (llm.tags, llm.metadata["b"], llm.stop) == (["a"], 1, ["."])
    found = RunnableLambda(lambda query: [Document(TEXT)])
    assert RagFuseRetriever(retriever=found, llm=llm, tags=["c"], name="d").tags == ["c"]


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
def test_an_unknown_model_is_named(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        kind(model="no-such-model", store=tmp_path).invoke("Hello?")


def test_a_missing_extra_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'ragfuse-kv\[structured\]'"):
        ChatRagFuse(engine=engine).invoke("Hello?", grammar=Grammar.regex("[a-f]{9}"))
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(RagFuseError, match=r"ragfuse-kv\[redis\]"):
        RagFuseByteStore("redis://127.0.0.1:1/0", settings=Settings(store=tmp_path))


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(kind: Any, engine: Engine) -> None:
    with pytest.raises(InputError, match=r"at most 4,096 tokens.*found [0-9],[0-9]{3}"):
        kind(engine=engine).invoke("word " * 1000)


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
def test_documents_are_left_out_where_that_is_asked_for(kind: Any, engine: Engine) -> None:
    documents = [Document(f"Letter {at}. {TEXT} " * 10, metadata={"source": f"{at}"}) for at in range(9)]
    prompt = ChatPromptTemplate.from_messages([("user", "{context}\n\nQuestion: {question}")])
    given = {"context": documents, "question": "How many ships?"}
    with pytest.raises(InputError, match="at most 4,096 tokens"):
        create_stuff_documents_chain(kind(engine=engine), prompt).invoke(given)
    llm = kind(engine=engine, overflow="drop")
    assert create_stuff_documents_chain(llm, prompt).invoke(given)
    chat = create_stuff_documents_chain(ChatRagFuse(engine=engine), prompt, output_parser=RunnableLambda(lambda m: m))
    assert create_stuff_documents_chain(kind(engine=engine).bind(overflow="drop"), prompt).invoke(given)
    with pytest.raises(InputError, match="at most 4,096 tokens"):
        chat.invoke(given)


def test_documents_with_nul_or_half_a_character_are_reused_like_others(engine: Engine) -> None:
    documents = [Document(f"Letter {at}\0. \ud835 {TEXT}", metadata={"source": f"{at}\0"}) for at in range(2)]
    prompt = ChatPromptTemplate.from_messages([("user", "{context}\n\nQuestion: {question}")])
    chain = create_stuff_documents_chain(
        ChatRagFuse(engine=engine), prompt, output_parser=RunnableLambda(lambda message: message)
    )
    for question in ("How many ships?", "Who counted?"):
        answer = chain.invoke({"context": documents, "question": question})
        engine.flush()
    chunks = [each for each in answer.response_metadata["ragfuse"]["segments"] if each["kind"] == "chunk"]
    assert [(each["hit"], each["source"]) for each in chunks] == [(True, "0\ufffd"), (True, "1\ufffd")]


def test_the_trace_says_which_documents_were_left_out(engine: Engine) -> None:
    documents = [Document(f"Letter {at}. {TEXT} " * 10, metadata={"source": f"{at}"}) for at in range(9)]
    prompt = ChatPromptTemplate.from_messages([("user", "{context}\n\nQuestion: {question}")])
    llm = ChatRagFuse(engine=engine, overflow="drop")
    chain = create_stuff_documents_chain(llm, prompt, output_parser=RunnableLambda(lambda message: message))
    dropped = chain.invoke({"context": documents, "question": "How many ships?"}).response_metadata["ragfuse"][
        "dropped"
    ]
    assert list(dropped) == [str(at) for at in range(9 - len(dropped), 9)] != []


@pytest.mark.parametrize(
    "messages", [[], [HumanMessage("")], [SystemMessage(" "), HumanMessage("\n")], [AIMessage("")]]
)
async def test_empty_messages_are_refused(messages: list[Any], engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine)
    with pytest.raises(InputError, match="messages are empty"):
        llm.invoke(messages)
    with pytest.raises(InputError, match="messages are empty"):
        await llm.ainvoke(messages)
    with pytest.raises(InputError, match="messages are empty"):
        list(llm.stream(messages))


def _writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragfuse-answer"]


async def test_cancelled_streams_leave_no_thread_and_no_half_chunk(tiny_settings: Settings) -> None:
    """Cut short at every stage: before the first token, and after it."""
    block = {"type": "text", "text": f"{TEXT} Then he slept.", "extras": {"ragfuse": {"chunk": True, "source": "log"}}}
    message = HumanMessage([block, "\n\nHow many ships?"])
    with Engine(tiny_settings) as engine:
        llm = ChatRagFuse(engine=engine, max_tokens=3000)
        for wait_s in (0.0, 0.01, 0.05):
            call = asyncio.create_task(llm.ainvoke([message]))
            await asyncio.sleep(wait_s)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        stream = llm.astream([message])
        await anext(stream)
        await stream.aclose()
        sync = llm.stream([message])
        next(sync)
        sync.close()
        for thread in _writers():
            await asyncio.to_thread(thread.join, 60)
        assert not _writers()
        engine.flush()
        whole = ChatRagFuse(engine=engine, ratio=1.0).invoke([message])
        assert whole.content == ChatRagFuse(engine=engine, reuse=False).invoke([message]).content
    assert not list(tiny_settings.store_path.rglob("*.tmp"))
    with Engine(tiny_settings) as engine:
        kept = engine.store.entries()
        assert all(engine.store.read_layers(entry.key, 0, entry.n_layers) is not None for entry in kept)
        assert engine.store.stats().corrupt == 0


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 3), ("min_p", -1), ("top_k", -5), ("repetition_penalty", 0), ("max_tokens", 0), ("stop", [""])],
)
def test_an_option_out_of_its_range_is_refused_in_fields_and_calls_alike(
    kind: Any, name: str, value: Any, engine: Engine
) -> None:
    """Also one that changes nothing at temperature 0."""
    with pytest.raises(SettingsError, match=name):
        kind(engine=engine, **{name: value})
    with pytest.raises(SettingsError, match=name):
        kind(engine=engine).bind(**{name: value}).invoke("Hello?")
