"""Measuring on a tiny model and real tiers: a whole profile, nothing left behind, one sentence for
what cannot be.
"""

import json

import pytest
from pydantic import TypeAdapter

from ragfuse.errors import ModelError
from ragfuse.load.timings import measure, tier_cost
from ragfuse.plan.cost import CostModel
from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, MemoryTier
from tests.kits.store import encoded, key, kv


@pytest.fixture
def model(engine):
    return engine.model


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "tier", 1 << 30, lru)
    yield tier
    tier.close()


def files(tier):
    return [path for path in tier.path.rglob("*.kv") if path.is_file()] + list(
        tier.path.glob("measure-*")
    )


def test_a_profile_holds_curve_points_and_every_tier_and_survives_json(model, disk):
    told = []
    profile = measure(
        model, [MemoryTier(1 << 30, lru), disk], lambda *each: told.append(each), 256, 1
    )
    assert (profile.model, profile.device, profile.dtype) == (model.fingerprint, "cpu", "float32")
    assert (profile.n_layers, set(profile.tiers)) == (3, {"memory", "disk"})
    assert (profile.tiers["memory"].is_ahead, profile.tiers["disk"].is_ahead) == (False, True)
    assert len(profile.prefill_points) >= 4
    assert profile.prefill_points[-1][0] == 256
    assert profile.fused.fixed_s + profile.fused.row_s + profile.fused.key_s > 0
    assert profile.tiers["disk"].byte_s + profile.tiers["disk"].read_s > 0
    assert TypeAdapter(CostModel).validate_json(json.dumps(profile.as_dict())) == profile
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    assert files(disk) == []


def test_a_tier_s_own_entries_stay_even_where_it_is_full(model, tmp_path):
    tier = DiskTier(tmp_path / "tier", 20_000, lru)
    kept = key("mine")
    assert tier.put(kept, *encoded(kv()))
    tier_cost(tier, model.encode([0]), 1, lambda *_: None)
    assert [entry.key for entry in tier.list()] == [kept]
    tier.close()


@pytest.mark.parametrize("after", [1, 3])
def test_ctrl_c_leaves_nothing_behind(model, disk, after):
    memory, seen = MemoryTier(1 << 30, lru), []

    def stop(what, done):
        seen.append(what)
        if len(seen) > after:
            raise KeyboardInterrupt

    for tier in (memory, disk):
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            tier_cost(tier, model.encode([0]), 2, stop)
    assert memory.list() == []
    assert files(disk) == []


def test_a_model_that_is_never_fused_is_refused(engine, model, monkeypatch):
    monkeypatch.setattr(model, "profile", type(model.profile)("m", refusal="no KV"))
    with pytest.raises(ModelError, match="no KV"):
        measure(model, [])
