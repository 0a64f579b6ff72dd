"""Random damage to chunk files: every flip and every cut is a miss that is counted, or changes no byte that is read."""

import os
import random

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier
from ragfuse.store.chunkfile import Header
from tests.store.kit import encoded, files, key, kv

A, META, BLOBS = key("a"), *encoded(kv(3, n=7))


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The file with one bit turned, cut off somewhere, or with a run of bytes replaced."""
    at = chance.randrange(len(data))
    kind = chance.randrange(3)
    if kind == 0:
        return flipped(data, at, chance.randrange(8))
    if kind == 1:
        return data[:at]
    run = chance.randbytes(min(chance.randrange(1, 64), len(data) - at))
    return data[:at] + run + data[at + len(run) :]


def replaced(tier: DiskTier, data: bytes) -> None:
    (path,) = files(tier.path)
    path.with_name("other").write_bytes(data)
    os.replace(path.with_name("other"), path)


def padding(data: bytes) -> set[int]:
    """Where bytes stand that mean nothing."""
    header = Header.parse(data)
    meant = set(range(len(data[: header.offsets[0]].rstrip(b"\0"))))
    for i in range(len(header.meta.layers)):
        meant |= set(range(*header.span(i, 1)))
    return set(range(len(data))) - meant


def is_detected(tier: DiskTier, data: bytes) -> bool:
    """Whether reading all layers of these bytes gives None somewhere, drops the entry, and counts it once."""
    assert tier.write(A, META, BLOBS)
    before = tier.counts["corrupt"]
    replaced(tier, data)
    found = [tier.read(A, i) for i in range(len(BLOBS))]
    for layer, wanted in zip(found, BLOBS, strict=True):
        assert layer is None or torch.equal(layer[1], wanted)
    if None not in found:
        return False
    assert tier.counts["corrupt"] == before + 1
    assert tier.entries() == {}
    assert files(tier.path) == []
    assert tier.nbytes == 0
    return True


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_damage_is_a_miss_or_changes_nothing_that_is_read(tmp_path, count):
    tier = DiskTier(tmp_path, 1 << 20, lru)
    assert tier.write(A, META, BLOBS)
    whole, chance = files(tmp_path)[0].read_bytes(), random.Random(5)
    nothing = padding(whole)
    assert 0 < len(nothing) < len(whole) / 4
    done = 0
    while done < count:
        data = damaged(whole, chance)
        changed = {at for at in range(len(data)) if data[at] != whole[at]}
        if len(data) == len(whole) and not changed:
            continue
        assert is_detected(tier, data) == (len(data) < len(whole) or not changed <= nothing)
        done += 1
    tier.close()


def test_damage_that_is_there_when_the_store_is_opened_is_a_miss_too(tmp_path):
    chance = random.Random(7)
    for _ in range(12):
        tier = DiskTier(tmp_path, 1 << 20, lru)
        assert tier.write(A, META, BLOBS)
        whole = files(tmp_path)[0].read_bytes()
        tier.close()
        files(tmp_path)[0].write_bytes(flipped(whole, chance.randrange(64, 300), 3))
        tier = DiskTier(tmp_path, 1 << 20, lru)
        found = [tier.read(A, i) for i in range(len(BLOBS))]
        assert None in found
        assert (tier.counts["corrupt"], tier.entries(), files(tmp_path)) == (1, {}, [])
        tier.close()
