"""What cannot work says what was wanted, what was found and what to do, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import EventPayload
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM, RagFuseSynthesizer
from llama_index_llm_conformance import CALLS, CallbackRecorder

from ragfuse import Engine, InputError, ModelError, Settings, SettingsError

LONG = "The keeper counted the ships. " * 200


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


async def answered(llm: RagFuseLLM, call: str, text: str, **kwargs: Any) -> None:
    given: Any = [ChatMessage(role="user", content=text)] if "chat" in call else text
    got = getattr(llm, call)(given, **kwargs)
    if call.startswith("a"):
        got = await got
    _ = [each async for each in got] if isinstance(got, AsyncIterator) else list(got)


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ragfuse-answer"]


@pytest.mark.parametrize("call", CALLS)
async def test_a_prompt_longer_than_the_window_is_refused_by_every_call(llm: RagFuseLLM, call: str) -> None:
    called = CallbackRecorder()
    llm.callback_manager = CallbackManager([called])
    with pytest.raises(InputError, match=r"takes at most 4,096 tokens.*found 6,0\d\d"):
        await answered(llm, call, LONG)
    assert isinstance(called.ended[-1][EventPayload.EXCEPTION], InputError)
    for thread in writers():
        await asyncio.to_thread(thread.join, 60)
    assert writers() == []
    await answered(llm, call, "Short.")


@pytest.mark.parametrize("call", CALLS)
async def test_a_model_that_is_not_there_is_named_when_it_is_first_used(tmp_path: Path, call: str) -> None:
    nowhere = RagFuseLLM(model=str(tmp_path / "no-model"), store=str(tmp_path / "store"))
    assert nowhere.to_dict()["model"].endswith("no-model")
    with pytest.raises(ModelError, match="no-model"):
        await answered(nowhere, call, "Hello?")
    assert writers() == []


@pytest.mark.parametrize("call", [call for call in CALLS if "chat" in call])
async def test_no_messages_are_refused(llm: RagFuseLLM, call: str) -> None:
    with pytest.raises(InputError, match="no messages; wanted at least one"):
        await _none(llm, call)


async def _none(llm: RagFuseLLM, call: str) -> None:
    got = getattr(llm, call)([])
    if call.startswith("a"):
        got = await got
    _ = [each async for each in got] if isinstance(got, AsyncIterator) else list(got)


@pytest.mark.parametrize("call", CALLS)
async def test_wishes_that_nobody_knows_are_refused(llm: RagFuseLLM, call: str) -> None:
    with pytest.raises(InputError, match=r"takes no argument 'temprature' in a call; wanted one of .*temperature"):
        await answered(llm, call, "Hello?", temprature=1.0)
    with pytest.raises(SettingsError, match="ratio"):
        await answered(llm, call, "Hello?", ratio=3.0)


def test_fields_that_cannot_be_are_refused_at_once(tiny_settings: Settings) -> None:
    for wrong in ({"ratio": 2.0}, {"deadline_s": -1.0}, {"overflow": "cut"}, {"temprature": 1.0}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            RagFuseLLM(settings=tiny_settings, **wrong)


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (RagFuseLLM, {"modle": "x"}, "RagFuseLLM has no argument 'modle'. Did you mean model?"),
        (RagFuseLLM, {"callback_manger": None}, "has no argument 'callback_manger'. Did you mean callback_manager?"),
        (
            RagFuseLLM,
            {"dtype": "flot32"},
            "'bfloat16' or 'float16', found 'flot32'.",
        ),
        (RagFuseLLM, {"engine": "x"}, "engine: wanted a ragfuse.Engine or a ragfuse.RemoteEngine, found a str."),
        (RagFuseSynthesizer, {"streming": True}, "has no argument 'streming'. Did you mean streaming?"),
        (KVPrecompute, {"llm": None, "colection": "a"}, "has no argument 'colection'. Did you mean collection?"),
        (RagFuseLLM, {"settings": {"modle": "x"}}, "Settings has no argument 'modle'. Did you mean model?"),
    ],
)
def test_a_misspelt_argument_is_told_with_what_is_meant(kind: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        kind(**given)
    assert str(refused.value).endswith(told)


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    llm = RagFuseLLM(engine=engine, callback_manager=CallbackManager(), system_prompt="Be brief.")
    assert llm.system_prompt == "Be brief."
    assert RagFuseLLM(model_name=engine.settings.model, settings=engine.settings).model == engine.settings.model


async def test_what_was_serialised_names_model_and_store(llm: RagFuseLLM, engine: Engine) -> None:
    again = RagFuseLLM.from_dict(llm.to_dict())
    assert (again.model, again.store) == (engine.settings.model, str(engine.settings.store_path))
    assert again.get_engine().settings.dtype == "float32"
    assert "engine" not in llm.to_dict()
    assert (await again.acomplete("Hello?", max_tokens=4)).text == llm.complete("Hello?", max_tokens=4).text


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 3), ("min_p", -1), ("top_k", -5), ("repetition_penalty", 0), ("max_tokens", 0), ("stop", [""])],
)
def test_an_option_out_of_its_range_is_refused_in_fields_and_calls_alike(
    name: str, value: Any, engine: Engine, llm: RagFuseLLM
) -> None:
    """Also one that changes nothing at temperature 0."""
    with pytest.raises(SettingsError, match=name):
        RagFuseLLM(engine=engine, **{name: value})
    with pytest.raises(SettingsError, match=name):
        llm.complete("Hello?", **{name: value})
