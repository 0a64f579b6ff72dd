"""Folders are meant as they are when they are named: a process that goes elsewhere later changes
nothing.
"""

from __future__ import annotations

import os

import pytest

from ragfuse import Engine, Settings
from ragfuse.cli.entries import EntryFilter, OpenStore
from ragfuse.plan.evict import lru
from ragfuse.store import CatalogFile, DiskTier, KVStore
from tests.store.kit import key, kv
from tests.tiny import CHUNKS, chunk_hits, messages


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


NAMED = ("kv", "./kv", "deep/er/kv", "../here/kv", "~/kv")


@pytest.mark.parametrize("named", NAMED)
def test_a_store_stays_where_it_was_when_it_was_named(here, tiny_settings, named):
    settings = Settings(**{**tiny_settings.model_dump(), "store": named, "home": "house"})
    wanted = os.path.abspath(os.path.expanduser(named))
    there = gone(here)
    assert str(settings.store_path) == wanted
    assert str(settings.home) == str(here / "house")
    with Engine(settings) as engine:
        engine.answer(messages(CHUNKS[:2]))
        engine.flush()
        os.chdir(here)
        engine.answer(messages(CHUNKS[2:4]))
        engine.flush()
        os.chdir(there)
        engine.answer(messages(CHUNKS[4:]))
    with Engine(settings) as engine:
        assert chunk_hits(engine.answer(messages()).trace) == [True] * len(CHUNKS)
    assert list(there.iterdir()) == []
    assert os.path.isdir(wanted)


@pytest.mark.parametrize("url", ["far", "./far", "file://far", "file://./far", "~/far"])
def test_a_tier_in_a_folder_stays_where_it_was(here, tiny_settings, url):
    settings = Settings(
        **{**tiny_settings.model_dump(), "tiers": (url,), "memory_bytes": 0, "disk_bytes": 0}
    )
    there = gone(here)
    with Engine(settings) as engine:
        engine.ingest([(text, "a") for text in CHUNKS[:3]])
        os.chdir(here)
        assert chunk_hits(engine.answer(messages(CHUNKS[:3])).trace) == [True] * 3
        os.chdir(there)
        engine.ingest([(text, "a") for text in CHUNKS[3:]])
    os.chdir(here)
    with Engine(
        Settings(
            **{**tiny_settings.model_dump(), "tiers": (url,), "memory_bytes": 0, "disk_bytes": 0}
        )
    ) as engine:
        assert chunk_hits(engine.answer(messages()).trace) == [True] * len(CHUNKS)
    assert list(there.iterdir()) == []


def test_a_copy_with_other_folders_is_meant_as_it_is_when_an_engine_is_made(here, tiny_settings):
    settings = tiny_settings.model_copy(update={"store": "kv", "home": "house", "tiers": ("far",)})
    with Engine(settings) as engine:
        there = gone(here)
        engine.ingest([(CHUNKS[0], "a")])
        assert engine.settings.store_path == here / "kv"
        assert engine.settings.tiers == (str(here / "far"),)
    assert (here / "kv").is_dir()
    assert (here / "far").is_dir()
    assert list(there.iterdir()) == []


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


def test_settings_from_the_environment_and_from_toml_are_meant_as_they_are_read(here, monkeypatch):
    monkeypatch.delenv("RAGFUSE_HOME", raising=False)
    monkeypatch.setenv("RAGFUSE_STORE", "kv")
    (here / "ragfuse.toml").write_text(
        'home = "house"\ntiers = ["file://far", "redis://cache:6379/0", "s3://a/b"]\n'
    )
    settings = Settings()
    gone(here)
    assert settings.store == here / "kv"
    assert settings.home == here / "house"
    assert settings.tiers == (f"file://{here / 'far'}", "redis://cache:6379/0", "s3://a/b")


def test_a_models_folder_is_meant_as_it_is_and_other_names_stay(here, tiny_settings):
    os.symlink(tiny_settings.model, here / "mine")
    settings = Settings(**{**tiny_settings.model_dump(), "model": "mine", "embedder": "minilm-l6"})
    assert (settings.model, settings.embedder) == (str(here / "mine"), "minilm-l6")
    assert Settings(model="org/some-model").model == "org/some-model"
    gone(here)
    with Engine(settings) as engine:
        assert engine.answer(messages(CHUNKS[:1])).text


def test_a_store_that_is_looked_after_stays_where_it_was(here, tiny_settings):
    settings = tiny_settings.model_copy(update={"store": "kv"})
    with Engine(settings) as engine:
        engine.ingest([(CHUNKS[0], "a")])
    admin = OpenStore(settings)
    there = gone(here)
    assert len(admin.selected(EntryFilter())) == 1
    admin.close()
    assert list(there.iterdir()) == []


def test_a_tier_and_a_book_that_are_opened_by_hand_stay_where_they_were(here):
    with KVStore([DiskTier("kv", 1 << 30, lru)]) as store, CatalogFile("book") as book:
        there = gone(here)
        store.put(key("a"), kv(1), wait=True)
        assert store.read_layers(key("a"), 0) is not None
        book.put("name", {"a": 1})
        assert book.path == here / "book"
    assert list(there.iterdir()) == []


def test_a_schemas_file_is_kept_from_the_root_on(here, engine):
    (here / "trip.xml").write_text(
        '<schema name="trip"><module name="a">The keeper counted ships.</module></schema>'
    )
    engine.schemas.register("trip.xml")
    gone(here)
    assert engine.schemas.get("trip").file == str(here / "trip.xml")
    assert [info.file for info in engine.schemas.ls()] == [str(here / "trip.xml")]
