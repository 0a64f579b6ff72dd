"""What the model class of every framework promises, as a class to inherit: one core answers for all
of them, in this process or at a server.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from integrations.tests.doors import Paint, knock, paint
from integrations.tests.kit import (
    READ,
    SECRETS,
    ends_when_cancelled,
    hits,
    loaded_by,
    outline,
    read_and_stored,
)
from integrations.tests.served import KEY, stored
from integrations.tests.thoughts import saying
from ragfuse import (
    ChatMessage,
    Engine,
    Grammar,
    InputError,
    ModelError,
    Settings,
    SettingsError,
    ToolCall,
)
from ragfuse.remote import RemoteEngine, ServerError
from tests.kits.serve import Served

SALT = "blue-7f31c0"


@dataclass(frozen=True)
class Reply:
    """An answer, whatever a framework wraps it in."""

    text: str
    trace: dict[str, Any]
    n_tokens: int
    n_cached: int
    n_written: int
    finish: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Any], ...] = ()

    def told(self) -> Any:
        """All of it but times and the name of the model."""
        written = self.text, self.finish, self.thought, self.calls
        return *written, outline(self.trace), self.n_tokens, self.n_cached, self.n_written


class ModelContract:
    """Tests of one model class: say how it is made, asked and written down."""

    kind: ClassVar[Callable[..., Any]]
    misspelt: ClassVar[tuple[str, str]]
    """An argument, and what is meant."""
    program: ClassVar[str]
    """Imports the class as M, and asks `llm` for the text `said`."""
    asks_in_turns: ClassVar[bool] = True
    """Whether a question becomes a chat, not a text to go on with."""

    def key(self, key: str) -> Any:
        return key

    def options(self, **options: Any) -> dict[str, Any]:
        """Arguments of the class that give options to all calls."""
        return options

    def ask(self, llm: Any, question: str, **options: Any) -> Reply:
        raise NotImplementedError

    async def aask(self, llm: Any, question: str, **options: Any) -> Reply:
        raise NotImplementedError

    def pieces(self, llm: Any, question: str, **options: Any) -> tuple[list[str], Reply | None]:
        """The pieces of a stream, and what its end adds up to, if that is told."""
        raise NotImplementedError

    def rag(self, llm: Any, question: str, marked: bool) -> Reply:
        """The answer of the framework's own chain over a retriever's documents, which are marked
        where the framework has a way to.
        """
        raise NotImplementedError

    def shown(self, llm: Any) -> Sequence[object]:
        """What may be printed of a model."""
        raise NotImplementedError

    def written(self, llm: Any) -> Any:
        """What it is written down as; refused where that would hold a secret."""
        raise NotImplementedError

    def read(self, written: Any) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def local(self, engine: Engine) -> Any:
        return self.kind(engine=engine, **self.options(ratio=0.2))

    @pytest.fixture
    def remote(self, served: Served) -> Any:
        key = self.key(KEY)
        return self.kind(base_url=served.url, api_key=key, **self.options(ratio=0.2))

    @pytest.fixture(params=["here", "at a server"])
    def llm(self, request: pytest.FixtureRequest) -> Any:
        name = "local" if request.param == "here" else "remote"
        return request.getfixturevalue(name)

    # answers

    def test_known_chunks_are_reused_in_a_plain_prompt(self, local: Any, engine: Engine) -> None:
        read_and_stored(engine, lambda: self.ask(local, READ))
        reply = self.ask(local, READ)
        assert hits(reply.trace) == ["first.txt", "second.txt"]
        assert reply.n_tokens == len(
            engine.prompt([("user", READ)] if self.asks_in_turns else READ)
        )
        assert reply.n_cached >= reply.trace["tokens_reused"] > 0
        assert reply.n_written == 12

    def test_ratio_one_answers_like_full_prefill(self, local: Any, engine: Engine) -> None:
        read_and_stored(engine, lambda: self.ask(local, READ))
        fused, full = self.ask(local, READ, ratio=1.0), self.ask(local, READ, reuse=False)
        assert fused.text == full.text != ""
        assert full.trace["fallback_reason"]
        assert not fused.trace["fallback_reason"]
        assert full.n_cached == 0

    async def test_streams_and_awaited_answers_are_the_whole_one(self, llm: Any) -> None:
        whole = self.ask(llm, READ)
        pieces, last = await asyncio.to_thread(self.pieces, llm, READ)
        assert len(pieces) > 3
        assert "".join(pieces) == whole.text
        assert last is None or last.told() == whole.told()
        several = await asyncio.gather(*(self.aask(llm, READ) for _ in range(4)))
        assert {each.text for each in several} == {whole.text}

    async def test_cancelling_an_awaited_answer_ends_its_generation(
        self, local: Any, engine: Engine
    ) -> None:
        call = asyncio.create_task(self.aask(local, READ, max_tokens=3000, reuse=False))
        await ends_when_cancelled(call, engine)

    def test_a_grammar_holds_every_answer(self, llm: Any) -> None:
        grammar = Grammar.choice(["yes", "no"])
        assert self.ask(llm, "Is the door green?", grammar=grammar).text in ("yes", "no")

    def test_an_option_of_a_call_goes_before_one_of_the_model(self, engine: Engine) -> None:
        llm = self.kind(engine=engine, **self.options(max_tokens=3))
        assert self.ask(llm, "Hello?").n_written == 3
        assert self.ask(llm, "Hello?", max_tokens=2).n_written == 2

    def test_nothing_is_learnt_from_a_retriever_where_learning_is_off(
        self, tiny_settings: Settings
    ) -> None:
        with Engine(tiny_settings.model_copy(update={"learn": "off"})) as engine:
            llm = self.kind(engine=engine)
            for _ in range(2):
                reply = self.rag(llm, "Who was the harbour master?", False)
                engine.flush()
        assert hits(reply.trace) == []

    # copies and files

    def test_copies_share_the_engine_and_go_on_with_the_settings(
        self, local: Any, engine: Engine, tiny_settings: Settings
    ) -> None:
        loaded = {"model": engine.model.model, "tokenizer": engine.model.tokenizer}
        given = self.kind(**loaded, settings=tiny_settings)
        for llm in (local, given):
            for again in (copy.copy(llm), copy.deepcopy(llm)):
                assert again.get_engine() is llm.get_engine()
        assert copy.deepcopy(engine.model) is engine.model
        salted = self.kind(settings=tiny_settings.model_copy(update={"salt": "blue"}))
        for again in (copy.deepcopy(salted), pickle.loads(pickle.dumps(salted))):
            assert again._place.settings == salted._place.settings

    @pytest.mark.parametrize("secret", SECRETS)
    def test_no_secret_is_shown_or_written(
        self, tiny_settings: Settings, secret: dict[str, Any]
    ) -> None:
        llm = self.kind(settings=tiny_settings.model_copy(update=secret))
        assert SALT not in str(self.shown(llm))
        with pytest.raises(Exception, match=next(iter(secret))) as refused:
            self.written(llm)
        assert SALT not in str(refused.value)

    def test_what_is_written_makes_the_same_model(
        self, tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiers = (tiny_settings.store.as_uri(),)
        more = {"ratio": 0.5, "chunk_tokens": 99, "levels": {"disk": ["int8"]}, "tiers": tiers}
        settings = Settings(**{**tiny_settings.model_dump(), **more})
        written = self.written(self.kind(settings=settings))
        monkeypatch.setenv("RAGFUSE_MAX_TOKENS", "77")
        monkeypatch.chdir("/")
        assert self.read(written)._place.settings == settings
        assert self.written(self.read(written)) == written

    # mistakes

    def test_a_misspelt_argument_is_refused_with_what_is_meant(self) -> None:
        wrong, meant = self.misspelt
        with pytest.raises(SettingsError, match=meant):
            self.kind(**{wrong: None})
        with pytest.raises(SettingsError, match="flot32"):
            self.kind(dtype="flot32")

    @pytest.mark.parametrize("option", [{"loudness": 3}, {"ratio": 3}], ids=str)
    def test_an_option_that_cannot_be_is_refused_by_its_name(
        self, local: Any, option: dict[str, Any]
    ) -> None:
        with pytest.raises(SettingsError, match=next(iter(option))):
            self.ask(local, "Hello?", **option)

    def test_a_model_that_is_not_there_is_named_when_it_is_first_used(self, tmp_path: Path) -> None:
        nowhere = self.kind(model=str(tmp_path / "none"), store=str(tmp_path / "store"))
        assert not (tmp_path / "store").exists()
        with pytest.raises(ModelError, match="none"):
            self.ask(nowhere, "Hello?")

    # at a server

    @pytest.mark.parametrize("marked", [False, True])
    def test_a_chain_answers_alike_and_reuses_at_its_second_question(
        self, local: Any, remote: Any, engine: Engine, served: Served, marked: bool
    ) -> None:
        for question in ("Who was the harbour master?", "Which oil did the lighthouse burn?"):
            here, there = (self.rag(llm, question, marked) for llm in (local, remote))
            assert here.told() == there.told()
            engine.flush()
            stored(served)
        assert there.n_cached > 0
        assert len(hits(there.trace)) >= 3

    def test_a_key_comes_from_the_environment_and_is_never_shown(
        self, served: Served, remote: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ServerError, match="api_key"):
            self.ask(self.kind(base_url=served.url), "Who?")
        monkeypatch.setenv("RAGFUSE_API_KEY", KEY)
        llm = self.kind(base_url=served.url)
        written = self.written(llm)
        assert KEY not in str((*self.shown(llm), *self.shown(remote), written))
        for again in (self.read(written), self.kind(engine=RemoteEngine(served.url, KEY))):
            assert self.ask(again, "Who?").text == self.ask(remote, "Who?").text

    def test_asking_a_server_loads_neither_torch_nor_transformers(self, served: Served) -> None:
        if not self.program:
            pytest.skip("the framework loads them itself")
        setup, asked = self.program.split("\n")
        key = f"import os; os.environ['RAGFUSE_API_KEY'] = {KEY!r}"
        made = f"llm = M(base_url={served.url!r})"
        printed, heavy = loaded_by(f"{key}\n{setup}\n{made}\n{asked}\nprint(bool(said))")
        assert printed == "True"
        assert "torch" not in heavy
        assert "transformers" not in heavy


CALL = ToolCall("paint", {"colour": "red", "coats": 2}, "call_1")
CONVERSATION = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Paint.\nNow."),
    ChatMessage("assistant", "Yes.", (CALL,), reasoning="A door."),
    ChatMessage("tool", "Done.", (), "call_1", "paint"),
]


class ChatContract(ModelContract):
    """What a chat model promises beside it: tools, objects, thoughts, and all of a conversation."""

    tool: ClassVar[Callable[[Any], Any]]
    """Makes the framework's tool of a function."""
    convert: ClassVar[Callable[[Any], list[ChatMessage]]]
    """Reads the framework's messages."""
    of_generate: ClassVar[str] = "generate_kwargs"
    """The option whose options go to transformers' `generate`."""

    def conversations(self) -> list[Any]:
        """`CONVERSATION` in the framework's messages, in each form that it has."""
        raise NotImplementedError

    def image(self) -> Any:
        """A message with an image."""
        raise NotImplementedError

    def held(self, llm: Any, form: type[BaseModel]) -> Any:
        """An object of this class as the answer."""
        raise NotImplementedError

    @pytest.mark.parametrize("choice", ["paint", "required"])
    async def test_a_tool_that_must_be_called_is_called(self, llm: Any, choice: str) -> None:
        functions = (paint, knock) if choice == "paint" else (paint,)
        options: dict[str, Any] = {"tools": [self.tool(each) for each in functions]}
        options |= {"tool_choice": choice, "max_tokens": 120}
        reply = self.ask(llm, "Hello?", **options)
        ((name, arguments),) = reply.calls
        assert (name, reply.text, reply.finish) == ("paint", "", "tool_calls")
        assert Paint.model_validate(arguments)
        pieces, streamed = self.pieces(llm, "Hello?", **options)
        assert "".join(pieces) == ""
        assert streamed is not None
        assert streamed.calls == (await self.aask(llm, "Hello?", **options)).calls == reply.calls

    def test_no_tool_is_called_where_none_is_wanted(self, llm: Any) -> None:
        tools = [self.tool(paint)]
        reply = self.ask(llm, "Hello?", tools=tools, tool_choice="none")
        assert reply.calls == ()
        assert reply.text
        assert "<tool_call>" not in reply.text

    def test_an_answer_is_an_object_of_its_class(self, llm: Any) -> None:
        assert isinstance(self.held(llm, Paint), Paint)

    async def test_a_thought_is_told_apart_from_the_answer(self, thinking: Engine) -> None:
        llm = self.kind(engine=thinking)
        said = {self.of_generate: saying(thinking, "I count.\n</think>\n\nForty.")}
        pieces, streamed = self.pieces(llm, "How many?", **said)
        assert "".join(pieces) == "Forty."
        replies = self.ask(llm, "How many?", **said), await self.aask(llm, "How many?", **said)
        for reply in (streamed, *replies):
            assert reply is not None
            assert (reply.text, reply.thought) == ("Forty.", "I count.")

    def test_roles_calls_results_and_thoughts_of_a_conversation_are_read(self) -> None:
        for messages in self.conversations():
            found = self.convert(messages)
            assert [replace(each, content=each.text) for each in found] == CONVERSATION

    def test_an_image_is_refused_by_its_name(self) -> None:
        with pytest.raises(InputError, match="image"):
            self.convert([self.image()])
