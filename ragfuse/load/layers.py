"""Load the KV of later layers while earlier layers are fused (CacheBlend 5.1).

If all chunks are in the memory of the fusing device, layers are read when they are used. Otherwise
one thread per prompt reads layers ahead and copies them to the device. Small layers are read
several at a time (`plan.cost`), because on small models, single reads take as long as fusing.

On a CPU, nothing is copied. The bytes that were read become the memory tier's entry. Layers
for a GPU are copied through pinned memory on a separate CUDA stream while the model computes.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ragfuse.load.stream import CPU, Stream
from ragfuse.plan.controller import layers_before
from ragfuse.plan.cost import layers_a_read, room, spans
from ragfuse.store import KVStore, Tier
from ragfuse.store.tier import aligned, rooms
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Layer, LayerKV
from ragfuse.types.plan import Fetch, LoadPlan

log = logging.getLogger("ragfuse.load")

Landed = Callable[[], Sequence[Layer]]
"""A function that makes the current CUDA stream wait for a copy and returns the copied layers."""


class StagingBuffer:
    """Copies layers to a device. The reading thread calls `send`. The fusing thread calls the
    function that `send` returned.

    Args:
        device: The device to copy to.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, layers: Sequence[Layer]) -> Landed:
        """Begin to copy layers to the device. If the copy fails, the uncopied layers are used."""
        if self._stream is not None:
            try:
                with torch.cuda.stream(self._stream):
                    return self._send(layers)
            except RuntimeError as error:
                log.warning(
                    "Layers could not be copied to %s ahead of time (%s). Each layer is copied"
                    " when needed, which is slower.",
                    self._device,
                    error,
                )
        return lambda: layers

    def _send(self, layers: Sequence[Layer]) -> Landed:
        """Copy the tensors that are not on the device into one block of device memory. If all
        these tensors are in unpinned CPU memory, they are copied through pinned memory. Tensors of
        one storage, such as the layers of an entry, are copied as one range of bytes.
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
        event = torch.cuda.current_stream(self._device).record_event()

        def landed() -> Sequence[Layer]:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            block.record_stream(stream)
            return moved

        return landed


def _bytes_of(flats: Collection[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the byte range that tensors of one storage span, and each tensor's offset in it."""
    begins = [int(flat.storage_offset()) * flat.element_size() for flat in flats]
    lo = min(begins)
    hi = max(begin + flat.nbytes for begin, flat in zip(begins, flats, strict=True))
    first = next(iter(flats))
    source = torch.empty(0, dtype=torch.uint8, device=first.device)
    source.set_(first.untyped_storage(), lo, (hi - lo,))  # type: ignore[call-overload]
    return source, [begin - lo for begin in begins]


def _parts(layers: Sequence[Layer]) -> Iterator[Tensor]:
    """Yield the keys and values of all layers, in the order in which they are copied."""
    for layer in layers:
        for kv in layer.values():
            if kv is not None:
                yield from (kv.keys, kv.values)


NEAR_LAYERS = 8
"""Maximum layers per read from the memory of the fusing GPU."""


def is_far(tier: Tier, device: torch.device) -> bool:
    """Return whether a tier is slow or in another device's memory, so that layers of the tier are
    read ahead.
    """
    return tier.slow or getattr(tier, "device", device) != device


