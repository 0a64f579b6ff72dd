"""What the model class of every framework promises, as a class to inherit: one core answers for all
of them, in this process or at a server.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from integrations.tests.kit import READ, SECRETS, hits, loaded_by, outline, read_and_stored
from integrations.tests.served import KEY, stored
from ragfuse import Engine, ModelError, Settings, SettingsError
from ragfuse.remote import RemoteEngine, ServerError
from tests.serve.kit import Served

SALT = "blue-7f31c0"


@dataclass(frozen=True)
class Reply:
    """An answer, whatever a framework wraps it in."""

    text: str
    trace: dict[str, Any]
    n_tokens: int
    n_cached: int
    n_written: int

    def told(self) -> Any:
        """All of it but times and the name of the model."""
        return self.text, outline(self.trace), self.n_tokens, self.n_cached, self.n_written


class ModelContract:
    """Tests of one model class: say how it is made, asked and written down."""

    kind: ClassVar[Callable[..., Any]]
    misspelt: ClassVar[tuple[str, str]]
    """An argument, and what is meant."""
    given: ClassVar[dict[str, Any]] = {"ratio": 0.2}
    """How much the framework lets recompute, in its words."""
    program: ClassVar[str]
    """Imports the class as M, and asks `llm` for the text `said`."""
    asks_in_turns: ClassVar[bool] = True
    """Whether a question becomes a chat, not a text to go on with."""

    def key(self, key: str) -> Any:
        return key

    def ask(self, llm: Any, question: str, **options: Any) -> Reply:
        raise NotImplementedError

    async def aask(self, llm: Any, question: str, **options: Any) -> Reply:
        raise NotImplementedError

    def pieces(self, llm: Any, question: str) -> tuple[list[str], Reply | None]:
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
        return self.kind(engine=engine, **self.given)

    @pytest.fixture
    def remote(self, served: Served) -> Any:
        return self.kind(base_url=served.url, api_key=self.key(KEY), **self.given)

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
        batcher = engine.model.batcher
        while not batcher.active:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(batcher.wait_idle, 60.0)

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
