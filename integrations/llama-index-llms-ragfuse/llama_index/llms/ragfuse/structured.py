"""Structured prediction: decoding is constrained to JSON of the schema, so that small models follow it too."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.llm import LLM
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ragfuse.prompts import PMLMessage

from ragfuse import Grammar, InputError

dispatcher = get_dispatcher(__name__)


class Structured(LLM):
    """An LLM with structured prediction by a `grammar` of its `chat`.

    With a `pydantic_program_mode` other than the default, LlamaIndex's own implementation is used.
    """

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Answer a prompt with an object of `output_cls`; raises InputError if the answer is cut off."""
        if not self._is_constrained:
            return super().structured_predict(output_cls, prompt, _plain(llm_kwargs), **prompt_args)
        _emit_start(output_cls, prompt, prompt_args)
        response = self.chat(
            self.messages_for(output_cls, prompt, prompt_args), **_constrained_kwargs(output_cls, llm_kwargs)
        )
        return _emit_end(object_of(output_cls, response))

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Run `structured_predict` without blocking the event loop."""
        if not self._is_constrained:
            return await super().astructured_predict(output_cls, prompt, _plain(llm_kwargs), **prompt_args)
        _emit_start(output_cls, prompt, prompt_args)
        response = await self.achat(
            self.messages_for(output_cls, prompt, prompt_args), **_constrained_kwargs(output_cls, llm_kwargs)
        )
        return _emit_end(object_of(output_cls, response))

    def _structured_stream_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Yield the object as far as it is written, and at last the whole object."""
        if not self._is_constrained:
            yield from super()._structured_stream_call(output_cls, prompt, _plain(llm_kwargs), **prompt_args)
            return
        found, response = None, None
        for response in self.stream_chat(
            self.messages_for(output_cls, prompt, prompt_args), **_constrained_kwargs(output_cls, llm_kwargs)
        ):
            if response.raw is None:
                found = process_streaming_objects(response, output_cls, found and [found], llm=self)
                yield found
        yield object_of(output_cls, response)

    async def _structured_astream_call(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Mapping[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Stream the object without blocking the event loop."""
        if not self._is_constrained:
            return await super()._structured_astream_call(output_cls, prompt, _plain(llm_kwargs), **prompt_args)
        stream = await self.astream_chat(
            self.messages_for(output_cls, prompt, prompt_args), **_constrained_kwargs(output_cls, llm_kwargs)
        )

        async def objects() -> AsyncGenerator[Any, None]:
            found, response = None, None
            async for response in stream:
                if response.raw is None:
                    found = process_streaming_objects(response, output_cls, found and [found], llm=self)
                    yield found
            yield object_of(output_cls, response)

        return objects()

    @property
    def _is_constrained(self) -> bool:
        return self.pydantic_program_mode is PydanticProgramMode.DEFAULT

    def messages_for(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, values: Mapping[str, Any]
    ) -> list[ChatMessage]:
        """Return the messages of a prompt, with the schema added to the last one."""
        messages = self._extend_messages(prompt.format_messages(llm=self, **values))
        return messages[:-1] + [with_schema(output_cls, message) for message in messages[-1:]]


def with_schema(output_cls: type[BaseModel], message: ChatMessage) -> ChatMessage:
    """Return the message with the schema of its answer at the end."""
    schema = json.dumps(output_cls.model_json_schema(), ensure_ascii=False)
    instruction = TextBlock(text=f"\n\nAnswer with JSON that follows this schema:\n{schema}")
    if isinstance(message, PMLMessage) and message.filled is not None:
        return PMLMessage.of(message.filled.asking(instruction.text.strip()))
    return message.model_copy(update={"blocks": [*message.blocks, instruction]})


def grammar_of(output_cls: type[BaseModel]) -> Grammar:
    """Return the grammar of the JSON of a class."""
    return Grammar.json(output_cls.model_json_schema())


def object_of(output_cls: type[BaseModel], response: ChatResponse | None) -> BaseModel:
    """Parse an answer as an object of a class; raises InputError if the answer was cut off."""
    text = (response.message.content or "") if response is not None else ""
    raw = response.raw if response is not None and isinstance(response.raw, dict) else {}
    if raw.get("finish_reason") == "length":
        n_tokens = raw["usage"]["completion_tokens"]
        raise InputError(
            f"The answer, a {output_cls.__name__}, was cut off after {n_tokens} tokens: '...{text[-40:]}'. "
            "Raise max_tokens, or limit the lengths in the schema."
        )
    return output_cls.model_validate_json(text)


def _constrained_kwargs(output_cls: type[BaseModel], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call with the grammar of a class."""
    return {**_plain(given), "grammar": grammar_of(output_cls)}


def _plain(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the caller's arguments without `tool_choice`, which LlamaIndex's programs add."""
    return {name: value for name, value in (given or {}).items() if name != "tool_choice"}


def _emit_start(output_cls: type[BaseModel], prompt: BasePromptTemplate, values: Mapping[str, Any]) -> None:
    dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=dict(values)))


def _emit_end(found: BaseModel) -> BaseModel:
    dispatcher.event(LLMStructuredPredictEndEvent(output=found))
    return found
