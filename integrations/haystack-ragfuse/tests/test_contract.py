"""Haystack's generator keeps what the models of all frameworks promise."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

from haystack.dataclasses import StreamingChunk
from haystack.utils import Secret
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator

from integrations.tests.contract import ModelContract, Reply
from integrations.tests.haystack_pipelines import DOCUMENTS, asked, rag
from ragfuse import Engine

pipeline_of = lru_cache(maxsize=2)(rag)


class TestRagfuseChatGenerator(ModelContract):
    kind = RagfuseChatGenerator
    misspelt = ("modle", "model")
    given: ClassVar = {"generation_kwargs": {"ratio": 0.2}}
    program = ""

    def key(self, key: str) -> Any:
        return Secret.from_token(key)

    def reply(self, message: Any) -> Reply:
        usage = message.meta["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        sizes = (usage["prompt_tokens"], cached, usage["completion_tokens"])
        return Reply(message.text, message.meta["ragfuse"], *sizes)

    def ask(self, llm: Any, question: str, **options: Any) -> Reply:
        return self.reply(llm.run(question, generation_kwargs=options)["replies"][0])

    async def aask(self, llm: Any, question: str, **options: Any) -> Reply:
        found = await llm.run_async(question, generation_kwargs=options)
        return self.reply(found["replies"][0])

    def pieces(self, llm: Any, question: str) -> tuple[list[str], Reply]:
        seen: list[StreamingChunk] = []
        found = llm.run(question, streaming_callback=seen.append)["replies"][0]
        return [chunk.content for chunk in seen], self.reply(found)

    def rag(self, llm: Any, question: str, marked: bool) -> Reply:
        pipeline = pipeline_of(llm)
        if not marked:
            return self.reply(asked(pipeline, question))
        return self.reply(asked(pipeline, question, documents=DOCUMENTS))

    def shown(self, llm: Any) -> list[object]:
        return [repr(llm), str(llm), vars(llm)]

    def written(self, llm: Any) -> Any:
        return llm.to_dict()

    def test_over_an_engine_it_is_written_with_the_engine_s_settings(self, engine: Engine) -> None:
        again = self.read(self.written(self.kind(engine=engine)))
        assert again.get_engine().settings == engine.settings

    def read(self, written: Any) -> Any:
        return RagfuseChatGenerator.from_dict(written)
