"""The chat generator, which answers Haystack's messages with a `ragfuse.Engine` or a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.dataclasses import (
    ChatMessage,
    ComponentInfo,
    ReasoningContent,
    StreamingCallbackT,
    StreamingChunk,
    ToolCall,
    ToolCallDelta,
    select_streaming_callback,
)
from haystack.tools import (
    ToolsType,
    deserialize_tools_or_toolset_inplace,
    flatten_tools_or_toolsets,
    serialize_tools_or_toolset,
)
from haystack.utils import Secret, deserialize_callable, serialize_callable
from haystack_integrations.components.generators.ragfuse.messages import (
    DOCUMENTS,
    calls_of,
    to_ragfuse_messages,
)
from haystack_integrations.components.generators.ragfuse.retrieved import listen, retrieved_for

from ragfuse import Answer, Ask, InputError, Settings
from ragfuse.adapters import Answerer, Place, ask_of
from ragfuse.types.arguments import checks_arguments


@component
@checks_arguments
class RagfuseChatGenerator:
    """A chat generator that reuses the stored KV of retrieved documents and computes only the rest
    of the prompt.

    Pipelines need no change: the generator recognises retrieved documents in the text of the
    prompt. The weights are loaded at warm-up. Generators of one process with equal model, dtype and
    device share the weights. With `base_url`, a server answers, and no weights are loaded in this
    process.

    Args:
        model: Name of an included model, Hugging Face id, folder of a model or adapter, or GGUF
            file. Or a loaded model: a `PreTrainedModel` together with `tokenizer`, a `pipeline`, or
            a PEFT model. None means the model in the settings.
        streaming_callback: Called with every piece of an answer.
        generation_kwargs: Options of every call: `max_tokens`, `temperature`, `stop`, `seed`,
            `response_format`, `ratio`, `reuse` and more. The error for an unknown option suggests
            the closest name or lists all names.
        tools: Tools, or toolsets, that the model may call.
        base_url: URL of a `ragfuse serve` server to use instead of an engine in this process.
        api_key: The server's API key. An engine in this process needs no key.
        max_retries: Maximum retries if the server is unreachable or busy. None means 2.
        dtype: Dtype of weights and KV. None means the dtype in the settings.
        device: `cpu`, `cuda` or `cuda:N`. None means the device in the settings.
        store: Folder of the chunk store. None means the folder in the settings.
        settings: All other settings. None means to read the environment, ragfuse.toml and the
            defaults.
        model_kwargs: Options for loading the model: revision, trust_remote_code,
            attn_implementation, device_map ...
        tokenizer: The tokenizer of a loaded model.
        engine: A `ragfuse.Engine` or `ragfuse.RemoteEngine` to use instead of an engine made from
            the other arguments.

    Raises:
        InputError: Arguments contradict each other.
        SettingsError: An option is unknown or out of range.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        tools: ToolsType | None = None,
        base_url: str | None = None,
        api_key: Secret | None = Secret.from_env_var("RAGFUSE_API_KEY", strict=False),  # noqa: B008
        max_retries: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        store: str | None = None,
        settings: Settings | None = None,
        model_kwargs: dict[str, Any] | None = None,
        tokenizer: Any = None,
        engine: Any = None,
    ) -> None:
        self._place = Place.of(
            model=model,
            engine=engine,
            base_url=base_url,
            api_key=None if api_key is None else api_key.resolve_value(),
            max_retries=max_retries,
            dtype=dtype,
            device=device,
            store=store,
            settings=settings,
            model_kwargs=model_kwargs,
            tokenizer=tokenizer,
        )
        self.model = str(model) if isinstance(model, str | Path) else None
        self.streaming_callback, self.tools = streaming_callback, tools
        self.generation_kwargs = generation_kwargs or {}
        self.base_url, self.api_key, self.max_retries = base_url, api_key, max_retries
        self.dtype, self.device, self.store = dtype, device, store
        self.model_kwargs = {
            name: value for name, value in (model_kwargs or {}).items() if name != "token"
        }
        self._ask({}, tools, ())
        self._listen()

    def warm_up(self) -> None:
        """Load the model, unless a server answers. Haystack's pipelines call this method first."""
        self._listen()
        if self._place.address is None:
            _ = self.get_engine().card

    async def warm_up_async(self) -> None:
        """Load the model like `warm_up`, without blocking the event loop."""
        await asyncio.to_thread(self.warm_up)

    def get_engine(self) -> Answerer:
        """Return the passed engine or client, else an engine or client that this process shares."""
        return self._place.engine()

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments, from which `from_dict` recreates the generator.

        Raises:
            SettingsError: The settings contain a secret, and secrets are not serialised.
            InputError: The model is a loaded object, or an option cannot be serialised.
        """
        names = "model", "base_url", "max_retries", "dtype", "device", "model_kwargs"
        written: dict[str, Any] = default_to_dict(
            self,
            **{
                **{name: getattr(self, name) for name in names},
                "store": None if self.store is None else str(self.store),
                "streaming_callback": serialize_callable(self.streaming_callback)
                if self.streaming_callback
                else None,
                "generation_kwargs": _serialisable(self.generation_kwargs),
                "tools": serialize_tools_or_toolset(self.tools),
                "api_key": None if self.api_key is None else self.api_key.to_dict(),
                **self._place.as_public(),
            },
        )
        return written

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagfuseChatGenerator:
        """Recreate the generator from the result of `to_dict`."""
        given = deepcopy(data.get("init_parameters", {}))  # deserialising tools modifies the dict
        deserialize_tools_or_toolset_inplace(given, key="tools")
        if given.get("streaming_callback"):
            given["streaming_callback"] = deserialize_callable(given["streaming_callback"])
        if isinstance(given.get("api_key"), dict):
            given["api_key"] = Secret.from_dict(given["api_key"])
        if isinstance(given.get("settings"), dict):
            given["settings"] = Settings(**given["settings"])
        made: RagfuseChatGenerator = default_from_dict(cls, {**data, "init_parameters": given})
        return made

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        tools: ToolsType | None = None,
        documents: list[Document] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Generate the reply to a conversation.

        Args:
            messages: The conversation. A text counts as one user message.
            streaming_callback: Called with every piece of the answer. None means the generator's
                callback.
            generation_kwargs: Options of this call, which override the generator's options.
            tools: Tools of this call. None means the generator's tools.
            documents: Documents whose text is in the messages. Documents that a retriever of the
                same pipeline returned may be omitted.

        Returns:
            {"replies": [message]}, or {"replies": []} if `messages` is empty. The message's meta
            has model, finish_reason and usage, and the trace under `ragfuse`.
        """
        self.warm_up()
        if not messages:
            return {"replies": []}
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        ask = self._asked(messages, generation_kwargs, tools, documents)
        streamed = Streamed(ComponentInfo.from_component(self), self._place, ask)
        with self._place.stream(to_ragfuse_messages(messages), ask) as stream:
            for piece in stream.pieces():
                if callback is not None:
                    callback(streamed.chunk(piece))
            for chunk in streamed.last(stream.answer):
                if callback is not None:
                    callback(chunk)
        return {"replies": [streamed.reply(stream.answer)]}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        tools: ToolsType | None = None,
        documents: list[Document] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer like `run`, without blocking the event loop. Cancelling stops generation."""
        await self.warm_up_async()
        if not messages:
            return {"replies": []}
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=True
        )
        ask = self._asked(messages, generation_kwargs, tools, documents)
        streamed = Streamed(ComponentInfo.from_component(self), self._place, ask)
        async with await self._place.astream(to_ragfuse_messages(messages), ask) as stream:
            async for piece in stream.apieces():
                if callback is not None:
                    await _call(callback, streamed.chunk(piece))
            for chunk in streamed.last(stream.answer):
                if callback is not None:
                    await _call(callback, chunk)
            return {"replies": [streamed.reply(stream.answer)]}

    def _listen(self) -> None:
        if self._place.hears_retrievers:
            listen()

    def _asked(
        self,
        messages: Sequence[ChatMessage] | str,
        call: dict[str, Any] | None,
        tools: ToolsType | None,
        documents: Sequence[Document] | None,
    ) -> Ask:
        """Return the options of a call, with the call's tools and given or retrieved documents."""
        heard = retrieved_for(messages) if self._place.hears_retrievers else ()
        given = ((text, source) for text, source, _ in DOCUMENTS(documents or []))
        known = dict((*heard, *given))
        return self._ask(call or {}, self.tools if tools is None else tools, tuple(known.items()))

    def _ask(
        self, call: dict[str, Any], tools: ToolsType | None, documents: Sequence[tuple[str, str]]
    ) -> Ask:
        given = {**self.generation_kwargs, **call}
        if "max_completion_tokens" in given:
            given.setdefault("max_tokens", given.pop("max_completion_tokens"))
        schemas = [
            {"type": "function", "function": tool.tool_spec}
            for tool in flatten_tools_or_toolsets(tools)
        ]
        return ask_of("generation_kwargs", {}, given, schemas, documents)


