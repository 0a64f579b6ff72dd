"""Folders are meant as they are when they are named: a process that goes elsewhere later changes
nothing.
"""

import os

import pytest

from ragfuse import Engine, Settings
from tests.kits.tiny import CHUNKS, messages


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; `there` beside it is another one, with nothing in it."""
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    return here


def gone(here):
    os.chdir(here.parent / "there")
    return here.parent / "there"


@pytest.mark.parametrize("named", ["kv", "./kv", "deep/er/kv", "../here/kv", "~/kv"])
def test_settings_mean_the_folder_that_was_named_where_they_were_made(here, named):
    settings = Settings(store=named, home="house", tiers=(named, f"file://{named}"))
    wanted = os.path.abspath(os.path.expanduser(named))
    gone(here)
    assert (str(settings.store_path), settings.home) == (wanted, here / "house")
    assert settings.tiers[0].removeprefix("file://") == wanted


def test_settings_from_the_environment_and_from_toml_mean_the_folder_where_they_were_read(
    here, monkeypatch
):
    monkeypatch.delenv("RAGFUSE_HOME", raising=False)
    monkeypatch.setenv("RAGFUSE_STORE", "kv")
    (here / "ragfuse.toml").write_text(
        'home = "house"\ntiers = ["file://far", "redis://cache:6379/0", "s3://a/b"]\n'
    )
    settings = Settings()
    gone(here)
    assert (settings.store, settings.home) == (here / "kv", here / "house")
    assert settings.tiers == (f"file://{here / 'far'}", "redis://cache:6379/0", "s3://a/b")


def test_engines_that_were_named_from_different_folders_are_shared_only_where_they_mean_the_same(
    here, tiny_settings
):
    one = Engine.shared(tiny_settings.model_copy(update={"store": "kv"}))
    there = gone(here)
    try:
        assert Engine.shared(tiny_settings.model_copy(update={"store": here / "kv"})) is one
        other = Engine.shared(tiny_settings.model_copy(update={"store": "kv"}))
        assert other is not one
        assert other.settings.store_path == there / "kv"
        other.close()
    finally:
        one.close()


def test_a_models_folder_is_meant_as_it_is_and_other_names_stay(here, tiny_settings):
    os.symlink(tiny_settings.model, here / "mine")
    settings = Settings(**{**tiny_settings.model_dump(), "model": "mine", "embedder": "minilm-l6"})
    assert (settings.model, settings.embedder) == (str(here / "mine"), "minilm-l6")
    assert Settings(model="org/some-model").model == "org/some-model"
    gone(here)
    with Engine(settings) as engine:
        assert engine.answer(messages(CHUNKS[:1])).text
