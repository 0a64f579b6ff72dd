"""Tests that any LlamaIndex LLM must pass, as a class to inherit: the framework has no such suite
of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import LLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

CALLS = tuple(
    f"{a}{stream}{what}"
    for what in ("complete", "chat")
    for a in ("", "a")
    for stream in ("", "stream_")
)
STREAMS = tuple(call for call in CALLS if "stream" in call)
WAIT_S = 60.0


class EventRecorder(BaseEventHandler):
    """A handler that records all events."""

    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the handler."""
        return "EventRecorder"

    def handle(self, event: Any, **kwargs: Any) -> None:
        """Record an event."""
        self.events.append(event)

    def kinds(self, call: str) -> list[str]:
        """Return the short names of the events of a call's kind, in order; repeated names in a row
        count once.
        """
        prefix = "LLMChat" if "chat" in call else "LLMCompletion"
        names = [
            event.class_name() for event in self.events if event.class_name().startswith(prefix)
        ]
        short = [name.removeprefix(prefix).removesuffix("Event") for name in names]
        return [name for at, name in enumerate(short) if at == 0 or short[at - 1] != name]


def text_of(response: Any) -> str:
    """Return the text of a response."""
    return (response.message.content if isinstance(response, ChatResponse) else response.text) or ""


def joined_text(responses: list[Any]) -> str:
    """Return the text of a stream, from its deltas."""
    return "".join(response.delta or "" for response in responses)


class Town(BaseModel):
    """A town."""

    is_harbour: bool


