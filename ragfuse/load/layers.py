"""Reads layer i + 1 while layer i is fused (CacheBlend 5.1: loading pipelined with recomputing).

Chunks in memory are read where they are used; a thread of its own, one per prompt, reads everything else ahead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from types import TracebackType

from ragfuse.core import Fetch, LayerKV
from ragfuse.store import KVStore

AHEAD = 4
"""Layers that may wait, read but not yet fused."""

Layer = Mapping[int, LayerKV | None]


class LayerReader:
    """The layers of the fetched segments, in order; a context manager that leaves no thread behind.

    load_s: seconds spent reading. wait_s: seconds that `read` had to wait for a layer. Both grow while it runs.
    """

    def __init__(self, store: KVStore, fetches: Sequence[Fetch], n_layers: int) -> None:
        self.load_s = self.wait_s = 0.0
        self._store, self._fetches, self._n_layers = store, fetches, n_layers
        self._ready: Queue[Layer] = Queue(AHEAD)
        self._stop = threading.Event()
        slow = {tier.name for tier in store.tiers if tier.slow}
        ahead = any(fetch.tier in slow for fetch in fetches)
        self._thread = threading.Thread(target=self._run, name="ragfuse-load", daemon=True) if ahead else None
        self._next = 0

    def __enter__(self) -> LayerReader:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except Empty:
                self._thread.join(0.01)

    def read(self, layer: int) -> Layer:
        """The layer's KV by segment, None for one that cannot be read; layers are asked for in order, each once."""
        if layer != self._next:
            raise ValueError(f"Layer {layer} was asked for, layer {self._next} is next.")
        self._next += 1
        if self._thread is None:
            return self._load(layer)
        began = time.perf_counter()
        found = self._ready.get()
        self.wait_s += time.perf_counter() - began
        return found

    def _run(self) -> None:
        for layer in range(self._n_layers):
            if self._stop.is_set():
                return
            self._ready.put(self._load(layer))

    def _load(self, layer: int) -> Layer:
        began = time.perf_counter()
        found = {f.segment: self._store.read_layer(f.key, layer, f.tier) for f in self._fetches}
        self.load_s += time.perf_counter() - began
        return found
