"""The contract of tiers over each of them: to add one, name it here."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import DiskTier, MemoryTier
from ragfuse.store.objects import ObjectTier
from ragfuse.store.redis import RedisTier
from tests.contracts.store.contract import CappedContract, TierContract
from tests.kits.redis_server import fresh_url
from tests.kits.s3_server import shared
from tests.kits.store import ticks

GUIDE = Path(__file__).parents[3] / "CONTRIBUTING.md"
MAX_TOY_LINES = 80


def memory(path, capacity, evict):
    return MemoryTier(capacity, evict, clock=ticks())


def pinned_memory(path, capacity, evict):
    return MemoryTier(capacity, evict, clock=ticks(), pin_memory=True)


def gpu(path, capacity, evict):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return MemoryTier(capacity, evict, clock=ticks(), device="cuda", name="gpu")


def disk(path, capacity, evict):
    return DiskTier(path, capacity, evict, clock=ticks())


def redis(path, capacity, evict):
    return RedisTier(fresh_url(), timeout_s=30.0)


def objects_in_memory(path, capacity, evict):
    return ObjectTier(f"memory:/{path}", timeout_s=30.0)


def objects_in_files(path, capacity, evict):
    return ObjectTier(f"file://{path}", timeout_s=30.0)


def s3(path, capacity, evict):
    return shared().tier(shared().new_url())


def toy(path, capacity, evict):
    """The tier that CONTRIBUTING.md shows."""
    code = toy_code()
    assert code.count("\n") <= MAX_TOY_LINES
    names = {"__name__": "toy"}
    exec(compile(code, str(GUIDE), "exec"), names)
    return names["ToyTier"].open(f"toy://{path}", Settings(), evict, "toy")


def toy_code():
    """Return the program of a tier that CONTRIBUTING.md shows."""
    shown = re.search(
        r"```python\n(.*?class ToyTier.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL
    )
    return textwrap.dedent(shown[1])


CAPPED = [memory, pinned_memory, gpu, disk]
OTHERS = [redis, objects_in_memory, objects_in_files, s3, toy]


@pytest.fixture
def make_tier(request, tmp_path):
    """make_tier(capacity in bytes, evict): a new, empty tier; all are closed at the end."""
    made = []

    def make(capacity=1 << 20, evict=lru):
        made.append(request.param(tmp_path / f"tier{len(made)}", capacity, evict))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.mark.parametrize("make_tier", CAPPED, ids=lambda make: make.__name__, indirect=True)
class TestCapped(CappedContract):
    """Memory and disk."""


@pytest.mark.parametrize("make_tier", OTHERS, ids=lambda make: make.__name__, indirect=True)
class TestOthers(TierContract):
    """Media that evict and expire by themselves, or not at all."""
