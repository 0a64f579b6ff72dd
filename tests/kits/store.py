"""What store tests share: keys, KV of differing layers, tiers, and child processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ragfuse.codec import INT8, RAW, Codec, LayerMeta
from ragfuse.plan.evict import lru
from ragfuse.store import EntryMeta, MemoryTier
from ragfuse.store.archive import read_whole
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, LayerKV

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context("fork")


def key(name: object, model: str = "model") -> ChunkKey:
    return ChunkKey(digest(model), digest(str(name)))


def kv(
    seed: int = 0, n: int = 5, dtype: torch.dtype = torch.bfloat16, n_layers: int = 3
) -> ChunkKV:
    """Layers of different heads and dims. keys: [H, n, D], values: [H, n, Dv]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2 + i % 2, n, 8 + 4 * i) for i in range(n_layers)]
    return ChunkKV(
        tuple(
            LayerKV(
                torch.randn(shape, generator=generator).to(dtype),
                torch.randn((*shape[:2], 8), generator=generator).to(dtype),
            )
            for shape in shapes
        )
    )


def encoded(chunk: ChunkKV) -> tuple[EntryMeta, tuple[torch.Tensor, ...]]:
    blobs = tuple(RAW.encode(layer) for layer in chunk.layers)
    return EntryMeta.of(chunk, "raw", blobs), blobs


CODECS = MappingProxyType({codec.name: codec for codec in (RAW, INT8)})


def codecs(level: str, model: str) -> Codec | None:
    """The codecs that need no tables."""
    return CODECS.get(level)


def encoded_at(chunk: ChunkKV, *levels: str) -> tuple[EntryMeta, tuple[torch.Tensor, ...]]:
    """The chunk at each of these levels, one after the other."""
    blobs = {
        level: [CODECS[level].encode(layer, at) for at, layer in enumerate(chunk.layers)]
        for level in levels
    }
    metas = [EntryMeta.of(chunk, level, blobs[level]) for level in levels]
    layers = tuple(layer for meta in metas for layer in meta.layers)
    return EntryMeta(chunk.n_tokens, levels, layers), tuple(
        blob for level in levels for blob in blobs[level]
    )


def rounded(chunk: ChunkKV) -> ChunkKV:
    """What is left of it in 8 bits."""
    blobs = [INT8.encode(layer) for layer in chunk.layers]
    pairs = zip(chunk.layers, blobs, strict=True)
    return ChunkKV(tuple(INT8.decode(blob, LayerMeta.of(layer, blob)) for layer, blob in pairs))


def same(left: LayerKV | None, right: LayerKV) -> bool:
    return (
        left is not None
        and torch.equal(left.keys, right.keys)
        and torch.equal(left.values, right.values)
    )


def ticks() -> Callable[[], float]:
    """A clock that goes on by one second whenever it is read."""
    counter = itertools.count(1)
    return lambda: float(next(counter))


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class HeldTier(MemoryTier):
    """A slow tier whose writes wait for `go`."""

    slow = True

    def __init__(self, name: str = "slow") -> None:
        super().__init__(1 << 30, lru, name=name)
        self.started, self.go = threading.Event(), threading.Event()

    def put(self, *arguments: Any) -> bool:
        self.started.set()
        assert self.go.wait(60)
        return super().put(*arguments)


def files(path: Path) -> list[Path]:
    """Every file of a disk tier's chunks, whole or being written."""
    return sorted(found for found in (path / "chunks").rglob("*") if found.is_file())


def forked(work: Callable[[Connection], None]) -> tuple[BaseProcess, Connection]:
    """A process that goes on from here with `work(pipe)`, and our end of the pipe. It must compute
    nothing big.
    """
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=work, args=(theirs,), daemon=True)
    with warnings.catch_warnings():
        # threads of other tests are none of the child's business
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def asked(work: Callable[[], object]) -> object:
    """What `work()` gives in a process of its own."""
    process, pipe = forked(lambda pipe: pipe.send(work()))
    result = pipe.recv()
    process.join(30)
    assert process.exitcode == 0
    return result


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A python process that runs `code`, its arguments in sys.argv[1:]."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def leave_only_in(store, keys, name):
    """Leave entries in one tier of a store alone."""
    keys = list(keys)
    for each in keys:
        entry = next(entry for tier in store.tiers for entry in tier.stat([each]).values())
        assert store.tier(name).put(each, *read_whole(store.tier(entry.tier), entry))
    for tier in store.tiers:
        if tier.name != name:
            tier.delete(keys)


def read_all(store, *keys):
    """Read chunks, so that the tiers before those that have them get a copy."""
    for each, entry in store.lookup(keys).items():
        store.read_layers(each, 0, entry.n_layers, entry.tier)
