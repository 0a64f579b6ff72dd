"""What tests of the object tier share: two keys, tiers in files, and looks at what lies there."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import torch

from ragfuse.plan.evict import lru
from ragfuse.store.names import CHUNKS_FOLDER
from ragfuse.store.objects import ObjectTier
from tests.store.kit import encoded, key, kv

A, B = key("a"), key("b")


def opened(folder: Path, capacity: int = 1 << 20, **options) -> ObjectTier:
    """A tier that has never seen what is in the folder, as in another process."""
    return ObjectTier(f"file://{folder}", capacity, lru, **{"fresh_s": 0.0, "timeout_s": 30.0, **options})


@contextmanager
def impatient(tier: ObjectTier) -> Iterator[None]:
    """A fifth of a second is too long for it here; elsewhere a busy machine is no outage."""
    bucket = tier._bucket
    usual = bucket._timeout_s
    bucket._timeout_s = bucket._s3._silence_s = 0.2
    yield
    bucket._timeout_s = bucket._s3._silence_s = usual


def objects(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def weight(folder: Path) -> int:
    return sum(path.stat().st_size for path in objects(folder))


def weight_of_one(folder: Path) -> int:
    tier = opened(folder)
    assert tier.write(A, *encoded(kv()))
    return tier.nbytes


def layers(tier: ObjectTier, name=A, n: int = 3) -> list[torch.Tensor | None]:
    found = [tier.read(name, i) for i in range(n)]
    return [each and each[1] for each in found]


def hits(seen: list[torch.Tensor | None], wanted) -> list[bool]:
    """Which layers were read; those that were are right."""
    assert all(got is None or torch.equal(got, blob) for got, blob in zip(seen, wanted, strict=True))
    return [got is not None for got in seen]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def is_listing(asked) -> bool:
    return "list-type=2" in asked.path and f"{CHUNKS_FOLDER}/" in unquote(asked.path)
