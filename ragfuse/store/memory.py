"""A tier in host or GPU memory. All entries are lost when the process ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from ragfuse.plan.evict import Evictor
from ragfuse.store.tier import EntryMeta, ReadLayers, Tier, aligned, rooms, victims
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")


@dataclass(slots=True)
class _Slot:
    """A stored entry: record, description, pieces (uint8 `[nbytes]` each) and bytes occupied."""

    entry: Entry
    meta: EntryMeta
    blobs: tuple[Tensor, ...]
    nbytes: int


class MemoryTier(Tier):
    """A tier in host memory, pinned host memory, or the memory of a GPU.

    Room is reserved before bytes are copied, and released if copying fails, so `nbytes` never
    exceeds `capacity`. torch allocates pinned memory in powers of two, so the size of an entry in
    pinned memory is rounded up to a power of two.

    Args:
        capacity: Maximum bytes that the tier may store.
        evict: The eviction policy.
        device: Torch device that entries are stored on: "cpu" or a GPU such as "cuda:0".
        pin_memory: True to pin host memory, for faster copies to a GPU. No effect without a GPU.
        name: Name of the tier.
        clock: Returns the time in seconds since the epoch.

    Attributes:
        copies: True if `put` copies the tensors; False if the tier keeps the caller's tensors.
    """

    slow = False
    pins = True

    def __init__(
        self,
        capacity: int,
        evict: Evictor,
        *,
        device: str = "cpu",
        pin_memory: bool = False,
        name: str = "memory",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, capacity)
        self._evict, self._clock = evict, clock
        self.device, has_gpu = torch.device(device), torch.cuda.is_available()
        # without an index, the device would depend on the thread
        if self.device.type == "cuda" and self.device.index is None and has_gpu:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._pin_memory = pin_memory and self.device.type == "cpu" and has_gpu
        self.copies = self._pin_memory or self.device.type != "cpu"
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda" and has_gpu:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._slots: dict[ChunkKey, _Slot] = {}  # least recently used first
        self._lock, self._nbytes = Lock(), 0

    @property
    def nbytes(self) -> int:
        """Bytes stored now, including reservations of pending writes."""
        return self._nbytes

    def stat(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the stored entries with these keys, in the order of `keys`."""
        with self._lock:
            return {key: self._slots[key].entry for key in keys if key in self._slots}

    def list(self) -> Sequence[Entry]:
        """Return all entries, least recently used first."""
        with self._lock:
            return [slot.entry for slot in self._slots.values()]

    def get(self, key: ChunkKey, layers: range, level: str | None = None) -> ReadLayers | None:
        """Return an entry's description and some layers (see `Tier.get`). Tensors are read-only."""
        with self._lock:
            slot = self._slots.get(key)
            wanted = slot.meta.pieces(layers, level) if slot is not None else None
            if slot is None or wanted is None:
                return None
            self._slots[key] = self._slots.pop(key)
            hits = slot.entry.hits + (layers.start == 0)
            slot.entry = replace(slot.entry, last_used=self._clock(), hits=hits)
            return slot.meta, *slot.blobs[wanted.start : wanted.stop]

    def put(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store an entry. If `copies` is False, the tier keeps `blobs`; never write to them."""
        nbytes = sum(aligned(blob.numel()) if self.copies else blob.numel() for blob in blobs)
        nbytes = self.occupied(nbytes)
        old = self._slots.get(key)
        if not self._reserve(key, nbytes):
            self.counts.add("refused")
            return False
        try:
            blobs = self._stored_here(blobs)
        except (RuntimeError, AssertionError) as error:  # out of memory, or no such device
            with self._lock:
                self._nbytes -= nbytes
            self.counts.add("failed")
            log.warning(
                "Entry %s could not be stored in tier %s and is computed again when needed: %s",
                key,
                self.name,
                error,
            )
            return False
        with self._lock:
            self._drop(key)  # another thread may have written the same KV
            pinned = old is not None and old.entry.pinned
            entry = Entry(
                key, self.name, meta.n_tokens, meta.n_layers, meta.sizes, self._clock(), 0, pinned
            )
            self._slots[key] = _Slot(entry, meta, blobs, nbytes)
        return True

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries; return the number deleted."""
        with self._lock:
            return sum(map(self._drop, set(keys)))

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Pin or unpin entries. A pinned entry is not evicted."""
        with self._lock:
            for slot in filter(None, map(self._slots.get, keys)):
                slot.entry = replace(slot.entry, pinned=pinned)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit."""
        with self._lock:
            for key in keys:
                if key in self._slots:
                    slot = self._slots[key] = self._slots.pop(key)
                    slot.entry = replace(slot.entry, last_used=self._clock())

    def occupied(self, nbytes: int) -> int:
        """Return the bytes that an entry of `nbytes` occupies: a power of two in pinned memory."""
        return 1 << (nbytes - 1).bit_length() if self._pin_memory else nbytes

    def _stored_here(self, blobs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `blobs` in this tier's memory: the tensors themselves, or copies of them."""
        nbytes = sum(aligned(blob.numel()) for blob in blobs)
        if self._pin_memory:
            return _into(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), blobs)
        if self._stream is None:
            return tuple(blob.to(self.device) for blob in blobs)
        # The block belongs to the model's CUDA stream, which reads and frees the block. A separate
        # stream fills the block, so that the model does not wait for the copy.
        block = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            layers = _into(block, blobs)
        self._stream.synchronize()
        return layers

    def _reserve(self, key: ChunkKey, nbytes: int) -> bool:
        """Reserve `nbytes`, and evict entries if necessary. If eviction cannot free enough bytes,
        evict nothing and return False.
        """
        with self._lock:
            old = self._slots.get(key)
            free = self.capacity - self._nbytes + (old.nbytes if old else 0)
            others = (slot.entry for other, slot in self._slots.items() if other != key)
            doomed = victims(
                self._evict, others, nbytes - free, lambda entry: self._slots[entry.key].nbytes
            )
            if nbytes > self.capacity or doomed is None:
                return False
            self._drop(key)
            self.counts.add("evicted", sum(self._drop(victim) for victim in doomed))
            self._nbytes += nbytes
            return True

    def _drop(self, key: ChunkKey) -> bool:
        slot = self._slots.pop(key, None)
        self._nbytes -= slot.nbytes if slot else 0
        return slot is not None


def _into(block: Tensor, blobs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy blobs into one block of memory; return one view of the block per blob."""
    return tuple(part.copy_(blob) for part, blob in zip(rooms(block, blobs), blobs, strict=True))
