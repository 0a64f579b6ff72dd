"""Load layers ahead while earlier ones are fused (CacheBlend 5.1).

Chunks in the memory of the fusing device are read when they are used. One thread per prompt reads
all others ahead and copies them to the device. Small layers are read several at a time
(`plan.cost`), because on small models reading them singly takes as long as fusing.

On a CPU nothing is copied: the bytes read become the memory tier's entry. To a GPU they are copied
through pinned memory on a separate CUDA stream, while the model computes.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.plan.cost import layers_a_read, room, spans
from ragfuse.store import KVStore, Tier
from ragfuse.store.tier import aligned, rooms
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import Fetch

log = logging.getLogger("ragfuse.load")

Layer = Mapping[int, LayerKV | None]
"""One layer's KV by segment index; None for a segment that could not be read."""


@dataclass(frozen=True)
class PendingCopy:
    """Layers whose copy to a device has started.

    Args:
        layers: The layers on the device.
        event: The CUDA event after which they may be used; None: now.
        block: The device memory that they are copied into, uint8.
    """

    layers: Sequence[Layer]
    event: torch.cuda.Event | None = None
    block: Tensor | None = None


class StagingBuffer:
    """Copies layers to a device: the reading thread calls `send`, the fusing thread `landed`.

    Args:
        device: The device to copy to.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, layers: Sequence[Layer]) -> PendingCopy:
        """Start to copy layers; on a copy error, log it and return them uncopied."""
        if self._stream is None:
            return PendingCopy(layers)
        try:
            with torch.cuda.stream(self._stream):
                return self._send(layers)
        except RuntimeError as error:
            log.warning(
                "Layers could not be copied to %s ahead; they are copied when used (slower): %s",
                self._device,
                error,
            )
            return PendingCopy(layers)

    def landed(self, sent: PendingCopy) -> Sequence[Layer]:
        """Make the current CUDA stream wait for a copy, and return its layers."""
        if sent.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(sent.event)
            if sent.block is not None:
                sent.block.record_stream(stream)
        return sent.layers

    def _send(self, layers: Sequence[Layer]) -> PendingCopy:
        """Copy what is not on the device yet into one block there. Unpinned memory goes through
        pinned memory; tensors of one storage, such as an entry's layers, go as one range of bytes.
        """
        storages = defaultdict[int, dict[int, Tensor]](dict)
        for part in _parts(layers):
            if part.device != self._device:
                flat = part.contiguous()
                storages[flat.untyped_storage().data_ptr()].setdefault(id(part), flat)
        ranges = [(_bytes_of(flats.values()), flats) for flats in storages.values()]
        sources = [source for (source, _), _ in ranges]
        nbytes = sum(aligned(source.numel()) for source in sources)
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        places = rooms(block, sources)
        if all(source.device.type == "cpu" and not source.is_pinned() for source in sources):
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            for room, source in zip(rooms(pinned, sources), sources, strict=True):
                room.copy_(source)
            block.copy_(pinned, non_blocking=True)
        else:
            for room, source in zip(places, sources, strict=True):
                room.copy_(source, non_blocking=True)
        sent = dict[int, Tensor]()
        for room, ((_, begins), flats) in zip(places, ranges, strict=True):
            for begin, (name, flat) in zip(begins, flats.items(), strict=True):
                sent[name] = room[begin : begin + flat.nbytes].view(flat.dtype).view(flat.shape)
        moved = [
            {
                at: kv
                and LayerKV(sent.get(id(kv.keys), kv.keys), sent.get(id(kv.values), kv.values))
                for at, kv in layer.items()
            }
            for layer in layers
        ]
        return PendingCopy(moved, torch.cuda.current_stream(self._device).record_event(), block)


def _bytes_of(flats: Collection[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the bytes that tensors of one storage span, and the offset of each."""
    begins = [int(flat.storage_offset()) * flat.element_size() for flat in flats]
    lo = min(begins)
    hi = max(begin + flat.nbytes for begin, flat in zip(begins, flats, strict=True))
    first = next(iter(flats))
    source = torch.empty(0, dtype=torch.uint8, device=first.device)
    source.set_(first.untyped_storage(), lo, (hi - lo,))  # type: ignore[call-overload]
    return source, [begin - lo for begin in begins]


def _parts(layers: Sequence[Layer]) -> Iterator[Tensor]:
    """Yield keys and values of all layers in copying order."""
    for layer in layers:
        for kv in layer.values():
            if kv is not None:
                yield from (kv.keys, kv.values)


CPU = torch.device("cpu")
NEAR_LAYERS = 8
"""Maximum layers per read from the memory of the fusing GPU."""


def is_far(tier: Tier, device: torch.device) -> bool:
    """Return whether a tier is slow or in another device's memory, so that it is read ahead."""
    return tier.slow or getattr(tier, "device", device) != device


