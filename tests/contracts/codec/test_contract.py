"""What every codec owes: a layer that decodes alone, to what its slow twin says, the same
everywhere, or an error.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3

from ragfuse.codec import CacheGenCodec, LayerMeta, OtherTables, codec_for
from ragfuse.codec.codec import DTYPES
from ragfuse.codec.coders import outlier_tokens
from ragfuse.types.choices import LEVEL_NAMES, LEVELS
from ragfuse.types.kv import LayerKV
from tests.kits.codec import layer, tables
from tests.twins import reference

HALVES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = list(zip((1, 2, 9, 10, 11, 37, 300), (*HALVES, *HALVES, torch.float32), strict=True))
TABLES, UNTURNED = tables(), tables(rope=False)
PACKED = [level for level in LEVELS if level.codec == "cachegen"]
EVERY = [codec_for(level, TABLES) for level in LEVEL_NAMES]
every = pytest.mark.parametrize("codec", EVERY, ids=LEVEL_NAMES)
not_raw = pytest.mark.parametrize("codec", EVERY[1:], ids=LEVEL_NAMES[1:])


def packed(codec, before=None, at=0):
    """A layer's bytes, and what is said of them."""
    before = layer() if before is None else before
    blob = codec.encode(before, at)
    assert (blob.dtype, blob.dim()) == (torch.uint8, 1)
    return blob, LayerMeta.of(before, blob)


def there_and_back(codec, before, at=0):
    return codec.decode(*packed(codec, before, at))


def same(left, right):
    return torch.equal(left.keys, right.keys) and torch.equal(left.values, right.values)


@every
@pytest.mark.parametrize(("n", "dtype"), SIZES)
def test_a_layer_comes_back_in_its_shape_and_dtype_and_near_what_it_was(codec, dtype, n):
    before = layer(n=n, dtype=dtype, seed=7, like=1)
    after = there_and_back(codec, before, 1)
    for found, given_ in ((after.keys, before.keys), (after.values, before.values)):
        assert (found.shape, found.dtype) == (given_.shape, dtype)
        error = (found.float() - given_.float()).square().mean()
        assert error < 0.2 * given_.float().square().mean()


@every
def test_a_layer_decodes_alone_and_twice_to_the_same(codec):
    blobs = [codec.encode(layer(seed=at, like=at), at) for at in range(3)]
    last = LayerMeta.of(layer(), blobs[2])
    assert same(codec.decode(blobs[2].clone(), last), codec.decode(blobs[2], last))
    assert torch.equal(codec.encode(layer(seed=2, like=2), 2), blobs[2])


@every
def test_encoding_changes_nothing_of_the_layer_and_shares_no_memory(codec):
    before = layer()
    kept = LayerKV(before.keys.clone(), before.values.clone())
    blob = codec.encode(before)
    bytes_then = blob.clone()
    assert same(before, kept)
    before.keys.zero_()
    assert torch.equal(blob, bytes_then)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("level", PACKED, ids=str)
def test_a_packed_layer_comes_back_as_its_slow_twin_bins_it(level, at):
    before, codec = layer(n=23, seed=5, like=at), CacheGenCodec(UNTURNED, level)
    after, own = there_and_back(codec, before, at), UNTURNED.layers[at]
    odd = outlier_tokens(before.keys, torch.from_numpy(own.keys.rms)) | outlier_tokens(
        before.values, torch.from_numpy(own.values.rms)
    )
    for found, given_, part in (
        (after.keys, before.keys, own.keys),
        (after.values, before.values, own.values),
    ):
        mean, steps = (
            torch.from_numpy(part.means[:, 0]),
            torch.from_numpy(part.steps).view(part.heads, part.dim),
        )
        twin = reference.binned(given_, mean, steps, float(np.float32(level.width)), odd)
        assert torch.allclose(found, twin, rtol=0, atol=1e-4 * float(given_.abs().max()))


@pytest.mark.parametrize("level", PACKED, ids=str)
def test_turning_keys_back_and_forth_adds_no_loss_of_its_own(level):
    before = layer(n=50, seed=3, like=1)
    after = there_and_back(CacheGenCodec(TABLES, level), before, 1)
    own = TABLES.layers[1]
    bins = torch.from_numpy(own.keys.steps).view(2, 1, 16) * level.width
    plain = ~(
        outlier_tokens(before.values, torch.from_numpy(own.values.rms))
        | (before.keys.abs() > 40).any(-1).any(0)
    )
    assert (
        float((after.keys - before.keys)[:, plain].square().mean())
        < float(bins.square().mean()) / 4
    )


def test_levels_lose_more_and_take_less_from_the_first_to_the_last():
    before, own = layer(n=256, seed=4, like=1), []
    for codec in EVERY:
        blob, meta = packed(codec, before, 1)
        error = (codec.decode(blob, meta).keys - before.keys).square().mean()
        own.append((blob.numel(), float(error)))
    assert own == sorted(own, key=lambda found: -found[0])
    assert own == sorted(own, key=lambda found: found[1])
    assert own[0][1] == 0


def digests(codecs):
    """Of the bytes of a layer at each level, and of what they decode to."""
    found = []
    for codec in codecs:
        blob, meta = packed(codec, layer(seed=9, like=1), 1)
        after = codec.decode(blob, meta)
        told = b"".join(part.numpy().tobytes() for part in (blob, after.keys, after.values))
        found.append(blake3(told).hexdigest())
    return found


def test_bytes_and_decoded_values_are_the_same_in_another_process():
    code = "from tests.contracts.codec.test_contract import EVERY, digests; print(*digests(EVERY))"
    own = {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == digests(EVERY)


@not_raw
@pytest.mark.parametrize("foul", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(codec, foul):
    before = layer()
    before.keys[1, 3, 2] = foul
    with pytest.raises(ValueError, match="raw"):
        codec.encode(before)


@not_raw
def test_zeros_and_enormous_values_come_back_finite(codec):
    for value in (0.0, 1e30, -1e-30):
        before = LayerKV(torch.full((2, 12, 16), value), torch.full((2, 12, 12), value))
        after = there_and_back(codec, before)
        assert after.keys.isfinite().all()
        assert after.values.isfinite().all()


def test_a_layer_of_other_tables_or_another_level_is_told_apart():
    blob, meta = packed(CacheGenCodec(TABLES, PACKED[0]))
    with pytest.raises(OtherTables, match=TABLES.digest):
        CacheGenCodec(UNTURNED, PACKED[0]).decode(blob, meta)
    with pytest.raises(OtherTables, match=PACKED[1].name):
        CacheGenCodec(TABLES, PACKED[1]).decode(blob, meta)


@not_raw
def test_a_layer_of_another_version_is_left_alone(codec):
    blob, meta = packed(codec)
    blob[4] += 1
    with pytest.raises(OtherTables, match="version 3"):
        codec.decode(blob, meta)


def test_dtypes_of_eight_bits_are_kept_too():
    for name in ("float8_e4m3fn", "float8_e5m2"):
        before = layer(n=12, dtype=DTYPES[name])
        after = there_and_back(codec_for("cg1", TABLES), before)
        assert after.keys.dtype == DTYPES[name]
        assert after.keys.float().isfinite().all()
