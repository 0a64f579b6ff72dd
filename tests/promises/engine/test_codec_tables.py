"""Codec tables of models: made once, kept in the book, and beside the KV for whoever shares
a tier.
"""

import logging
from contextlib import closing
from dataclasses import replace

from ragfuse import Engine, Settings
from ragfuse.codec import CodecTables
from ragfuse.plan.evict import lru
from ragfuse.plan.explanation import in_words
from ragfuse.process.shared import forget
from ragfuse.store import DiskTier, KVStore
from ragfuse.store.levels import OWNER, TierLevels
from ragfuse.types.keys import ChunkKey, digest
from tests.kits.tiny import ingest, messages, on_disk_only


def at(settings, path=None, **levels):
    """These settings with levels by tier; with a path, a machine of its own beside a shared folder
    of objects.
    """
    own = settings.model_dump() | {"levels": levels}
    if path is not None:
        own |= {"store": path, "memory_bytes": 0, "tiers": (f"file://{settings.home}/shared",)}
    return Settings(**own)


def levels_in(engine, tier):
    kept = [entry for entry in engine.store.tier(tier).list() if entry.key.model == engine.digest]
    return {tuple(entry.sizes) for entry in kept}


def read(engine):
    return {
        (segment.tier, segment.level)
        for segment in engine.answer(messages()).trace.segments
        if segment.hit
    }


def test_a_tier_is_written_and_read_at_a_level_whose_tables_are_made_when_the_model_is_loaded(
    tiny_settings, caplog
):
    settings = at(tiny_settings, disk=["cg2"])
    with Engine(tiny_settings) as engine:
        forget(engine.model)  # another test may have had its tables made
    with caplog.at_level(logging.INFO, "ragfuse"), Engine(settings) as engine:
        ingest(engine)
        assert levels_in(engine, "disk") == {("cg2",)}
        assert levels_in(engine, "memory") == {("raw",)}
        tables = engine.model.profile.codec
        assert CodecTables.from_dict(tables).digest in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "ragfuse"), on_disk_only(settings) as later:
        assert read(later) == {("disk", "cg2")}
        assert later.model.profile.codec == tables
    assert "tables" not in caplog.text


def test_what_another_machine_packed_with_its_own_tables_is_read_with_these(
    tiny_settings, tmp_path, monkeypatch
):
    first, second, third = (at(tiny_settings, tmp_path / name, objects=["cg1"]) for name in "abc")
    with Engine(first) as engine:
        ingest(engine)
        assert levels_in(engine, "objects") == {("cg1",)}
        ours, model = engine.model.profile.codec, engine.model
    with Engine(second) as same:
        assert read(same) == {("objects", "cg1")}
        expected = same.answer(messages()).text
        assert same.model.profile.codec == ours
        # as if another machine had made its own at the same time
        same.store.tier("objects").delete([ChunkKey(OWNER, digest("tables", same.digest))])
    model.profile = replace(model.profile, codec=None)  # which engines of one process share
    monkeypatch.setattr(
        "ragfuse.engine.model_records.sample",
        lambda: ("Quite another text, so that the tables differ. " * 9,) * 2,
    )
    with Engine(third) as other:
        assert other.model.profile.codec != ours
        assert read(other) == {("objects", "cg1")}
        assert other.answer(messages()).text == expected


def test_without_the_tables_it_is_a_miss_that_says_so_and_nothing_is_dropped(tiny_settings):
    settings = at(tiny_settings, disk=["cg2"])
    with Engine(settings) as engine:
        ingest(engine)
        memory, disk = engine.store.tiers
        disk.delete([each.key for each in disk.list() if each.key.model != engine.digest])
        memory.delete([each.key for each in memory.list()])
        known = engine.store.levels._known
        engine.store.levels._known = dict.fromkeys(known, (None, 1e18))
        before, plan = disk.nbytes, engine.plan(messages())
        assert plan.fetches == ()
        assert "codec tables" in in_words(plan)
        assert disk.nbytes == before > 0
        assert disk.counts["corrupt"] == 0


def test_tables_lie_in_a_slow_tier_by_their_digest_and_no_other(tmp_path, tiny_settings):
    with Engine(at(tiny_settings, disk=["cg2"])) as engine:
        tables = CodecTables.from_dict(engine.model.profile.codec)
    with closing(DiskTier(tmp_path / "tier", 1 << 30, lru)) as tier:
        TierLevels([tier]).learn("model", tables)
        fresh = TierLevels([tier])
        assert fresh.codec("cg2", "", tables.digest).name == "cg2"
        assert fresh.codec("cg2", "", "0" * 16) is None
        assert fresh.codec("cg2", "model").name == "cg2"
        KVStore([tier]).clear()  # later entries of other processes need them
        assert KVStore([tier]).entries() == []
        assert TierLevels([tier]).tables("model") == tables
