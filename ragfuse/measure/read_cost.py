"""Time how much reading on a background thread delays the model: both share one Python interpreter (its GIL)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ragfuse.fuse.fusor import LayerSource
from ragfuse.load.layers import LayerReader
from ragfuse.plan.estimate import pipelined_s
from ragfuse.plan.steps import room
from ragfuse.store import DiskTier, KVStore
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import Fetch
from ragfuse.types.sizes import UNLIMITED

MAX_DELAY_S = 2e-3
"""Largest delay per read, in seconds: more must come from something else that ran meanwhile."""

Fuse = Callable[[LayerSource], float]
"""Fuses one prompt with the KV of a source, and returns the seconds it took."""


def held_up_s(fuse: Fuse, in_memory: LayerSource, chunks: list[ChunkKV], folder: Path | None, rounds: int) -> float:
    """Return the seconds by which each read on a background thread delays fusing.

    It compares fusing while a thread reads layer by layer from files with fusing when all KV is in memory.

    Args:
        fuse: Fuses the prompt.
        in_memory: The KV in memory.
        chunks: The KV of each segment; small, so that reading is hidden behind fusing.
        folder: Where to put temporary files; None: the system's temporary folder.
        rounds: Rounds of the timing, after one to warm up.
    """
    n_layers = len(chunks[0].layers)
    with (
        TemporaryDirectory(prefix="measure-", dir=folder, ignore_cleanup_errors=True) as scratch,
        KVStore([DiskTier(scratch, UNLIMITED, lambda entries: ())]) as store,
    ):
        fetches, delays = [_stored(store, at, chunk) for at, chunk in enumerate(chunks)], list[float]()
        for _ in range(rounds + 1):
            in_memory_s, (read_s, load_s) = fuse(in_memory), _read(store, fetches, n_layers, fuse)
            delays.append(unexplained_s(read_s, in_memory_s, load_s, n_layers) / (n_layers * len(fetches)))
    return min(MAX_DELAY_S, max(0.0, median(delays[1:])))  # the first is to warm up


def unexplained_s(read_s: float, in_memory_s: float, load_s: float, n_layers: int) -> float:
    """Return the part of `read_s` that pipelining does not explain. All in seconds.

    Args:
        read_s: Fusing while a thread reads layer by layer.
        in_memory_s: Fusing with all KV in memory.
        load_s: All of the reading.
        n_layers: Layers of the model.
    """
    return read_s - pipelined_s([load_s / n_layers] * n_layers, [in_memory_s / n_layers] * n_layers, room(1))


def _stored(store: KVStore, at: int, chunk: ChunkKV) -> Fetch:
    key = ChunkKey(digest("measure"), digest(str(at)))
    store.put(key, chunk, wait=True)
    return Fetch(at, key, store.tiers[0].name, LEVEL_NAMES[0], chunk.nbytes)


def _read(store: KVStore, fetches: list[Fetch], n_layers: int, fuse: Fuse) -> tuple[float, float]:
    """Return the seconds of fusing while a thread reads layer by layer, and the seconds of that reading."""
    began = time.perf_counter()
    with LayerReader(store, fetches, n_layers, max_layers=1) as reader:
        fuse(reader)
        return time.perf_counter() - began, reader.load_s
