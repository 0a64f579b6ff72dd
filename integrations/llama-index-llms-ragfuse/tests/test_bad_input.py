"""What cannot work says what was wanted, what was found and what to do, and leaves nothing
behind.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.llms.ragfuse import RagFuseLLM

from integrations.tests.llama_index_suite import CALLS
from ragfuse import Engine, InputError, ModelError, SettingsError


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine)


async def answered(llm: RagFuseLLM, call: str, text: str = "") -> None:
    messages = [ChatMessage(role="user", content=text)] if text else []
    got = getattr(llm, call)(messages if "chat" in call else text)
    if call.startswith("a"):
        got = await got
    _ = [each async for each in got] if isinstance(got, AsyncIterator) else list(got)


def writers() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "ragfuse-answer" and thread.is_alive()
    ]


@pytest.mark.parametrize("call", CALLS)
async def test_a_model_that_is_not_there_is_named_when_it_is_first_used(
    tmp_path: Path, call: str
) -> None:
    nowhere = RagFuseLLM(model=str(tmp_path / "no-model"), store=str(tmp_path / "store"))
    assert nowhere.to_dict()["model"].endswith("no-model")
    with pytest.raises(ModelError, match="no-model"):
        await answered(nowhere, call, "Hello?")
    assert writers() == []


@pytest.mark.parametrize("call", [call for call in CALLS if "chat" in call])
async def test_no_messages_are_refused(llm: RagFuseLLM, call: str) -> None:
    with pytest.raises(InputError, match="messages are empty"):
        await answered(llm, call)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"callback_manger": None}, "Did you mean callback_manager?"),
        ({"dtype": "flot32"}, "found 'flot32'."),
        ({"settings": {"modle": "x"}}, "Did you mean model?"),
    ],
)
def test_a_misspelt_argument_is_told_with_what_is_meant(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        RagFuseLLM(**given)
    assert str(refused.value).endswith(told)


def test_fields_of_the_framework_are_taken_by_name_and_alias(engine: Engine) -> None:
    llm = RagFuseLLM(engine=engine, callback_manager=CallbackManager(), system_prompt="Be brief.")
    assert llm.system_prompt == "Be brief."
    assert (
        RagFuseLLM(model_name=engine.settings.model, settings=engine.settings).model
        == engine.settings.model
    )
