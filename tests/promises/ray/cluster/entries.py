"""Texts to encode on a cluster, and what a store holds of them afterwards."""

from __future__ import annotations

import hashlib

from ragfuse.engine.engine import Engine
from ragfuse.settings import Settings
from ragfuse.types.keys import ChunkKey

CHUNK_WORDS = 100


def texts(n: int) -> list[tuple[str, str]]:
    """(text, source) of `n` chunks, no two alike."""
    made = []
    for number in range(n):
        words = [f"ship{(number * 31 + at * 17) % 997}" for at in range(CHUNK_WORDS)]
        made.append((f"Report {number} of the harbour: {' '.join(words)}.", f"report-{number}"))
    return made


def contents(settings: Settings) -> dict[ChunkKey, str]:
    """The keys of all entries in the disk tier of a store, each with a digest of its KV's bytes."""
    found = {}
    with Engine(settings) as engine:
        tier = next(tier for tier in engine.store.tiers if tier.slow)
        for entry in tier.list():
            key, read = entry.key, tier.get(entry.key, range(entry.n_layers))
            if read is not None:
                digest = hashlib.blake2b(digest_size=16)
                for blob in read[1:]:
                    digest.update(blob.numpy().tobytes())
                found[key] = digest.hexdigest()
    return found