class LayerReader:
    """Reads the planned segments layer by layer. A context manager: leaving it stops its thread.

    Args:
        store: The store of the segments.
        fetches: The segments to read.
        n_layers: Layers of the model.
        max_layers: Maximum layers per read; 0: as many as `plan.cost` allows.
        device: The device that needs the layers.
        before: Layers to read ahead before the first one is used, if that is more than `plan.cost`
            allows: a read buffer (AttentionStore 3.2.1).

    Attributes:
        load_s: Seconds spent reading so far.
        wait_s: Seconds that `read` has waited so far.
        last_s: `time.perf_counter()` after the latest read; 0 before the first.
    """

    def __init__(
        self,
        store: KVStore,
        fetches: Sequence[Fetch],
        n_layers: int,
        max_layers: int = 0,
        device: torch.device = CPU,
        before: int = 0,
    ) -> None:
        self.load_s = self.wait_s = self.last_s = 0.0
        self._store, self._fetches = store, fetches
        far = {tier.name for tier in store.tiers if is_far(tier, device)}
        ahead = any(fetch.tier in far for fetch in fetches)
        nbytes = max((fetch.nbytes for fetch in fetches), default=0)
        # everything is on the device, so reading copies nothing
        if device.type != "cpu" and not ahead:
            max_layers = min(n_layers, NEAR_LAYERS)
        max_layers = max_layers or layers_a_read(nbytes, n_layers)
        self._spans = spans(n_layers, max_layers)
        n_before = sum(first < before for first, _ in self._spans)
        self._n_ahead, self._n_begun = max(room(max_layers) + 1, n_before), 0
        self._reads: deque[Future[PendingCopy]] = deque()
        self._ready_layers: deque[Layer] = deque()
        self._staging = StagingBuffer(device)
        self._thread = ThreadPoolExecutor(1, "ragfuse-load") if ahead else None

    def __enter__(self) -> LayerReader:
        if self._thread is not None:
            self._thread.submit(self._expect, 0)
            self._read_ahead(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def read(self, layer: int) -> Layer:
        """Return one layer's KV by segment, on the device; None for a segment that cannot be read.

        Call it once per layer, in order.
        """
        if not self._ready_layers:
            began = time.perf_counter()
            if self._thread is None:
                self._n_begun += 1
                sent = PendingCopy(self._load(self._n_begun - 1))
            else:
                sent = self._reads.popleft().result()
                self._read_ahead(self._thread)
            self._ready_layers.extend(self._staging.landed(sent))
            self.wait_s += time.perf_counter() - began
        return self._ready_layers.popleft()

    def ready(self) -> int:
        """Return the number of next layers that `read` returns without waiting."""
        return len(self._ready_layers)

    def _read_ahead(self, thread: ThreadPoolExecutor) -> None:
        while len(self._reads) < self._n_ahead and self._n_begun < len(self._spans):
            self._reads.append(thread.submit(self._send, self._n_begun))
            self._n_begun += 1

    def _send(self, number: int) -> PendingCopy:
        self._expect(number + 1)
        return self._staging.send(self._load(number))

    def _load(self, number: int) -> list[Layer]:
        """Perform read `number` of `_spans`; an entry used by several segments is read once."""
        began = time.perf_counter()
        first, end = self._spans[number]
        reads = {_entry(fetch): fetch for fetch in self._fetches}
        read = {entry: self._read(fetch, first, end - first) for entry, fetch in reads.items()}
        found = {fetch.segment: read[_entry(fetch)] for fetch in self._fetches}
        self.last_s = time.perf_counter()
        self.load_s += self.last_s - began
        return [
            {at: None if layers is None else layers[i] for at, layers in found.items()}
            for i in range(end - first)
        ]

    def _expect(self, number: int) -> None:
        """Announce the layers of read `number` to every tier, which may then read them together."""
        for first, end in self._spans[number : number + 1]:
            wanted = defaultdict[tuple[str, str], dict[ChunkKey, None]](dict)
            for fetch in self._fetches:
                wanted[fetch.tier, fetch.level][fetch.key] = None
            for (tier, level), keys in wanted.items():
                self._store.expect(tier, keys, first, end - first, level)

    def _read(self, fetch: Fetch, first: int, count: int) -> tuple[LayerKV, ...] | None:
        """Read layers of one segment; None on any error, so that other segments are unaffected."""
        try:
            return self._store.read_layers(fetch.key, first, count, fetch.tier, fetch.level)
        except Exception as error:
            log.warning(
                "Layer %d of %s could not be read from %s, so its text is computed instead: %s",
                first,
                fetch.key,
                fetch.tier,
                error,
            )
            return None


def _entry(fetch: Fetch) -> tuple[ChunkKey, str, str]:
    return fetch.key, fetch.tier, fetch.level
