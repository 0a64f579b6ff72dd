"""Tables are the same however they are written down, know what they were made from, and refuse what
is none.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from ragfuse.codec import CodecTables, profile_tables
from ragfuse.codec.tables import from_codes, to_codes
from ragfuse.types.kv import ChunkKV
from ragfuse.types.profiles import ModelProfile
from tests.kits.codec import ROPE, layer, tables

TABLES = tables()


def test_tables_come_back_from_json_and_from_a_models_profile():
    profile = replace(ModelProfile("m"), codec=TABLES.as_dict())
    kept = TypeAdapter(ModelProfile).validate_python(json.loads(json.dumps(profile.as_dict())))
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
    before = torch.cat(
        [layer(n=60, seed=10 * seed + 1, like=1).values[:, 1:] for seed in range(3)], 1
    )
    assert np.allclose(own.means[:, 0], before.mean(1), atol=0.05 * float(before.std()))
    spread = (from_codes(own.spread) * own.steps).reshape(2, 12)
    assert np.allclose(spread, before.std(1), rtol=0.1)


@pytest.mark.parametrize("number", [1e-4, 0.3, 1.0, 17.0, 3e4])
def test_numbers_of_one_byte_are_within_a_sixteenth_of_an_octave(number):
    assert abs(np.log2(from_codes(to_codes([number]))[0] / number)) <= 1 / 16 + 1e-6


@pytest.mark.parametrize("data", [None, {}, {"version": 1}, {**TABLES.as_dict(), "version": 0}])
def test_tables_of_another_version_or_form_are_none(data):
    assert CodecTables.from_dict(data) is None


def test_channels_that_meet_larger_queries_get_finer_steps_and_pairs_the_same():
    chunk, queries = ChunkKV((layer(n=60),)), torch.ones(2, 16)
    queries[:, 3] = 4.0
    steps = from_codes(profile_tables([chunk], [ROPE], [queries]).layers[0].keys.step).reshape(
        2, 16
    )
    assert (steps[:, [3, 11]] < steps[:, [0]] / 2).all()
    assert np.allclose(steps[:, 3], steps[:, 11])
    plain = profile_tables([chunk], [ROPE]).layers[0]
    assert len(set(plain.keys.step)) <= 2
    assert plain.values == profile_tables([chunk], [ROPE], [queries]).layers[0].values


def steps_of(chunks, costs):
    """Of keys and of values of each layer, over what they are without costs."""
    told = [
        [part.steps for each in tables.layers for part in (each.keys, each.values)]
        for tables in (profile_tables(chunks, costs=costs), profile_tables(chunks))
    ]
    return [float(np.exp(np.log(mine / theirs).mean())) for mine, theirs in zip(*told, strict=True)]


def test_where_errors_cost_more_bins_are_narrower_by_the_root_and_as_wide_on_average():
    chunks = [ChunkKV((layer(n=60), layer(n=60, seed=1)))]
    found = steps_of(chunks, [(0.04, 0.01), (0.01, 0.0025)])
    # steps are kept an eighth of an octave apart
    assert np.allclose(found, [0.5, 1.0, 1.0, 2.0], rtol=0.07)
    assert np.allclose(
        steps_of(chunks, [(1e-30, 1.0), (1.0, 0.0)]), [2.0, 0.5, 0.5, 2.0], rtol=0.07
    )


def test_profiling_wants_chunks_that_are_long_enough():
    with pytest.raises(ValueError, match="all chunks are shorter"):
        profile_tables([])
