"""ChatRagFuse on a tiny random model: calls, streams, threads, parameters, usage and trace."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
)
from langchain_core.runnables import RunnableLambda
from langchain_ragfuse import ChatRagFuse, RagFuseRetriever
from langchain_ragfuse.messages import to_ragfuse_messages

from integrations.tests.kit import FIRST, READ, SECOND, hits, read_and_stored
from ragfuse import Engine, InputError, ModelError


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    llm = ChatRagFuse(engine=engine)
    read_and_stored(engine, lambda: llm.invoke(READ))
    return llm


def traced(message: Any) -> dict[str, Any]:
    return message.response_metadata["ragfuse"]


def test_the_profile_says_what_the_model_can_do(engine: Engine, tmp_path: Path) -> None:
    """It is made at first use: a model that is not there can be named."""
    assert ChatRagFuse(model=str(tmp_path / "none"), profile={"max_input_tokens": 7}).profile == {
        "max_input_tokens": 7
    }
    with pytest.raises(ModelError):
        _ = ChatRagFuse(model=str(tmp_path / "none")).profile
    profile: Any = ChatRagFuse(engine=engine).bind_tools([]).bound.profile  # type: ignore[attr-defined]
    assert profile["max_input_tokens"] == engine.model.max_context
    assert all(profile[name] for name in ("tool_calling", "structured_output", "text_inputs"))
    assert not profile["image_inputs"]


def test_a_chunk_block_has_exact_boundaries_and_is_learnt(engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine)
    block = {
        "type": "text",
        "text": FIRST,
        "extras": {"ragfuse": {"chunk": True, "source": "log.txt"}},
    }
    plain = {"type": "text-plain", "text": SECOND, "mime_type": "text/plain", "title": "valley.txt"}
    message = HumanMessage(
        [{"type": "text", "text": "Read this: "}, block, " and ", plain, " What do you think?"]
    )
    first = llm.invoke([message])
    assert hits(traced(first)) == []
    assert first.usage_metadata["input_token_details"]["cache_creation"] >= len(FIRST) + len(SECOND)
    engine.flush()
    second = llm.invoke([message])
    assert hits(traced(second)) == ["log.txt", "valley.txt"]
    assert second.usage_metadata["input_token_details"]["cache_creation"] == 0
    assert hits(traced(llm.invoke(f"Now as a plain text:\n\n{FIRST}\n\nAnd?"))) == ["log.txt"]


def test_an_image_is_refused_with_what_is_wanted(llm: ChatRagFuse) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InputError, match=r"'image_url' cannot be read"):
        llm.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, image])])


def test_roles_reach_the_template(llm: ChatRagFuse) -> None:
    messages = [
        SystemMessage("Be brief."),
        HumanMessage("Ask."),
        AIMessage("Wait."),
        HumanMessage("And?"),
    ]
    prompt = llm.get_engine().model.tokenizer.decode(
        llm.get_engine().prompt(to_ragfuse_messages(messages)).token_ids
    )
    assert (
        prompt
        == "<s><|system|>Be brief.\n<|user|>Ask.\n<|assistant|>Wait.\n<|user|>And?\n<|assistant|>"
    )
    assert (
        llm.get_num_tokens_from_messages([HumanMessage("Ask.")])
        == llm.invoke("Ask.").usage_metadata["input_tokens"]
    )
    with pytest.raises(InputError, match="RemoveMessage"):
        llm.invoke([HumanMessage("Ask."), RemoveMessage(id="1")])


def _writers() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "ragfuse-answer" and thread.is_alive()
    ]


async def test_async_calls_leave_the_loop_free(llm: ChatRagFuse) -> None:
    """While the model's lock is held elsewhere no answer can come; the loop goes on."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with llm.get_engine().model.lock:
            held.set()
            over.wait(60)

    threading.Thread(target=hold, daemon=True).start()
    await asyncio.to_thread(held.wait)
    calls = [asyncio.create_task(llm.ainvoke(READ)) for _ in range(2)]
    done, _ = await asyncio.wait(calls, timeout=0.05)
    assert not done
    over.set()
    answers = {str(answer.content) for answer in await asyncio.gather(*calls)}
    assert answers == {str(llm.invoke(READ).content)}


async def test_leaving_a_stream_stops_the_generation(llm: ChatRagFuse) -> None:
    late = llm.astream(READ, max_tokens=3000, reuse=False)
    await anext(late)
    assert _writers()
    await late.aclose()
    await asyncio.to_thread(_ended)
    stream = llm.stream(READ, max_tokens=3000, reuse=False)
    next(stream)
    stream.close()
    assert not _writers()


def _ended() -> None:
    for thread in _writers():
        thread.join(60)
        assert not thread.is_alive()


async def test_an_error_reaches_the_caller_of_an_async_call(engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine, model_kwargs={"cache_implementation": "static"})
    with pytest.raises(Exception, match="cache_implementation"):
        await llm.ainvoke(READ)


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    llm = ChatRagFuse(
        engine=engine,
        callbacks=[],
        tags=["a"],
        metadata={"b": 1},
        stop_sequences=["."],
        cache=False,
    )
    assert (llm.tags, llm.metadata["b"], llm.stop) == (["a"], 1, ["."])
    found = RunnableLambda(lambda query: [Document(READ)])
    assert RagFuseRetriever(retriever=found, llm=llm, tags=["c"], name="d").tags == ["c"]


@pytest.mark.parametrize(
    "messages", [[], [SystemMessage(" "), HumanMessage("\n")], [AIMessage("")]]
)
async def test_empty_messages_are_refused(messages: list[Any], engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine)
    with pytest.raises(InputError, match="messages are empty"):
        llm.invoke(messages)
    with pytest.raises(InputError, match="messages are empty"):
        await llm.ainvoke(messages)
