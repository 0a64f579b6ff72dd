"""A store from its settings: tiers in order, by kind, each as large as is said; no password in what
is told.
"""

import pytest

from ragfuse.errors import SettingsError, StoreError
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import open_store, open_tier
from ragfuse.store.tier import shown
from ragfuse.types.sizes import UNLIMITED


def test_tiers_are_opened_in_order_and_named_by_kind(tmp_path):
    further = (str(tmp_path / "second"), f"file://{tmp_path}/third", "memory://fourth")
    settings = Settings(home=tmp_path, tiers=further, tier_bytes=1 << 20, disk_bytes=1 << 21)
    with open_store(settings, lru) as store:
        assert [(tier.name, tier.capacity) for tier in store.tiers[1:]] == [
            ("disk", 1 << 21),
            ("disk-2", 1 << 20),
            ("objects", UNLIMITED),
            ("objects-2", UNLIMITED),
        ]
        assert store.tiers[0].name == "memory"


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:s3cret@host:1/2",
        "redis://host/0?username=me&password=s3cret&db=2",
        "unix://me:s3@s3cret@/run/redis.sock?db=1",
    ],
)
def test_a_url_is_shown_without_its_password(url):
    assert "s3cret" not in shown(url)
    assert "db=" in shown(url) or shown(url).endswith("/2")


@pytest.mark.parametrize(
    "url", [" redis://:s3cret@h", "'redis://me:s3cret@h'", "a b://me:h@s3cret@h"]
)
def test_a_url_that_is_refused_is_told_without_its_password(url):
    with pytest.raises(StoreError) as caught:
        open_tier(url, Settings(), lru)
    assert "s3cret" not in str(caught.value)


def test_settings_show_neither_urls_nor_salt():
    told = repr(Settings(tiers=("redis://me:s3cret@host:1/2",), salt="s3cret"))
    with pytest.raises(SettingsError) as caught:
        Settings(tiers={"redis://:s3cret@h": 1})
    assert "s3cret" not in told + str(caught.value)


def test_for_a_model_on_a_gpu_its_memory_comes_first(tmp_path):
    with open_store(Settings(home=tmp_path, device="cuda:1", gpu_bytes=1 << 20), lru) as store:
        assert [tier.name for tier in store.tiers] == ["gpu", "memory", "disk"]
        assert [str(tier.device) for tier in store.tiers[:2]] == ["cuda:1", "cpu"]
        assert store.tiers[0].capacity == 1 << 20
    with open_store(Settings(home=tmp_path, device="cuda", gpu_bytes=0), lru) as store:
        assert [tier.name for tier in store.tiers] == ["memory", "disk"]


@pytest.mark.parametrize("second", ["{home}/store", "{home}/b/../store"])
def test_two_tiers_at_one_place_are_refused(tmp_path, second):
    with pytest.raises(StoreError, match="Two tiers use"):
        open_store(Settings(home=tmp_path, tiers=(second.format(home=tmp_path),)), lru)
    with pytest.raises(StoreError, match="Two tiers use 'redis://h"):
        open_store(Settings(home=tmp_path, tiers=("redis://u:p@h", "redis://u:p@h/")), lru)
