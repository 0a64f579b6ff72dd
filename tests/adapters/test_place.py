"""Where a framework's model answers: decided once, from its fields."""

import pickle
import sys
from copy import deepcopy

import pytest

from ragfuse import Ask, InputError, PMLTemplate, Settings, SettingsError
from ragfuse.adapters import Place, engine_of, shown
from ragfuse.remote import RemoteEngine
from ragfuse.types.ingested import Ingested

URL = "http://127.0.0.1:8000/v1"


def test_a_server_is_asked_at_its_address(monkeypatch):
    monkeypatch.setenv("RAGFUSE_API_KEY", "a-key")
    place = Place.of(base_url=URL, model="some-model", max_retries=5)
    assert (place.name, place.settings, place.hears_retrievers) == ("some-model", None, True)
    client = place.engine()
    assert isinstance(client, RemoteEngine)
    assert (client.address.api_key, client.address.max_retries) == ("a-key", 5)
    assert place.as_public() == {"base_url": URL, "model": "some-model"}
    assert "a-key" not in repr(place)
    assert pickle.loads(pickle.dumps(place)).engine() is client
    assert Place.of(base_url=URL, api_key="another").engine().address.api_key == "another"  # type: ignore[attr-defined]
    assert Place.of(engine=client).engine() is client


@pytest.mark.parametrize(
    "given",
    [
        {"store": "folder"},
        {"settings": Settings()},
        {"model": object()},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_only_an_engine_of_this_process_has_is_refused_beside_another(
    given,
):
    for where in ({"base_url": URL}, {"engine": RemoteEngine(URL)}):
        with pytest.raises(InputError, match=f"{next(iter(given))}= has no effect"):
            Place.of(**where, **given)  # type: ignore[arg-type]


def test_two_places_and_things_that_are_no_engine_are_refused():
    with pytest.raises(InputError, match="engine= has no effect"):
        Place.of(engine=RemoteEngine(URL), base_url=URL)
    with pytest.raises(InputError, match="found a str"):
        Place.of(engine="x")
    with pytest.raises(SettingsError, match="base_url"):
        Place.of(base_url="nowhere")


def test_settings_are_resolved_once(tmp_path):
    settings = Settings(
        model="smollm2-135m",
        learn="off",
        model_kwargs={"revision": "a", "trust_remote_code": False},
    )
    place = Place.of(
        settings=settings, store=tmp_path, dtype="float32", model_kwargs={"revision": "b"}
    )
    assert place.settings is not None
    found = place.settings
    assert (place.name, found.dtype, found.store) == ("smollm2-135m", "float32", tmp_path)
    assert place.settings.model_kwargs == {"revision": "b", "trust_remote_code": False}
    assert not place.hears_retrievers
    assert Place.of(settings=Settings(**place.as_public()["settings"])) == place
    with pytest.raises(SettingsError, match="salt"):
        Place.of(settings=Settings(salt="secret")).as_public()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_at_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with shown(True, 2, "Encoding letters") as report:
        assert report is not None
        report(Ingested(1))
    assert ("Encoding letters" in capsys.readouterr().err) is is_terminal


def test_an_engine_is_shared_by_all_with_its_settings(tiny_settings, engine):
    one, two = Place.of(settings=tiny_settings), Place.of(settings=tiny_settings)
    assert one.engine() is two.engine() is one.engine(tiny_settings.model)
    other = one.engine("smollm2-135m")
    assert other is not one.engine()
    assert other.settings.model == "smollm2-135m"
    assert other.settings.max_tokens == tiny_settings.max_tokens
    given = Place.of(engine=engine)
    assert given.engine() is deepcopy(given).engine() is engine_of(engine) is engine
    assert pickle.loads(pickle.dumps(given)).engine() is one.engine()


def test_a_loaded_model_stays_in_its_process(tiny_settings, engine):
    model, tokenizer = engine.model.model, engine.model.tokenizer
    place = Place.of(model=model, tokenizer=tokenizer, settings=tiny_settings)
    assert place.engine().answer("Hello?", Ask(max_tokens=2)) is not None
    assert place.engine() is deepcopy(place).engine()
    for move in (place.as_public, lambda: pickle.dumps(place)):
        with pytest.raises(InputError, match="Save it to a folder"):
            move()


async def test_an_answer_comes_with_usage_and_trace(engine):
    place, ask = Place.of(engine=engine), Ask(max_tokens=4)
    with place.stream("Who dug the harbour?", ask) as stream:
        text, answer = "".join(stream), stream.answer
    async with await place.astream(
        lambda asked: f"Who dug the harbour{asked.card.refusal}?", ask
    ) as later:
        assert "".join([piece async for piece in later]) == text == answer.text
    told = place.told(answer, ask)
    assert (told["model"], told["finish_reason"]) == (place.name, "length")
    assert told["ragfuse"] == answer.trace.as_dict()
    usage = told["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (4, answer.trace.tokens)
    assert usage["total_tokens"] == 4 + answer.trace.tokens
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens", "cache_creation_tokens"}


def test_a_template_is_registered_before_its_first_answer(engine):
    template = PMLTemplate(
        "<schema name='door'><user>A door. <module name='m'>It is green.</module></user></schema>"
    )
    filled = template.fill({})
    with Place.of(engine=engine).stream(filled, Ask(max_tokens=2)) as stream:
        assert stream.answer.trace.tokens
    assert engine.schemas.has(filled.schema)


def test_settings_that_nobody_gave_stay_open_to_what_the_model_says(tmp_path):
    settings = Place.of(
        settings=Settings(home=tmp_path), model="some/model", dtype="float32"
    ).settings
    assert settings is not None
    assert settings.placed().model_fields_set.isdisjoint({"filler_tokens", "policy", "ratio"})
