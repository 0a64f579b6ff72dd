"""The raw codec gives back what it was given, bit for bit, as views; descriptions refuse what
cannot be.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragfuse.codec import RAW, LayerMeta
from ragfuse.codec.codec import DTYPES
from ragfuse.types.kv import LayerKV

DTYPE_LIST = list(DTYPES.values())


def layer(
    heads: int, n: int, dim: int, value_dim: int, dtype: torch.dtype, seed: int = 0
) -> LayerKV:
    """A layer of any bit patterns, NaN and infinities among them. keys: [H, n, D], values: [H, n,
    Dv].
    """
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape: int) -> torch.Tensor:
        wide = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, wide, dtype=torch.uint8, generator=generator).view(dtype)

    return LayerKV(bits(heads, n, dim), bits(heads, n, value_dim))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 33), st.integers(1, 17), st.integers(1, 17), st.sampled_from(DTYPE_LIST),
    st.integers(0, 99),
)  # fmt: skip
def test_raw_gives_back_every_bit_of_any_shape_and_dtype(heads, n, dim, value_dim, dtype, seed):
    before = layer(heads, n, dim, value_dim, dtype, seed)
    blob, after = there_and_back(before)
    assert same_bits(before.keys, after.keys)
    assert same_bits(before.values, after.values)
    assert (blob.dtype, blob.dim(), blob.numel()) == (torch.uint8, 1, before.nbytes)


def there_and_back(before):
    blob = RAW.encode(before)
    return blob, RAW.decode(blob, LayerMeta.of(before, blob))


def test_raw_takes_tensors_that_are_not_contiguous():
    whole = layer(2, 12, 8, 8, torch.bfloat16)
    part = LayerKV(whole.keys[:, 3:9], whole.values.transpose(0, 1)[3:9].transpose(0, 1))
    blob, after = there_and_back(part)
    assert same_bits(after.keys, part.keys)
    assert same_bits(after.values, part.values)
    assert blob.numel() == part.nbytes


def test_raw_puts_keys_before_values_and_decoding_copies_nothing():
    before = layer(2, 5, 4, 6, torch.float16)
    blob, after = there_and_back(before)
    assert after.keys.data_ptr() == blob.data_ptr()
    assert after.values.data_ptr() == blob.data_ptr() + before.keys.nbytes
    assert torch.equal(blob[: before.keys.nbytes], before.keys.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "chosen", [[0, 1, 2, 3], [1, 3], [0, 1, 3], [2], [3, 2, 1], [0, 4]], ids=str
)
def test_layers_of_one_block_are_decoded_together_as_each_alone(chosen):
    layers = [layer(2, 5, 4, 6, torch.bfloat16, seed) for seed in range(4)] + [
        layer(2, 3, 4, 6, torch.bfloat16)
    ]
    blobs = RAW.encode_all(layers)
    metas = [LayerMeta.of(each, blob) for each, blob in zip(layers, blobs, strict=True)]
    found = RAW.decode_all([blobs[at] for at in chosen], [metas[at] for at in chosen])
    assert len(found) == len(chosen)
    for at, kv in zip(chosen, found, strict=True):
        assert kv.keys.data_ptr() == blobs[at].data_ptr()
        assert same_bits(kv.keys, layers[at].keys)
        assert same_bits(kv.values, layers[at].values)


@pytest.mark.parametrize(
    "change", [{"key_shape": (2, 5, 5)}, {"dtype": "float32"}, {"value_shape": (1, 5, 4)}]
)
def test_raw_refuses_bytes_that_are_not_what_is_described(change):
    before = layer(2, 5, 4, 4, torch.bfloat16)
    blob = RAW.encode(before)
    with pytest.raises(ValueError, match=r"should have .* bytes"):
        RAW.decode(blob, replace(LayerMeta.of(before, blob), **change))
