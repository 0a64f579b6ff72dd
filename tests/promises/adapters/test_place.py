"""Where a framework's model answers: decided once, from its fields."""

import pickle
import sys
from copy import deepcopy

import pytest

from ragfuse import Ask, InputError, Settings, SettingsError
from ragfuse.adapters import Place, engine_of, shown
from ragfuse.remote import RemoteEngine
from ragfuse.remote.connection import ServerAddress
from ragfuse.types.answer import Ingested

URL = "http://127.0.0.1:8000/v1"


def test_a_server_is_asked_at_its_address(monkeypatch):
    monkeypatch.setenv("RAGFUSE_API_KEY", "a-key")
    place = Place.of(base_url=URL, model="some-model", max_retries=5)
    client = place.engine()
    assert isinstance(client, RemoteEngine)
    assert client.address == ServerAddress(URL, "a-key", "some-model", 5)
    assert place.as_public() == {"base_url": URL, "model": "some-model"}
    assert pickle.loads(pickle.dumps(place)).engine() is client
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
        with pytest.raises(InputError, match="Save the model to a folder"):
            move()


def test_settings_that_nobody_gave_stay_open_to_what_the_model_says(tmp_path):
    settings = Place.of(
        settings=Settings(home=tmp_path), model="some/model", dtype="float32"
    ).settings
    assert settings is not None
    assert settings.placed().model_fields_set.isdisjoint({"filler_tokens", "policy", "ratio"})
