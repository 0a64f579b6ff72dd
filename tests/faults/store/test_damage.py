"""Random damage to chunk files: every flip and every cut, wherever it is, is a miss that is
counted.
"""

import os
import random

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from ragfuse.store.blobs import _FIXED, Header
from tests.kits.store import encoded, files, key, kv

A, META, BLOBS = key("a"), *encoded(kv(3, n=7))


def flipped(data, at, bit):
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def damaged(data, chance):
    """The file with one bit turned, cut off somewhere, or with a run of bytes replaced."""
    at = chance.randrange(len(data))
    kind = chance.randrange(3)
    if kind == 0:
        return flipped(data, at, chance.randrange(8))
    if kind == 1:
        return data[:at]
    run = chance.randbytes(min(chance.randrange(1, 64), len(data) - at))
    return data[:at] + run + data[at + len(run) :]


def is_padding(whole, at):
    """Whether the byte lies between header and layers, or behind a layer, where no checksum covers
    it.
    """
    header = Header.parse(whole)
    ends = [_FIXED.size + _FIXED.unpack_from(whole)[2]]
    ends += [
        begin + layer.nbytes
        for begin, layer in zip(header.offsets, header.meta.layers, strict=False)
    ]
    return any(end <= at < begin for end, begin in zip(ends, header.offsets, strict=True))


def replaced(tier, data):
    (path,) = files(tier.path)
    path.with_name("other").write_bytes(data)
    os.replace(path.with_name("other"), path)


def is_detected(tier, data, count=1):
    """Whether reading all layers of these bytes, `count` at once, gives None, drops the entry, and
    counts it once.
    """
    assert tier.put(A, META, BLOBS)
    before = tier.counts["corrupt"]
    replaced(tier, data)
    found = [tier.get(A, range(i, i + count)) for i in range(0, len(BLOBS) - count + 1, count)]
    for i, layers in enumerate(found):
        assert layers is None or all(
            torch.equal(*pair) for pair in zip(layers[1:], BLOBS[i : i + count], strict=True)
        )
    if None not in found:
        return False
    assert tier.counts["corrupt"] == before + 1
    assert not tier.list()
    assert files(tier.path) == []
    assert tier.nbytes == 0
    return True


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_damage_is_a_miss(tmp_path, count):
    tier = DiskTier(tmp_path, 1 << 20, lru)
    assert tier.put(A, META, BLOBS)
    whole, chance = files(tmp_path)[0].read_bytes(), random.Random(5)
    done = 0
    while done < count:
        data = damaged(whole, chance)
        changed = [
            at for at, pair in enumerate(zip(data, whole, strict=False)) if pair[0] != pair[1]
        ]
        if len(data) < len(whole) or not all(is_padding(whole, at) for at in changed):
            assert is_detected(tier, data, chance.choice([1, len(BLOBS)]))
            done += 1
    tier.close()
