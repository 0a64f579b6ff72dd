"""The same pipeline with the model at a server: one argument more, the same texts, traces and
counts.
"""

from __future__ import annotations

from typing import Any

import pytest
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.utils import Secret
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator

from integrations.tests.haystack_pipelines import asked, given, hits, rag
from integrations.tests.kit import outline
from integrations.tests.served import KEY, stored
from ragfuse import Engine
from ragfuse.remote import RemoteEngine, ServerError
from tests.serve.kit import Served

OPTIONS = {"ratio": 0.2}


@pytest.fixture
def llm(served: Served) -> RagfuseChatGenerator:
    return RagfuseChatGenerator(
        base_url=served.url, api_key=Secret.from_token(KEY), generation_kwargs=OPTIONS
    )


@pytest.fixture
def local(engine: Engine) -> RagfuseChatGenerator:
    return RagfuseChatGenerator(engine=engine, generation_kwargs=OPTIONS)


def told(reply: ChatMessage) -> Any:
    """Everything of a reply but times and the name of the model."""
    meta = reply.meta
    return reply.text, outline(meta["ragfuse"]), meta["usage"], meta["finish_reason"], sorted(meta)


def test_a_pipeline_answers_alike_and_reuses_at_its_second_question(
    llm: RagfuseChatGenerator, local: RagfuseChatGenerator, engine: Engine, served: Served
) -> None:
    here, there = rag(local), rag(llm)
    for question in ("Who was the harbour master?", "Which oil did the lighthouse burn?"):
        replies = asked(here, question), asked(there, question)
        assert told(replies[0]) == told(replies[1])
        engine.flush()
        stored(served)
    assert hits(replies[1]) == [True] * 4


async def test_streams_and_awaited_answers_are_the_whole_one(llm: RagfuseChatGenerator) -> None:
    seen: list[StreamingChunk] = []
    pipeline = rag(llm)
    whole = asked(pipeline, "Which door?")
    streamed = asked(pipeline, "Which door?", streaming_callback=seen.append)
    assert "".join(chunk.content for chunk in seen) == streamed.text == whole.text
    assert len(seen) > 3
    awaited = (await pipeline.run_async(given("Which door?")))["llm"]["replies"][0]
    assert awaited.text == whole.text


def test_a_key_comes_from_the_environment_and_is_never_shown(
    served: Served, llm: RagfuseChatGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match="another api_key="):
        RagfuseChatGenerator(base_url=served.url).run("Who?")
    monkeypatch.setenv("RAGFUSE_API_KEY", KEY)
    again = RagfuseChatGenerator.from_dict(RagfuseChatGenerator(base_url=served.url).to_dict())
    assert (
        again.run("Who?")["replies"][0].text
        == llm.run("Who?", generation_kwargs={"ratio": None})["replies"][0].text
    )
    for shown in (repr(again), str(again), str(vars(again)), str(again.to_dict()), repr(vars(llm))):
        assert KEY not in shown


def test_a_client_that_is_there_already_is_taken(served: Served) -> None:
    client = RemoteEngine(served.url, KEY)
    llm = RagfuseChatGenerator(engine=client)
    assert llm.get_engine() is client
    assert llm.run("Who?")["replies"][0].text
    assert llm.to_dict()["init_parameters"]["base_url"] == served.url
