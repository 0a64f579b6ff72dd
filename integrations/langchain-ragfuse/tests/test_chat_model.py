"""What ChatRagFuse has beside the contract of all frameworks: its profile, content blocks, counts."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.tools import tool
from langchain_ragfuse import ChatRagFuse
from langchain_ragfuse.messages import to_ragfuse_messages

from integrations.tests.doors import paint
from integrations.tests.kit import FIRST, READ, SECOND, hits
from ragfuse import Engine, InputError


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine)


def test_the_profile_says_what_the_model_can_do_when_it_is_read(
    llm: ChatRagFuse, tmp_path: Path
) -> None:
    given = ChatRagFuse(model=str(tmp_path / "none"), profile={"max_input_tokens": 7})
    assert given.profile == {"max_input_tokens": 7}
    profile: Any = llm.profile
    assert profile["max_input_tokens"] == llm.get_engine().card.max_context
    assert all(profile[name] for name in ("tool_calling", "structured_output", "text_inputs"))
    assert not profile["image_inputs"]


def test_a_block_that_says_so_is_a_chunk_and_is_learnt(llm: ChatRagFuse, engine: Engine) -> None:
    extras = {"ragfuse": {"chunk": True, "source": "log.txt"}}
    block = {"type": "text", "text": FIRST, "extras": extras}
    plain = {"type": "text-plain", "text": SECOND, "mime_type": "text/plain", "title": "valley.txt"}
    message = HumanMessage(["Read this: ", block, " and ", plain, " What do you think?"])
    for wanted, is_new in (([], True), (["log.txt", "valley.txt"], False)):
        answer = llm.invoke([message])
        assert hits(answer.response_metadata["ragfuse"]) == wanted
        usage: Any = answer.usage_metadata
        assert (usage["input_token_details"]["cache_creation"] > 0) is is_new
        engine.flush()


def test_tokens_of_messages_and_tools_are_counted_and_other_messages_refused(
    llm: ChatRagFuse,
) -> None:
    messages = [HumanMessage("Ask."), AIMessage("Wait."), HumanMessage("And?")]
    for tools in ([], [tool(paint)]):
        usage: Any = llm.bind_tools(tools).invoke(messages).usage_metadata
        assert llm.get_num_tokens_from_messages(messages, tools) == usage["input_tokens"]
    with pytest.raises(InputError, match="RemoveMessage"):
        llm.invoke([*messages, RemoveMessage(id="1")])


async def test_leaving_a_stream_ends_its_generation(llm: ChatRagFuse, engine: Engine) -> None:
    late = llm.astream(READ, max_tokens=3000, reuse=False)
    await anext(late)
    await late.aclose()
    assert await asyncio.to_thread(engine.model.batcher.wait_idle, 60.0)
    stream = llm.stream(READ, max_tokens=3000, reuse=False)
    next(stream)
    stream.close()
    assert engine.model.batcher.wait_idle(60.0)


@pytest.mark.parametrize(
    "stored",
    [
        lambda message: messages_from_dict(json.loads(json.dumps(messages_to_dict([message]))))[0],
        lambda message: type(message).model_validate_json(message.model_dump_json()),
        lambda message: pickle.loads(pickle.dumps(message)),
    ],
)
def test_documents_of_an_artifact_are_chunks_before_and_after_their_message_is_stored(
    stored: Callable[[Any], Any],
) -> None:
    found = [Document(text, metadata={"source": text[:4]}) for text in (FIRST, SECOND)]
    message = ToolMessage(f"1. {FIRST}\n2. {SECOND}", tool_call_id="1", artifact={"found": found})
    (first,), (again,) = (to_ragfuse_messages([each]) for each in (message, stored(message)))
    assert first == again
    chunks = [(piece.text, piece.source) for piece in again.pieces if piece.kind == "chunk"]
    assert chunks == [(each.page_content, each.metadata["source"]) for each in found]
