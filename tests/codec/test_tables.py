"""Tables are the same however they are written down, know what they were made from, and refuse what is none."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from ragfuse.codec import CodecTables, profile_tables
from ragfuse.codec.tables import from_codes, to_codes
from ragfuse.core import ChunkKV, LayerKV, RopeLayout
from ragfuse.profiles import ModelProfile
from tests.codec.kit import ROPE, layer, tables

TABLES = tables()


def test_tables_come_back_from_json_and_from_a_models_profile():
    profile = replace(ModelProfile("m"), codec=TABLES.as_dict())
    kept = ModelProfile.from_dict(json.loads(json.dumps(profile.as_dict())))
    assert kept == profile
    assert kept.probed.codec is None
    assert CodecTables.from_dict(kept.codec) == TABLES
    assert CodecTables.from_dict(kept.codec).digest == TABLES.digest


def test_the_same_text_gives_the_same_digest_and_other_text_another():
    assert tables().digest == TABLES.digest
    assert tables(rope=False).digest != TABLES.digest
    assert len(bytes.fromhex(TABLES.digest)) == 8


def test_a_channels_mean_and_spread_are_found_without_its_odd_tokens():
    own = TABLES.layers[1].values
    before = torch.cat([layer(n=60, seed=10 * seed + 1, like=1).values[:, 1:] for seed in range(3)], 1)
    assert np.allclose(own.means[:, 0], before.mean(1), atol=0.05 * float(before.std()))
    spread = (from_codes(own.spread) * own.steps).reshape(2, 12)
    assert np.allclose(spread, before.std(1), rtol=0.1)


@pytest.mark.parametrize("number", [1e-4, 0.3, 1.0, 17.0, 3e4])
def test_numbers_of_one_byte_are_within_a_sixteenth_of_an_octave(number):
    assert abs(np.log2(from_codes(to_codes([number]))[0] / number)) <= 1 / 16 + 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"layers": []},
        {"shapes": "AAAA"},
        {"overall": ""},
        {"layers": [{**TABLES.as_dict()["layers"][0], "keys": {}}]},
        {"layers": [{**TABLES.as_dict()["layers"][0], "rope": {"inv_freq": [1.0] * 9}}]},
        {"layers": [{**TABLES.as_dict()["layers"][0], "rope": {"inv_freq": [float("nan")]}}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_table_is_none(change):
    assert CodecTables.from_dict(TABLES.as_dict()) is not None
    assert CodecTables.from_dict({**TABLES.as_dict(), **change}) is None


@pytest.mark.parametrize("data", [None, [], "tables", {}, {"version": 1}])
def test_what_is_nothing_of_the_kind_is_none(data):
    assert CodecTables.from_dict(data) is None


def test_models_whose_channels_never_move_are_profiled_too():
    still = ChunkKV((LayerKV(torch.zeros(1, 40, 4), torch.ones(1, 40, 4)),))
    assert CodecTables.from_dict(profile_tables([still]).as_dict()) is not None


def test_profiling_wants_chunks_and_as_many_rotations_as_layers():
    with pytest.raises(ValueError, match="none found"):
        profile_tables([])
    chunk = ChunkKV((layer(n=60),))
    with pytest.raises(ValueError, match="as many rotations"):
        profile_tables([chunk], [ROPE, ROPE])
    with pytest.raises(ValueError, match="rotation within"):
        profile_tables([chunk], [RopeLayout((1.0,) * 9)])
