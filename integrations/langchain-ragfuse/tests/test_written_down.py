"""What LangChain writes down of a model holds no secret; copies go on with its engine or its
settings.
"""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from langchain_core.load import dumpd, dumps
from langchain_ragfuse import ChatRagFuse, RagFuseLLM

from integrations.tests.kit import SECRETS
from ragfuse import Engine, Settings

MODELS = [ChatRagFuse, RagFuseLLM]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_is_written(tiny_settings: Settings, model: Any, secret: dict[str, Any]) -> None:
    llm = model(settings=tiny_settings.model_copy(update=secret))
    for told in (
        dumpd(llm),
        dumps(llm),
        llm.to_json(),
        repr(llm),
        llm.dict(),
        llm._identifying_params,
    ):
        assert "blue-7f31c0" not in str(told)
    for write in (llm.model_dump, llm.model_dump_json):
        with pytest.raises(Exception, match="secret in") as refused:
            write()
        assert "blue-7f31c0" not in str(refused.value)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_dumped_makes_the_same_model(tiny_settings: Settings, model: Any) -> None:
    llm = model(settings=tiny_settings, ratio=0.5)
    again = model(**json.loads(llm.model_dump_json()))
    assert again._place.settings == llm._place.settings
    assert again.ratio == 0.5


@pytest.mark.parametrize("model", MODELS)
def test_copies_share_the_engine_and_go_on_with_the_settings(
    tiny_settings: Settings, model: Any
) -> None:
    with Engine(tiny_settings) as engine:
        llm = model(engine=engine, ratio=0.25)
        for again in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(deep=True)):
            assert again.get_engine() is engine
            assert again.ratio == 0.25
        loaded = {"model": engine.model.model, "tokenizer": engine.model.tokenizer}
        given = model(**loaded, settings=tiny_settings)
        bound = copy.deepcopy(given.bind(stop=["x"])).bound
        for again in (copy.copy(given), copy.deepcopy(given), given.model_copy(deep=True), bound):
            assert again.get_engine() is given.get_engine()
        assert copy.deepcopy(engine.model) is engine.model
    salted = model(settings=tiny_settings.model_copy(update={"salt": "blue"}))
    for again in (copy.deepcopy(salted), pickle.loads(pickle.dumps(salted))):
        assert again._place.settings == salted._place.settings