class LLMConformance:
    """Tests of one LLM: override the fixture `llm` and, where necessary, the attributes."""

    question: ClassVar[str] = "Port Elling has a harbour. What does Port Elling have?"
    """A question that the LLM answers with some text."""
    long_kwargs: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of calls, so that the answer takes long enough to be cancelled."""
    object_kwargs: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of calls, so that the answer has room for an object or a tool call."""
    shared_threads: ClassVar[tuple[str, ...]] = ("asyncio_",)
    """Prefixes of the names of threads that may outlive an answer, as they serve all answers."""

    @pytest.fixture
    def llm(self) -> LLM:
        """The LLM to test."""
        raise NotImplementedError("Override the fixture `llm`.")

    @pytest.fixture
    def recorder(self) -> Iterator[EventRecorder]:
        """A recorder of the events that are dispatched while a test runs."""
        handler, dispatcher = EventRecorder(events=[]), get_dispatcher()
        dispatcher.add_event_handler(handler)
        yield handler
        dispatcher.event_handlers.remove(handler)

    async def answers(
        self, llm: LLM, call: str, text: str | None = None, **kwargs: Any
    ) -> list[Any]:
        """Return all responses of one of the eight calls (`CALLS`) to a question."""
        question = self.question if text is None else text
        prompt: Any = [ChatMessage(role="user", content=question)] if "chat" in call else question
        responses = getattr(llm, call)(prompt, **kwargs)
        if call.startswith("a"):
            responses = await responses
        if "stream" not in call:
            return [responses]
        return (
            [each async for each in responses]
            if isinstance(responses, AsyncIterator)
            else list(responses)
        )

    # the text of answers

    @pytest.mark.parametrize("what", ["complete", "chat"])
    async def test_all_calls_of_a_kind_say_the_same(self, llm: LLM, what: str) -> None:
        """Sync or async, whole or streamed."""
        texts = {}
        for call in CALLS:
            if call.endswith(what):
                responses = await self.answers(llm, call)
                texts[call] = joined_text(responses) if "stream" in call else text_of(responses[0])
        assert len(set(texts.values())) == 1, texts
        assert next(iter(texts.values()))

    # metadata

    def test_metadata_says_what_prompt_helpers_need(self, llm: LLM) -> None:
        """The context window is larger than an answer, and the class has a name of its own."""
        metadata = llm.metadata
        assert metadata.context_window > metadata.num_output
        assert isinstance(metadata.is_chat_model, bool)
        assert metadata.model_name not in ("", "unknown")
        assert llm.class_name() not in ("base_component", "custom_llm", "BaseLLM")

    # events and spans

    @pytest.mark.parametrize("call", CALLS)
    async def test_every_call_is_told(self, llm: LLM, recorder: EventRecorder, call: str) -> None:
        """To events, once, with the answer and the usage, also where an async call has a sync one
        inside it; each response of a stream has its text so far.
        """
        responses = await self.answers(llm, call)
        last = responses[-1]
        if "stream" in call:
            assert [text_of(each) for each in responses] == [
                joined_text(responses[: at + 1]) for at in range(len(responses))
            ]
        usage = last.raw["usage"]
        assert min(usage["prompt_tokens"], usage["completion_tokens"]) > 0
        progress = ["InProgress"] if "stream" in call else []
        assert recorder.kinds(call) == ["Start", *progress, "End"]
        told = recorder.events[-1]
        assert (text_of(told.response), told.response.raw["usage"]) == (text_of(last), usage)
        assert recorder.events[0].span_id == told.span_id != ""

    # concurrency and cancellation

    @pytest.mark.parametrize("call", [call for call in CALLS if call.startswith("a")])
    async def test_the_event_loop_goes_on_while_it_answers(self, llm: LLM, call: str) -> None:
        """Another task runs many times before the answer is finished."""
        turns, answer = 0, asyncio.ensure_future(self.answers(llm, call))
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        await answer
        assert turns > 20

    async def test_many_tasks_at_once_get_their_own_answers(self, llm: LLM) -> None:
        """The answers are those that each question gets alone."""
        texts = [f"{self.question} Say it {number} times." for number in range(6)]
        alone = [text_of(llm.complete(text)) for text in texts]
        together = await asyncio.gather(*(llm.acomplete(text) for text in texts))
        assert [text_of(each) for each in together] == alone

    @pytest.mark.parametrize("call", [call for call in CALLS if call.startswith("a")])
    async def test_cancelling_ends_the_work(self, llm: LLM, call: str) -> None:
        """No thread keeps generating, and the next answer is correct."""
        whole, before = text_of(llm.complete(self.question)), self.threads()
        answer = asyncio.ensure_future(self.answers(llm, call, **self.long_kwargs))
        while not (self.threads() - before or answer.done()):
            await asyncio.sleep(0.001)
        assert answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await asyncio.to_thread(self.join_new_threads, before)
        assert text_of(llm.complete(self.question)) == whole

    @pytest.mark.parametrize("call", STREAMS)
    async def test_leaving_a_stream_ends_the_work(self, llm: LLM, call: str) -> None:
        """The same holds when the reader closes a stream early."""
        whole, before = text_of(llm.complete(self.question)), self.threads()
        prompt: Any = (
            [ChatMessage(role="user", content=self.question)] if "chat" in call else self.question
        )
        stream = getattr(llm, call)(prompt, **self.long_kwargs)
        if call.startswith("a"):
            stream = await stream
            await anext(stream)
            await stream.aclose()
        else:
            next(stream)
            stream.close()
        await asyncio.to_thread(self.join_new_threads, before)
        assert text_of(llm.complete(self.question)) == whole

    def threads(self) -> set[threading.Thread]:
        """Return the running threads, without those that serve all answers."""
        running = (each for each in threading.enumerate() if each.ident is not None)
        return {each for each in running if not each.name.startswith(self.shared_threads)}

    def join_new_threads(self, before: set[threading.Thread]) -> None:
        """Wait until all threads that were not running before have ended."""
        for thread in self.threads() - before - {threading.current_thread()}:
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name

    # objects and tools

    async def test_structured_answers_are_objects(self, llm: LLM) -> None:
        """By sync, async and streamed structured prediction, and by `as_structured_llm`."""
        arguments: Any = (Town, PromptTemplate("{question}"), dict(self.object_kwargs))
        found = [llm.structured_predict(*arguments, question=self.question)]
        found.append(await llm.astructured_predict(*arguments, question=self.question))
        found.append(list(llm.stream_structured_predict(*arguments, question=self.question))[-1])
        stream = await llm.astream_structured_predict(*arguments, question=self.question)
        found.append([each async for each in stream][-1])
        messages = [ChatMessage(role="user", content=self.question)]
        found.append(llm.as_structured_llm(Town).chat(messages, **self.object_kwargs).raw)
        assert [type(each) for each in found] == [Town] * 5
        assert len(set(map(str, found))) == 1

    async def test_a_required_tool_is_called(self, llm: LLM) -> None:
        """The call fits its schema, and its result is the response."""
        tool = FunctionTool.from_defaults(count_ships, description="Counts the ships in a harbour.")
        assert llm.metadata.is_function_calling_model
        kwargs: Any = {"user_msg": self.question, "tool_required": True, **self.object_kwargs}
        assert llm.predict_and_call([tool], **kwargs).response == "forty ships"
        assert (await llm.apredict_and_call([tool], **kwargs)).response == "forty ships"


def count_ships(is_harbour: bool) -> str:
    """Count the ships."""
    return "forty ships"
