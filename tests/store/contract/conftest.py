"""Every tier that must pass the contract: to add one, name it here."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.store import DiskTier, Evictor, MemoryTier, Tier
from ragfuse.store.objects import ObjectTier
from ragfuse.store.redis import RedisTier
from tests.store.kit import encoded, key, kv, ticks
from tests.store.redis_server import fresh_url
from tests.store.s3_server import shared

MakeTier = Callable[..., Tier]


def memory(path: Path, capacity: int, evict: Evictor) -> Tier:
    return MemoryTier(capacity, evict, clock=ticks())


def pinned_memory(path: Path, capacity: int, evict: Evictor) -> Tier:
    return MemoryTier(capacity, evict, clock=ticks(), pin_memory=True)


class PaddedTier(MemoryTier):
    """Memory in which an entry occupies the next power of two, as in pinned memory."""

    def occupied(self, nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length()


def padded_memory(path: Path, capacity: int, evict: Evictor) -> Tier:
    return PaddedTier(capacity, evict, clock=ticks())


def gpu(path: Path, capacity: int, evict: Evictor) -> Tier:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return MemoryTier(capacity, evict, clock=ticks(), device="cuda", name="gpu")


def disk(path: Path, capacity: int, evict: Evictor) -> Tier:
    return DiskTier(path, capacity, evict, clock=ticks())


def redis(path: Path, capacity: int, evict: Evictor) -> Tier:
    return RedisTier(fresh_url(), capacity, evict, clock=ticks(), timeout_s=30.0)


def objects_in_memory(path: Path, capacity: int, evict: Evictor) -> Tier:
    return ObjectTier(f"memory:/{path}", capacity, evict, clock=ticks(), timeout_s=30.0)


def objects_in_files(path: Path, capacity: int, evict: Evictor) -> Tier:
    return ObjectTier(f"file://{path}", capacity, evict, clock=ticks(), timeout_s=30.0)


def s3(path: Path, capacity: int, evict: Evictor) -> Tier:
    return shared().tier(shared().new_url(), capacity, evict, clock=ticks())


TIERS = [memory, padded_memory, pinned_memory, gpu, disk, redis, objects_in_memory, objects_in_files, s3]


@pytest.fixture(params=TIERS, ids=lambda make: make.__name__)
def make_tier(request, tmp_path) -> MakeTier:
    """make_tier(capacity in bytes, evict): a new, empty tier; all are closed at the end."""
    made = []

    def make(capacity: int = 1 << 20, evict: Evictor = lru) -> Tier:
        made.append(request.param(tmp_path / f"tier{len(made)}", capacity, evict))
        return made[-1]

    yield make
    for tier in made:
        if hasattr(tier, "close"):
            tier.close()


@pytest.fixture
def unit(make_tier) -> int:
    """Bytes that one entry of `kv()` takes in this kind of tier."""
    tier = make_tier()
    assert tier.write(key("unit"), *encoded(kv()))
    return tier.nbytes
