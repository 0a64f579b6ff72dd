"""What any LlamaIndex LLM must hold to, as tests to inherit: the framework has no such suite of its own.

    from llama_index_llm_conformance import LLMConformance

    class TestMyLLM(LLMConformance):
        @pytest.fixture
        def llm(self):
            return MyLLM(temperature=0)

        lacks = {"usage": "the server it talks to counts no tokens"}

Wants pytest and pytest-asyncio (`asyncio_mode = "auto"`), and an LLM that answers the same to the same question. What
an LLM is known not to do is named in `lacks`, with the reason: those tests are expected to fail, and failing to fail is
reported. Nothing here knows ragfuse.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import EventPayload
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.llms import LLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

from llama_index_llm_conformance.events import Called, Heard, fingerprint, joined, text_of

T = TypeVar("T")
CALLS = tuple(f"{a}{stream}{what}" for what in ("complete", "chat") for a in ("", "a") for stream in ("", "stream_"))
STREAMS = tuple(call for call in CALLS if "stream" in call)
WAIT_S = 60.0
SMALL = 1 << 20
"""Bytes that settings take at most; weights take more."""


class Town(BaseModel):
    """A town."""

    is_harbour: bool


def needs(feature: str) -> Callable[[T], T]:
    """A test of a feature that an LLM may say to lack."""

    def named(test: T) -> T:
        test.feature = feature  # type: ignore[attr-defined]
        return test

    return named


class LLMConformance:
    """Tests of one LLM; override the fixture `llm` and, where it must be, the attributes."""

    asked: ClassVar[str] = "Port Elling has a harbour. What does Port Elling have?"
    """A question that is answered with some text."""
    long: ClassVar[Mapping[str, Any]] = {}
    """Arguments of a call whose answer takes so long that it can be cancelled."""
    enough: ClassVar[Mapping[str, Any]] = {}
    """Arguments of a call whose answer has room for an object or a tool call."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Feature -> reason: what this LLM is known not to do."""
    lasting: ClassVar[tuple[str, ...]] = ("asyncio_",)
    """How the names of threads begin that an answer may leave, because they serve all answers."""

    @pytest.fixture
    def llm(self) -> LLM:
        """The LLM to test."""
        raise NotImplementedError("Override the fixture `llm`.")

    @pytest.fixture(autouse=True)
    def _expected(self, request: pytest.FixtureRequest) -> None:
        reason = self.lacks.get(getattr(request.function, "feature", ""))
        if reason:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture
    def heard(self) -> Iterator[Heard]:
        """The events that are told while a test runs."""
        handler, dispatcher = Heard(events=[]), get_dispatcher()
        dispatcher.add_event_handler(handler)
        yield handler
        dispatcher.event_handlers.remove(handler)

    async def answers(self, llm: LLM, call: str, text: str | None = None, **kwargs: Any) -> list[Any]:
        """All responses of one of the eight calls to a question."""
        asked = self.asked if text is None else text
        given: Any = [ChatMessage(role="user", content=asked)] if "chat" in call else asked
        got = getattr(llm, call)(given, **kwargs)
        if call.startswith("a"):
            got = await got
        if "stream" not in call:
            return [got]
        return [each async for each in got] if isinstance(got, AsyncIterator) else list(got)

    # what is said

    @pytest.mark.parametrize("what", ["complete", "chat"])
    async def test_all_calls_of_a_kind_say_the_same(self, llm: LLM, what: str) -> None:
        """Sync, async, whole or streamed."""
        said = {call: await self.answers(llm, call) for call in CALLS if call.endswith(what)}
        whole = {call: text_of(got[0]) if "stream" not in call else joined(got) for call, got in said.items()}
        assert len(set(whole.values())) == 1, whole
        assert next(iter(whole.values()))

    @needs("growing text")
    @pytest.mark.parametrize("call", STREAMS)
    async def test_a_streams_text_is_what_was_said_so_far(self, llm: LLM, call: str) -> None:
        """Each response holds all deltas up to its own; so the last one is the whole."""
        got = await self.answers(llm, call)
        assert [text_of(each) for each in got] == [joined(got[: at + 1]) for at in range(len(got))]

    @pytest.mark.parametrize("call", [call for call in CALLS if "chat" in call])
    async def test_chats_are_answered_by_the_assistant(self, llm: LLM, call: str) -> None:
        """In every response of a stream."""
        assert {each.message.role for each in await self.answers(llm, call)} == {MessageRole.ASSISTANT}

    def test_a_conversation_is_taken_with_all_its_roles(self, llm: LLM) -> None:
        """System, user and assistant, and two users in a row."""
        roles = ["system", "user", "assistant", "user", "user"]
        messages = [ChatMessage(role=role, content=f"{role} number {at}") for at, role in enumerate(roles)]
        assert text_of(llm.chat(messages))

    def test_what_was_said_before_counts(self, llm: LLM) -> None:
        """A conversation is not its last message."""
        last = ChatMessage(role="user", content=self.asked)
        before = [ChatMessage(role="user", content="Hello there."), ChatMessage(role="assistant", content="Good day!")]
        assert fingerprint(llm.chat([*before, last])) != fingerprint(llm.chat([last]))

    async def test_an_empty_text_is_answered_or_refused_alike(self, llm: LLM) -> None:
        """By all calls of a kind, never with a crash of its insides."""
        for what in ("complete", "chat"):
            ends = {call: await self.ending(llm, call, "") for call in CALLS if call.endswith(what)}
            assert len(set(ends.values())) == 1, ends

    @needs("empty messages")
    async def test_no_messages_at_all_are_refused_with_words(self, llm: LLM) -> None:
        """There is nothing to answer."""
        with pytest.raises(Exception, match=r"(?i)message") as refused:
            llm.chat([])
        assert not isinstance(refused.value, (AssertionError, AttributeError, IndexError, KeyError, TypeError))

    async def ending(self, llm: LLM, call: str, text: str) -> str:
        """How a call ends: what it said, or the error that it raised."""
        try:
            got = await self.answers(llm, call, text)
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError):
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return joined(got) if "stream" in call else text_of(got[0])

    async def test_a_prompt_template_is_answered_as_its_text(self, llm: LLM) -> None:
        """Through predict, stream and their async twins."""
        template = PromptTemplate("{asked}")
        said = {llm.predict(template, asked=self.asked), await llm.apredict(template, asked=self.asked)}
        said.add("".join(llm.stream(template, asked=self.asked)))
        said.add("".join([each async for each in await llm.astream(template, asked=self.asked)]))
        assert len(said) == 1
        assert said != {""}

    # what it says of itself

    def test_metadata_says_what_prompt_helpers_need(self, llm: LLM) -> None:
        """A window that holds more than its answers."""
        metadata = llm.metadata
        assert metadata.context_window > metadata.num_output
        assert isinstance(metadata.is_chat_model, bool)
        assert llm.class_name() not in ("base_component", "custom_llm", "BaseLLM")

    @needs("model name")
    def test_metadata_names_the_model(self, llm: LLM) -> None:
        """For whoever reads logs."""
        assert llm.metadata.model_name not in ("", "unknown")

    @needs("usage")
    @pytest.mark.parametrize("call", CALLS)
    async def test_tokens_are_counted(self, llm: LLM, call: str) -> None:
        """In the last response, under the names that token counters and tracers read."""
        usage = (await self.answers(llm, call))[-1].raw["usage"]
        counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        assert counts[0] > 0
        assert counts[1] > 0
        assert counts[0] + counts[1] == counts[2]

    # who hears of it

    @pytest.mark.parametrize("call", CALLS)
    async def test_callbacks_hear_of_every_call(self, llm: LLM, call: str) -> None:
        """Once that it began and once that it ended, with what was asked and said."""
        called = Called()
        llm.callback_manager = CallbackManager([called])
        got = await self.answers(llm, call)
        outer = called.began[0]
        assert outer.get(EventPayload.MESSAGES) or outer.get(EventPayload.PROMPT)
        ends = [each for each in called.ended if each["id"] == outer["id"]]
        said = [each.get(EventPayload.RESPONSE) or each.get(EventPayload.COMPLETION) for each in ends]
        assert [text_of(each) for each in said] == [text_of(got[-1])]

    @pytest.mark.parametrize("call", CALLS)
    async def test_events_tell_every_call(self, llm: LLM, heard: Heard, call: str) -> None:
        """Start, what is in progress, end; the end has the last response."""
        got = await self.answers(llm, call)
        progress = ["InProgress"] if "stream" in call else []
        assert heard.kinds(call) == ["Start", *progress, "End"]
        assert text_of(heard.events[-1].response) == text_of(got[-1])
        assert heard.events[0].span_id == heard.events[-1].span_id != ""

    @needs("events once")
    @pytest.mark.parametrize("call", [call for call in CALLS if call.startswith("a")])
    async def test_an_async_call_is_told_once(self, llm: LLM, heard: Heard, call: str) -> None:
        """Not again by a sync one inside."""
        await self.answers(llm, call)
        assert len([each for each in heard.events if each.class_name().endswith("StartEvent")]) == 1

    @needs("usage")
    async def test_events_carry_the_usage(self, llm: LLM, heard: Heard) -> None:
        """Whole and streamed: tracers look nowhere else."""
        for call in CALLS:
            got = await self.answers(llm, call)
            assert heard.events[-1].response.raw["usage"] == got[-1].raw["usage"]

    def test_spans_nest(self, llm: LLM) -> None:
        """The call stands in the prediction that made it."""
        spans, dispatcher = SimpleSpanHandler(), get_dispatcher()
        dispatcher.add_span_handler(spans)
        try:
            llm.predict(PromptTemplate("{asked}"), asked=self.asked)
        finally:
            dispatcher.span_handlers.remove(spans)
        parents = {span.id_.split("-")[0].split(".")[-1]: span.parent_id for span in spans.completed_spans}
        inner = "chat" if llm.metadata.is_chat_model else "complete"
        assert parents[inner].split("-")[0].split(".")[-1] == "predict"
        assert not spans.open_spans

    # many at once, and no longer than wanted

    @needs("free loop")
    @pytest.mark.parametrize("call", [call for call in CALLS if call.startswith("a")])
    async def test_the_event_loop_goes_on_while_it_answers(self, llm: LLM, call: str) -> None:
        """Another task runs before the answer is there."""
        seen: list[bool] = []
        answer = asyncio.ensure_future(self.answers(llm, call))
        while not answer.done():
            await asyncio.sleep(0.001)
            seen.append(answer.done())
        await answer
        assert not seen[0]

    async def test_many_tasks_at_once_get_their_own_answers(self, llm: LLM) -> None:
        """As if each had been alone."""
        texts = [f"{self.asked} Say it {number} times." for number in range(6)]
        alone = [text_of(llm.complete(text)) for text in texts]
        together = await asyncio.gather(*(llm.acomplete(text) for text in texts))
        assert [text_of(each) for each in together] == alone

    def test_many_threads_at_once_get_their_own_answers(self, llm: LLM) -> None:
        """The same for threads."""
        texts = [f"{self.asked} Say it {number} times." for number in range(4)]
        alone, got = [text_of(llm.complete(text)) for text in texts], dict[str, str]()
        threads = [
            threading.Thread(target=lambda text=text: got.update({text: text_of(llm.complete(text))})) for text in texts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert [got[text] for text in texts] == alone

    @needs("cancelling")
    @pytest.mark.parametrize("call", [call for call in CALLS if call.startswith("a")])
    async def test_cancelling_ends_the_work(self, llm: LLM, call: str) -> None:
        """No thread writes on for nobody, and the next answer is as ever."""
        whole, before = text_of(llm.complete(self.asked)), self.threads()
        answer = asyncio.ensure_future(self.answers(llm, call, **self.long))
        while not (self.threads() - before or answer.done()):
            await asyncio.sleep(0.001)
        assert answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await asyncio.to_thread(self.settle, before)
        assert text_of(llm.complete(self.asked)) == whole

    @pytest.mark.parametrize("call", STREAMS)
    async def test_leaving_a_stream_ends_the_work(self, llm: LLM, call: str) -> None:
        """The same, for one who has read enough."""
        whole, before = text_of(llm.complete(self.asked)), self.threads()
        given: Any = [ChatMessage(role="user", content=self.asked)] if "chat" in call else self.asked
        stream = getattr(llm, call)(given, **self.long)
        if call.startswith("a"):
            stream = await stream
            await anext(stream)
            await stream.aclose()
        else:
            next(stream)
            stream.close()
        await asyncio.to_thread(self.settle, before)
        assert text_of(llm.complete(self.asked)) == whole

    def threads(self) -> set[threading.Thread]:
        """Those at work, without those that serve all answers."""
        return {each for each in threading.enumerate() if not each.name.startswith(self.lasting)}

    def settle(self, before: set[threading.Thread]) -> None:
        """Wait until all threads that are new have ended."""
        for thread in self.threads() - before - {threading.current_thread()}:
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name

    # away and back

    @needs("serialising")
    def test_its_settings_survive_json(self, llm: LLM) -> None:
        """Without its weights; what comes back answers the same."""
        written = json.dumps(llm.to_dict())
        assert len(written) < SMALL
        again = type(llm).from_dict(json.loads(written), **self.beside_json(llm))
        assert text_of(again.complete(self.asked)) == text_of(llm.complete(self.asked))

    def beside_json(self, llm: LLM) -> dict[str, Any]:
        """What `from_dict` is given besides: nothing, or what has no place in a file, like keys."""
        return {}

    # more than text

    @needs("structured")
    async def test_structured_answers_are_objects(self, llm: LLM) -> None:
        """Predicted, awaited, streamed to the end and through `as_structured_llm`."""
        given: Any = (Town, PromptTemplate("{asked}"), dict(self.enough))
        found = [llm.structured_predict(*given, asked=self.asked)]
        found.append(await llm.astructured_predict(*given, asked=self.asked))
        found.append(list(llm.stream_structured_predict(*given, asked=self.asked))[-1])
        stream = await llm.astream_structured_predict(*given, asked=self.asked)
        found.append([each async for each in stream][-1])
        messages = [ChatMessage(role="user", content=self.asked)]
        found.append(llm.as_structured_llm(Town).chat(messages, **self.enough).raw)
        assert [type(each) for each in found] == [Town] * 5
        assert len(set(map(str, found))) == 1

    @needs("tools")
    async def test_a_required_tool_is_called(self, llm: LLM) -> None:
        """With its name and arguments of its schema; and its result is taken."""
        tool = FunctionTool.from_defaults(count_ships, description="Counts the ships in a harbour.")
        assert llm.metadata.is_function_calling_model
        given: Any = {"user_msg": self.asked, "tool_required": True, **self.enough}
        assert llm.predict_and_call([tool], **given).response == "forty ships"
        assert (await llm.apredict_and_call([tool], **given)).response == "forty ships"
        calls = llm.get_tool_calls_from_response(list(llm.stream_chat_with_tools([tool], **given))[-1])
        assert [call.tool_name for call in calls] == ["count_ships"]
        asking = llm.chat_with_tools([tool], **given).message
        said = ChatMessage(role="tool", content="forty ships", additional_kwargs={"tool_call_id": calls[0].tool_id})
        assert isinstance(llm.chat([ChatMessage(role="user", content=self.asked), asking, said]), ChatResponse)


def count_ships(is_harbour: bool) -> str:
    """Count the ships."""
    return "forty ships"
