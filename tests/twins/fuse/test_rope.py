"""Keys are moved by one rotation, whatever the layout, and the originals are left alone."""

import pytest
import torch

from ragfuse.fuse.rope import angles, place, shifted
from ragfuse.types.kv import RopeLayout
from tests.twins import reference

FREQUENCIES = (1.0, 0.31, 0.04, 0.0007)
LAYOUTS = {
    "half": RopeLayout(FREQUENCIES),
    "interleaved": RopeLayout(FREQUENCIES, pairing="interleaved"),
    "half of the first dims": RopeLayout(FREQUENCIES[:2]),
    "half of the last dims": RopeLayout(FREQUENCIES[:3], lo=2),
    "interleaved of the first dims": RopeLayout(FREQUENCIES[:1], pairing="interleaved"),
    "interleaved of the last dims": RopeLayout(FREQUENCIES[:2], lo=4, pairing="interleaved"),
}
named = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def keys(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, 5, 8]: two heads, five tokens."""
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


@named
@pytest.mark.parametrize("delta", [1, 37, 10_000_000, -12])
def test_moved_keys_equal_those_turned_pair_by_pair(layout, delta):
    wanted = reference.shifted(keys(), delta, layout)
    torch.testing.assert_close(
        shifted(keys(), delta, layout).double(), wanted, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@named
def test_low_precision_keys_are_turned_in_float32_and_rounded_once(layout, dtype):
    low = keys(dtype=dtype)
    wanted = shifted(low.float(), 1234, layout).to(dtype)
    found = shifted(low, 1234, layout)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)


def test_keys_without_position_are_copied_and_a_move_by_nothing_changes_no_bit():
    original = keys(dtype=torch.bfloat16)
    for layout, delta in ((None, 100), (LAYOUTS["half"], 0)):
        assert torch.equal(shifted(original, delta, layout), original)
    assert shifted(original, 100, None).data_ptr() != original.data_ptr()


@named
def test_a_copy_is_turned_or_the_keys_themselves(layout):
    original = keys()
    out = shifted(original, 77, layout)
    assert torch.equal(original, keys())
    place(original, angles(layout, 77, original.device), layout)
    assert torch.equal(original, out)
