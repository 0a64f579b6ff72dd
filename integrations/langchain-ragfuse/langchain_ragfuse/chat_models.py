"""`ChatRagFuse`, ragfuse's chat model for LangChain, over an engine or a server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolCall, ToolCallChunk
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import model_validator

from langchain_ragfuse.base import CONFIG, RagFuseModel, usage_of
from langchain_ragfuse.messages import calls_of, to_ragfuse_messages
from langchain_ragfuse.prompts import pml_of
from langchain_ragfuse.tools import structured
from ragfuse import Answer, Ask
from ragfuse.adapters import ready
from ragfuse.types.arguments import checks_arguments


@checks_arguments
class ChatRagFuse(RagFuseModel, BaseChatModel):
    """A chat model that reuses the stored KV of retrieved chunks and computes only the rest of the
    prompt.

    Chains need no change: indexed or retrieved chunks are recognised in the text of a prompt. The
    weights are loaded at the first question. Models of one process with equal name, dtype and
    device share the weights. With `base_url`, a `ragfuse serve` server answers.
    """

    model_config = CONFIG

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return the number of tokens of a prompt, including its chat template and tools."""
        engine = self.get_engine()
        return engine.count_tokens(
            ready(_prompt_of(messages), engine), list(map(convert_to_openai_tool, tools or ()))
        )

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """Return this model with tools, which the chat template renders into the prompt.

        Args:
            tools: Functions, classes, LangChain tools, or tools in OpenAI's form.
            tool_choice: "auto", "none", "any" or "required", or the name of a tool. None means
                "auto".
            parallel_tool_calls: False allows at most one tool call.
            strict: Copied to the tools' descriptions. Tool calls match the schema either way.
            **kwargs: Further options of each call.
        """
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(
            tools=schemas, tool_choice=Ask.tool_choice_of(tool_choice, schemas), **kwargs
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
    ) -> Runnable[Any, Any]:
        """Return a runnable that answers with an object. Decoding is constrained to the schema.

        Args:
            schema: A Pydantic class, a TypedDict or a JSON schema.
            method: Every method constrains decoding. "function_calling" also puts the schema into
                the prompt.
            include_raw: True to return {"raw", "parsed", "parsing_error"} instead of the object.
            strict: Copied to the schema's description.
        """
        return structured(self, schema, method, include_raw, strict)

    @model_validator(mode="after")
    def _profile_at_first_use(self) -> Self:
        """Delete a `profile` of None, so that `__getattr__` creates `profile` on first use."""
        if self.profile is None:
            del self.profile
        return self

    def __getattr__(self, name: str) -> Any:
        """Create `profile`, the model's capabilities, by loading the model or asking the server."""
        if name != "profile":
            return super().__getattr__(name)  # type: ignore[misc]
        card = self.get_engine().card
        self.profile = ModelProfile(
            name=card.name,
            max_input_tokens=card.max_context,  # type: ignore[typeddict-item]
            text_inputs=True,
            image_inputs=False,
            text_outputs=True,
            structured_output=True,
            tool_calling=card.has_chat_template,
            tool_choice=card.has_chat_template,
        )
        return self.profile

    @property
    def _llm_type(self) -> str:
        return "ragfuse-chat"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._chunks(*self._asked(messages, stop, run_manager, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(*self._asked(messages, stop, run_manager, kwargs)):
            if run_manager:
                run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
            yield chunk

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(
            self._achunks(*self._asked(messages, stop, run_manager, kwargs))
        )

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(
            self._achunks(*self._asked(messages, stop, run_manager, kwargs))
        ) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                yield chunk

    def _asked(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        run_manager: Any,
        call: dict[str, Any],
    ) -> tuple[Any, Ask, str | None]:
        """Return (prompt, options, name of another model or None) of a call."""
        tools = [
            convert_to_openai_tool(tool, strict=call.get("strict"))
            for tool in call.get("tools") or ()
        ]
        return (
            _prompt_of(messages),
            self._ask(stop, call, messages, run_manager, tools),
            call.get("model"),
        )

    def _chunks(self, prompt: Any, ask: Ask, model: str | None) -> Iterator[ChatGenerationChunk]:
        with self._place.stream(prompt, ask, model) as stream:
            yield from map(_chunk, stream.pieces())
            yield self._last(stream.answer, ask, model)

    async def _achunks(
        self, prompt: Any, ask: Ask, model: str | None
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with await self._place.astream(prompt, ask, model) as stream:
            async for piece in stream.apieces():
                yield _chunk(piece)
            yield self._last(stream.answer, ask, model)

    def _last(self, answer: Answer, ask: Ask, model: str | None) -> ChatGenerationChunk:
        """Return the final chunk of a stream, with tool calls, usage and trace."""
        told = self._place.told(answer, ask, model)
        message = AIMessageChunk(
            content="",
            tool_call_chunks=[
                _call_chunk(call, index) for index, call in enumerate(calls_of(answer))
            ],
            response_metadata=self._metadata(told),
            usage_metadata=usage_of(told),
            chunk_position="last",
        )
        return ChatGenerationChunk(
            message=message, generation_info={"finish_reason": answer.finish_reason}
        )


def _prompt_of(messages: Sequence[BaseMessage]) -> Any:
    """Return the filled template of a `PMLMessage`, or other messages as ragfuse's messages."""
    return pml_of(messages) or to_ragfuse_messages(messages)


def _call_chunk(call: ToolCall, index: int) -> ToolCallChunk:
    """Return a whole tool call as one chunk."""
    arguments = json.dumps(call["args"], ensure_ascii=False)
    return tool_call_chunk(name=call["name"], args=arguments, id=call["id"], index=index)


def _chunk(piece: Any) -> ChatGenerationChunk:
    """Return a chunk with a piece of text, or with a piece of reasoning in `additional_kwargs`."""
    text, kwargs = (
        (piece, {}) if isinstance(piece, str) else ("", {"reasoning_content": piece.text})
    )
    return ChatGenerationChunk(message=AIMessageChunk(content=text, additional_kwargs=kwargs))
