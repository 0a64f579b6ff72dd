"""The chat model: LangChain's messages, tools and structured output, answered by `ragfuse.Engine`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import model_validator

from langchain_ragfuse.base import CONFIG, RagFuseModel, cancelled_at_exit, metadata_of, usage_of
from langchain_ragfuse.messages import calls_of, to_ragfuse_messages
from langchain_ragfuse.prompts import pml_of, ready
from langchain_ragfuse.tools import choice_of, parsed_into, structured, tools_of
from ragfuse import Answer, Ask
from ragfuse.remote import Answerer
from ragfuse.types.arguments import checks_arguments

TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "strict")
OTHER_MEDIA = (
    "image_inputs",
    "image_url_inputs",
    "pdf_inputs",
    "audio_inputs",
    "video_inputs",
    "image_outputs",
    "audio_outputs",
    "video_outputs",
)


@checks_arguments
class ChatRagFuse(RagFuseModel, BaseChatModel):
    """A local chat model that reuses the stored KV of retrieved chunks and computes only the rest of the prompt.

    Any prompt works unchanged: indexed chunks are found in its text. The weights are loaded at the first question and
    shared by all models of the process with the same name, dtype and device. With `base_url` a `ragfuse serve` answers.
    """

    model_config = CONFIG

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the number of tokens of the prompt for these messages, with chat template and tools."""
        engine = self.get_engine()
        return engine.count_tokens(ready(_prompt_of(messages), engine), tools_of(tools or ()))

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """Return this model with tools that it may call, described to it by its chat template.

        Args:
            tools: Functions, classes, LangChain tools, or tools in OpenAI's form.
            tool_choice: "auto" (as None), "none", "any" or "required", or the name of a tool.
            parallel_tool_calls: False allows one call at most.
            strict: Passed on to the tools' description; calls always fit their tool's schema.
            **kwargs: Further options of each call.
        """
        schemas = tools_of(tools, strict)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=schemas, tool_choice=choice_of(tool_choice, schemas), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
    ) -> Runnable[Any, Any]:
        """Return a runnable that answers with an object of a schema, to which decoding is constrained.

        Args:
            schema: A Pydantic class, a TypedDict or a JSON schema.
            method: All methods constrain decoding; "function_calling" also shows the schema to the model.
            include_raw: Return {"raw", "parsed", "parsing_error"} instead of the object.
            strict: Passed on to the schema's description.
        """
        return parsed_into(structured(self, schema, method, strict), schema, method, include_raw)

    @model_validator(mode="after")
    def _profile_at_first_use(self) -> Self:
        """Drop a profile that was not given: `__getattr__` makes it when it is read, as that loads the model."""
        if self.profile is None:
            del self.profile
        return self

    def __getattr__(self, name: str) -> Any:
        """Return `profile`, what the model can do; it loads the model, or asks the server once."""
        if name != "profile":
            return super().__getattr__(name)  # type: ignore[misc]
        card = self.get_engine().card
        self.profile = ModelProfile(
            name=card.name,
            max_input_tokens=card.max_context,  # type: ignore[typeddict-item]
            text_inputs=True,
            text_outputs=True,
            structured_output=True,
            **dict.fromkeys(("tool_calling", "tool_choice", "tool_call_streaming"), card.has_chat_template),
            **dict.fromkeys(OTHER_MEDIA, False),
        )
        return self.profile

    @property
    def _llm_type(self) -> str:
        return "ragfuse-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return self._traced(super()._get_ls_params(stop=stop, **kwargs), kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask, prompt = self._ask_with_tools(messages, stop, kwargs, run_manager), _prompt_of(messages)
        engine = self.get_engine(kwargs.get("model"))
        return _result(engine.answer(ready(prompt, engine), ask), engine, ask)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        ask, prompt, streamed = self._ask_with_tools(messages, stop, kwargs, run_manager), _prompt_of(messages), ""
        engine = self.get_engine(kwargs.get("model"))
        with engine.stream(ready(prompt, engine), ask) as stream:
            for piece in stream.pieces():
                streamed += piece if isinstance(piece, str) else ""
                chunk = _chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                yield chunk
            last = _last(stream.answer, streamed, engine, ask)
            if run_manager:
                run_manager.on_llm_new_token(str(last.text), chunk=last)
            yield last

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        ask, prompt = self._ask_with_tools(messages, stop, kwargs, run_manager), _prompt_of(messages)
        engine = await asyncio.to_thread(self.get_engine, kwargs.get("model"))
        prompt = await asyncio.to_thread(ready, prompt, engine)
        async with cancelled_at_exit(engine.stream(prompt, ask)) as stream:
            async for _ in stream:
                pass
            return _result(stream.answer, engine, ask)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        ask, prompt, streamed = self._ask_with_tools(messages, stop, kwargs, run_manager), _prompt_of(messages), ""
        engine = await asyncio.to_thread(self.get_engine, kwargs.get("model"))
        prompt = await asyncio.to_thread(ready, prompt, engine)
        async with cancelled_at_exit(engine.stream(prompt, ask)) as stream:
            async for piece in stream.apieces():
                streamed += piece if isinstance(piece, str) else ""
                chunk = _chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                yield chunk
            last = _last(stream.answer, streamed, engine, ask)
            if run_manager:
                await run_manager.on_llm_new_token(str(last.text), chunk=last)
            yield last

    def _ask_with_tools(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, call: Mapping[str, Any], run_manager: Any
    ) -> Ask:
        """Return the options of a call, with its tools and the documents retrieved for it."""
        tools = tools_of(call.get("tools") or (), call.get("strict"))
        choice = choice_of(call.get("tool_choice"), tools)
        ask = self._ask(stop, call, TOOLS, self._retrieved(run_manager, messages))
        parallel = call.get("parallel_tool_calls") is not False
        return replace(ask, tools=tools, tool_choice=choice, parallel_tool_calls=parallel)


