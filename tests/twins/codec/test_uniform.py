"""Uniform quantisation gives back each code times its scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfuse.codec import INT8, LayerMeta, codec_for
from ragfuse.codec.codec import DTYPES
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.kv import LayerKV
from tests.kits.codec import layer, tables
from tests.twins.reference import uniform


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 20), st.integers(1, 17), st.integers(1, 17),
    st.sampled_from(list(DTYPES.values())), st.integers(0, 99),
)  # fmt: skip
def test_uniform_gives_back_what_its_slow_twin_does(heads, n, dim, value_dim, dtype, seed):
    before = layer(heads, n, dim, value_dim, dtype, seed)
    blob = INT8.encode(before, 3)
    after = INT8.decode(blob, LayerMeta.of(before, blob))
    for found, given_ in ((after.keys, before.keys), (after.values, before.values)):
        assert found.dtype == dtype
        assert torch.equal(found.float(), uniform(given_, 8).to(dtype).float())


def test_a_layer_takes_a_byte_a_value_and_a_scale_a_token():
    before = layer(4, 64, 64, 64)
    assert INT8.encode(before).numel() <= before.nbytes / 4 * (1 + 2 / 64) + 200


def test_the_largest_values_of_a_dtype_do_not_become_infinite():
    for dtype in DTYPES.values():
        most = torch.finfo(dtype).max / (2 if dtype in (torch.float32, torch.bfloat16) else 1)
        before = LayerKV(*(torch.full((1, 2, 4), sign * most).to(dtype) for sign in (1, -1)))
        blob = INT8.encode(before)
        assert INT8.decode(blob, LayerMeta.of(before, blob)).keys.float().isfinite().all()


def test_every_level_has_its_codec_and_a_name_that_is_none_is_told_all():
    known = tables()
    assert [codec_for(level, known).name for level in LEVEL_NAMES] == list(LEVEL_NAMES)
    with pytest.raises(ValueError, match=r"no codec level 'zip'.*: raw, int8, cg1, cg2, cg3, cg4"):
        codec_for("zip")
