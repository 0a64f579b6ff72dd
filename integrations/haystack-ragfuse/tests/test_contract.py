"""Haystack's generator keeps what the models of all frameworks promise."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from haystack.components.generators.utils import _convert_streaming_chunks_to_chat_message
from haystack.dataclasses import (
    ChatMessage,
    ImageContent,
    StreamingChunk,
    TextContent,
    ToolCall,
)
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from haystack_integrations.components.generators.ragfuse import RagfuseChatGenerator
from haystack_integrations.components.generators.ragfuse.messages import to_ragfuse_messages
from pydantic import BaseModel

from integrations.tests.contract import CALL, ChatContract, Reply
from integrations.tests.haystack_pipelines import DOCUMENTS, asked, rag
from ragfuse import Engine

pipeline_of = lru_cache(maxsize=2)(rag)


class TestRagfuseChatGenerator(ChatContract):
    kind = RagfuseChatGenerator
    misspelt = ("modle", "model")
    program = ""
    tool = staticmethod(create_tool_from_function)
    convert = staticmethod(to_ragfuse_messages)

    def key(self, key: str) -> Any:
        return Secret.from_token(key)

    def options(self, **options: Any) -> dict[str, Any]:
        return {"generation_kwargs": options}

    def reply(self, message: Any) -> Reply:
        usage = message.meta["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Reply(
            message.text or "",
            message.meta["ragfuse"],
            *(usage["prompt_tokens"], cached, usage["completion_tokens"]),
            finish=message.meta["finish_reason"],
            thought="".join(each.reasoning_text for each in message.reasonings),
            calls=tuple((each.tool_name, each.arguments) for each in message.tool_calls),
        )

    def ask(self, llm: Any, question: Any, tools: Any = None, **options: Any) -> Reply:
        found = llm.run(question, generation_kwargs=options, tools=tools)
        return self.reply(found["replies"][0])

    async def aask(self, llm: Any, question: Any, tools: Any = None, **options: Any) -> Reply:
        found = await llm.run_async(question, generation_kwargs=options, tools=tools)
        return self.reply(found["replies"][0])

    def pieces(
        self, llm: Any, question: Any, tools: Any = None, **options: Any
    ) -> tuple[list[str], Reply]:
        """Haystack reads from the chunks what the reply says."""
        seen: list[StreamingChunk] = []
        (said,) = llm.run(question, seen.append, options, tools=tools)["replies"]
        joined = _convert_streaming_chunks_to_chat_message(seen)
        assert (joined.text or None, joined.tool_calls) == (said.text or None, said.tool_calls)
        assert joined.reasoning == said.reasoning
        for name in ("model", "finish_reason", "usage", "completion_start_time"):
            assert joined.meta[name] == said.meta[name]
        return [chunk.content for chunk in seen], self.reply(said)

    def rag(self, llm: Any, question: str, marked: bool) -> Reply:
        pipeline = pipeline_of(llm)
        if not marked:
            return self.reply(asked(pipeline, question))
        return self.reply(asked(pipeline, question, documents=DOCUMENTS))

    def conversations(self) -> list[Any]:
        call = ToolCall(CALL.name, CALL.arguments, id=CALL.id)
        said = [
            ChatMessage.from_system("Be brief."),
            *map(ChatMessage.from_user, ("Paint.", "Now.")),
        ]
        said.append(ChatMessage.from_assistant("Yes.", tool_calls=[call], reasoning="A door."))
        results: list[Any] = ["Done.", [TextContent("Done.")]]
        return [[*said, ChatMessage.from_tool(each, origin=call)] for each in results]

    def image(self) -> Any:
        image = ImageContent(base64_image="aGk=", mime_type="image/png", validation=False)
        return ChatMessage.from_user(content_parts=["Look", image])

    def held(self, llm: Any, form: type[BaseModel]) -> Any:
        return form.model_validate_json(
            self.ask(llm, "Hello?", response_format=form, max_tokens=90).text
        )

    def shown(self, llm: Any) -> list[object]:
        return [repr(llm), str(llm), vars(llm)]

    def written(self, llm: Any) -> Any:
        return llm.to_dict()

    def test_over_an_engine_it_is_written_with_the_engine_s_settings(self, engine: Engine) -> None:
        again = self.read(self.written(self.kind(engine=engine)))
        assert again.get_engine().settings == engine.settings

    def read(self, written: Any) -> Any:
        return RagfuseChatGenerator.from_dict(written)