@dataclass
class Streamed:
    """Converts one streamed answer to Haystack's `StreamingChunk`s.

    Reasoning, text and each tool call are separate content blocks.

    Args:
        info: The generator's name and type.
        place: The engine or server that answers.
        ask: The options of the call.
        block: Index of the current content block. -1 before the first block.
        kind: Kind of the current content block.
        first_token: Time of the first chunk, in ISO format. None before the first chunk.
        calls: The answer's tool calls, once the answer is complete.
    """

    info: ComponentInfo
    place: Place
    ask: Ask
    block: int = -1
    kind: str = ""
    first_token: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def chunk(self, piece: Any) -> StreamingChunk:
        """Return a piece of text or reasoning as a `StreamingChunk`."""
        is_text = isinstance(piece, str)
        begins = self._begin("text" if is_text else "reasoning")
        return self._chunk(
            content=piece if is_text else "",
            reasoning=None if is_text else ReasoningContent(piece.text),
            index=self.block,
            start=begins,
        )

    def last(self, answer: Answer) -> Iterator[StreamingChunk]:
        """Yield the chunks at the end of a stream: the tool calls, then the finish reason."""
        self.calls = calls_of(answer)
        for number, call in enumerate(self.calls):
            self._begin(f"call {number}")
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            delta = ToolCallDelta(number, call.tool_name, arguments, call.id)
            yield self._chunk(content="", tool_calls=[delta], index=self.block, start=True)
        told = self.place.told(answer, self.ask)
        yield self._chunk(content="", finish_reason=answer.finish_reason, meta={"index": 0, **told})

    def reply(self, answer: Answer) -> ChatMessage:
        """Return the whole answer as a message. Tool calls have the ids that were streamed."""
        told = self.place.told(answer, self.ask)
        return ChatMessage.from_assistant(
            text=answer.text or (None if self.calls else ""),
            tool_calls=self.calls,
            reasoning=ReasoningContent(answer.reasoning) if answer.reasoning else None,
            meta={"index": 0, **told, "completion_start_time": self.first_token},
        )

    def _begin(self, kind: str) -> bool:
        """Return True if a piece of this kind begins a new block. A new block is counted."""
        begins, self.kind = kind != self.kind, kind
        self.block += begins
        return begins

    def _chunk(
        self, content: str, meta: Mapping[str, Any] = MappingProxyType({}), **given: Any
    ) -> StreamingChunk:
        time = datetime.now().isoformat()
        self.first_token = self.first_token or time
        told = {"model": self.place.name, "received_at": time, **meta}
        return StreamingChunk(content, meta=told, component_info=self.info, **given)


async def _call(callback: StreamingCallbackT, chunk: StreamingChunk) -> None:
    """Call a synchronous callback, or call and await an asynchronous callback."""
    waiting: Any = callback(chunk)
    if waiting is not None:
        await waiting


def _serialisable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with a class in `response_format` replaced by the class's JSON schema.

    Raises:
        InputError: An option is a grammar, which cannot be serialised.
    """
    if given.get("grammar") is not None:
        raise InputError(
            "A grammar in generation_kwargs cannot be serialised. Pass the grammar at run time."
        )
    form = given.get("response_format")
    if not isinstance(form, type):
        return dict(given)
    schema = {"name": form.__name__, "schema": form.model_json_schema()}
    return {**given, "response_format": {"type": "json_schema", "json_schema": schema}}
