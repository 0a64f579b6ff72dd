"""An LLM that is written down and read back is the same one, and no secret is ever written."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM

from integrations.tests.kit import SECRETS
from ragfuse import Engine, Settings, SettingsError

TOLD = {
    "max_tokens": 8,
    "ratio": 0.5,
    "chunk_tokens": 99,
    "levels": {"disk": ["int8"]},
    "memory_bytes": 1 << 20,
}


@pytest.fixture
def settings(tiny_settings: Settings, tmp_path: Path) -> Settings:
    return Settings(
        **{
            **tiny_settings.model_dump(),
            **TOLD,
            "home": tmp_path,
            "tiers": ((tmp_path / "far").as_uri(),),
        }
    )


def test_a_dict_and_json_carry_the_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = RagFuseLLM(settings=settings, temperature=0.5)
    told = json.loads(json.dumps(llm.to_dict()))
    monkeypatch.setenv("RAGFUSE_MAX_TOKENS", "77")
    monkeypatch.chdir("/")
    for again in (RagFuseLLM.from_dict(told), RagFuseLLM.from_json(llm.to_json())):
        assert again._place.settings == settings
        assert again.temperature == 0.5
        assert again.to_dict() == llm.to_dict()


def test_what_is_named_beside_the_settings_is_carried(settings: Settings, tmp_path: Path) -> None:
    llm = RagFuseLLM(settings=settings, store=str(tmp_path / "other"), dtype="float32")
    assert RagFuseLLM.from_dict(llm.to_dict())._place.settings == llm._place.settings
    with Engine(settings) as engine:
        assert (
            RagFuseLLM.from_dict(RagFuseLLM(engine=engine).to_dict())._place.settings
            == engine.settings
        )


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_refused_by_name_and_never_written(
    settings: Settings, secret: dict[str, Any]
) -> None:
    llm = RagFuseLLM(settings=settings.model_copy(update=secret))
    for write in (llm.to_dict, llm.to_json):
        with pytest.raises(SettingsError, match=f"secret in {next(iter(secret))}") as refused:
            write()
        assert "blue-7f31c0" not in str(refused.value)
    assert "blue-7f31c0" not in repr(llm)
    assert "blue-7f31c0" not in str(llm.model_dump())
    assert "blue-7f31c0" not in str(llm.to_payload())


def test_a_step_of_a_pipeline_goes_by_the_digest_and_writes_no_salt(settings: Settings) -> None:
    salted = settings.model_copy(update={"salt": "blue-7f31c0", "tiers": ()})
    with Engine(salted) as engine:
        told = KVPrecompute(RagFuseLLM(engine=engine)).to_dict()
        assert told["model"] == engine.digest
    assert "blue-7f31c0" not in str(told)


def test_copies_share_the_engine_and_go_on_with_the_settings(settings: Settings) -> None:
    with Engine(settings.model_copy(update={"tiers": ()})) as engine:
        llm = RagFuseLLM(engine=engine, ratio=0.25)
        for again in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(deep=True)):
            assert again.get_engine() is engine
            assert again.ratio == 0.25
        loaded = {"model": engine.model.model, "tokenizer": engine.model.tokenizer}
        given = RagFuseLLM(**loaded, settings=engine.settings)
        for again in (copy.copy(given), copy.deepcopy(given), given.model_copy(deep=True)):
            assert again.get_engine() is given.get_engine()
        salted = RagFuseLLM(settings=settings.model_copy(update={"salt": "blue"}))
        for again in (copy.deepcopy(salted), pickle.loads(pickle.dumps(salted))):
            assert again._place.settings == salted._place.settings