class LayerReader:
    """Reads the KV of a plan for `HFModel.fuse`: an iterator over layers in order, and a context
    manager. If layers are read ahead, the reading thread exists only while the context is open.

    Args:
        store: The store that has the KV of the segments.
        plan: The plan with the entries to read. At least `ragfuse.plan.cost.room` + 1 reads are
            queued ahead. More are queued if the plan's forecast predicts that loading takes longer
            than computing (read buffer, AttentionStore 3.2.1).
        n_layers: Number of layers of the model.
        device: The device that needs the layers.
        stream: The stream that already received some segments. Those segments are not read again.
            None if nothing was streamed.

    Attributes:
        fetches: The fetches of the plan, without fetches of streamed segments.
        load_s: Seconds spent reading so far.
        wait_s: Seconds for which the fusing thread has waited for layers so far.
        last_s: `time.perf_counter()` after the latest read; 0 before the first read.
    """

    def __init__(
        self,
        store: KVStore,
        plan: LoadPlan,
        n_layers: int,
        device: torch.device = CPU,
        stream: Stream | None = None,
    ) -> None:
        self.load_s = self.wait_s = self.last_s = 0.0
        self._store, self._stream, self._segments = store, stream, plan.prompt.segments
        streamed = stream.received if stream is not None else ()
        self.fetches = [fetch for fetch in plan.fetches if fetch.segment not in streamed]
        far = {tier.name for tier in store.tiers if is_far(tier, device)}
        ahead = any(fetch.tier in far for fetch in self.fetches)
        nbytes = max((fetch.nbytes for fetch in self.fetches), default=0)
        max_layers = plan.layers_a_read
        # everything is on the device, so reading copies nothing
        if device.type != "cpu" and not ahead:
            max_layers = min(n_layers, NEAR_LAYERS)
        max_layers = max_layers or layers_a_read(nbytes, n_layers)
        self._spans = spans(n_layers, max_layers)
        n_before = sum(first < layers_before(plan, n_layers) for first, _ in self._spans)
        self._n_ahead, self._n_begun = max(room(max_layers) + 1, n_before), 0
        self._reads: deque[Future[Landed]] = deque()
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

    def __iter__(self) -> Iterator[Sequence[Layer]]:
        for number, (first, _) in enumerate(self._spans):
            began = time.perf_counter()
            if self._thread is None:
                layers: Sequence[Layer] = self._load(number)
            else:
                landed = self._reads.popleft().result()
                self._read_ahead(self._thread)
                layers = landed()
            self.wait_s += time.perf_counter() - began
            if self._stream is None:
                yield [self._used(each) for each in layers]
                continue
            for layer, each in enumerate(layers, first):  # yield each layer as soon as decoded
                began = time.perf_counter()
                streamed = self._stream.read(layer)
                self.wait_s += time.perf_counter() - began
                yield [self._used({**each, **streamed})]

    def _used(self, layer: Layer) -> Layer:
        """Return a copy of `layer` with only the rows that each segment uses."""
        found = dict(layer)
        for at, kv in layer.items():
            rows = self._segments[at].rows
            if kv is not None and rows is not None:
                used = slice(*rows)
                found[at] = LayerKV(kv.keys[:, used], kv.values[:, used])
        return found

    def _read_ahead(self, thread: ThreadPoolExecutor) -> None:
        while len(self._reads) < self._n_ahead and self._n_begun < len(self._spans):
            self._reads.append(thread.submit(self._send, self._n_begun))
            self._n_begun += 1

    def _send(self, number: int) -> Landed:
        self._expect(number + 1)
        return self._staging.send(self._load(number))

    def _load(self, number: int) -> list[Layer]:
        """Read the layers of `_spans[number]`. An entry that several segments use is read once."""
        began = time.perf_counter()
        first, end = self._spans[number]
        reads = {_entry(fetch): fetch for fetch in self.fetches}
        read = {entry: self._read(fetch, first, end - first) for entry, fetch in reads.items()}
        found = {fetch.segment: read[_entry(fetch)] for fetch in self.fetches}
        self.last_s = time.perf_counter()
        self.load_s += self.last_s - began
        return [
            {at: None if layers is None else layers[i] for at, layers in found.items()}
            for i in range(end - first)
        ]

    def _expect(self, number: int) -> None:
        """Tell each tier the layers of `_spans[number]`, so that the tier can prefetch them."""
        for first, end in self._spans[number : number + 1]:
            wanted = defaultdict[tuple[str, str], dict[ChunkKey, None]](dict)
            for fetch in self.fetches:
                wanted[fetch.tier, fetch.level][fetch.key] = None
            for (tier, level), keys in wanted.items():
                self._store.tier(tier).expect(keys, range(first, end), level)

    def _read(self, fetch: Fetch, first: int, count: int) -> tuple[LayerKV, ...] | None:
        """Read layers of one segment. Return None on an error, so that only this segment fails."""
        try:
            return self._store.read_layers(fetch.key, first, count, fetch.tier, fetch.level)
        except Exception as error:
            log.warning(
                "Layer %d of %s could not be read from tier %s, so the text is computed: %s",
                first,
                fetch.key,
                fetch.tier,
                error,
            )
            return None


def _entry(fetch: Fetch) -> tuple[ChunkKey, str, str]:
    return fetch.key, fetch.tier, fetch.level