def _prompt_of(messages: Sequence[BaseMessage]) -> Any:
    """Return the messages as ragfuse's messages or, if they are a filled PML template, as that."""
    return pml_of(messages) or to_ragfuse_messages(messages)


def _result(answer: Answer, engine: Answerer, ask: Ask) -> ChatResult:
    message = AIMessage(
        answer.text,
        additional_kwargs=_reasoning_kwargs(answer.reasoning),
        tool_calls=calls_of(answer),
        invalid_tool_calls=_invalid_calls(answer, ask, engine),
        response_metadata=metadata_of(answer, engine),
        usage_metadata=usage_of(answer, engine, ask),
    )
    info = {"finish_reason": answer.finish_reason}
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def _last(answer: Answer, streamed: str, engine: Answerer, ask: Ask) -> ChatGenerationChunk:
    """Return the last chunk: text not streamed yet (with beam search all of it), calls, usage and trace."""
    message = AIMessageChunk(
        content=answer.text[len(streamed) :],
        tool_call_chunks=[_call_chunk(call, index) for index, call in enumerate(calls_of(answer))],
        response_metadata=metadata_of(answer, engine),
        usage_metadata=usage_of(answer, engine, ask),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": answer.finish_reason})


def _invalid_calls(answer: Answer, ask: Ask, engine: Answerer) -> list[InvalidToolCall]:
    """Return an invalid call if a required call was cut off by max_tokens, else [].

    Its `args` are what was written of it, where this process has the tokenizer. Streams do not use it: LangChain would
    count it as a call when it joins the chunks.
    """
    if answer.finish_reason != "length" or answer.tool_calls or not ask.tools or ask.tool_choice in ("auto", "none"):
        return []
    error = f"The call was cut off after {len(answer.token_ids)} tokens. Raise max_tokens."
    model = getattr(engine, "model", None)
    written = model.text(answer.token_ids) if model is not None else None
    return [invalid_tool_call(name=None, args=written, id=None, error=error)]


def _call_chunk(call: ToolCall, index: int) -> ToolCallChunk:
    """Return a complete call as one chunk."""
    arguments = json.dumps(call["args"], ensure_ascii=False)
    return tool_call_chunk(name=call["name"], args=arguments, id=call["id"], index=index)


def _chunk(piece: Any) -> ChatGenerationChunk:
    """Return a chunk with a piece of text or of the reasoning before it."""
    if isinstance(piece, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=piece))
    return ChatGenerationChunk(message=AIMessageChunk(content="", additional_kwargs=_reasoning_kwargs(piece.text)))


def _reasoning_kwargs(text: str) -> dict[str, str]:
    """Return reasoning in the form that LangChain turns into content blocks of type "reasoning"."""
    return {"reasoning_content": text} if text else {}
