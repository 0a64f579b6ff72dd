"""Entries in host or GPU memory. Bytes live as long as the process; files are `disk.py`'s."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from ragfuse.process.fork import at_fork
from ragfuse.store.tier import LAYER_ALIGNMENT, Counts, EntryMeta, Evictor, victims
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")


@dataclass(slots=True)
class _Slot:
    """One entry: what is said of it, its description and layers, uint8 [nbytes] each; nbytes: what it takes here."""

    entry: Entry
    meta: EntryMeta
    blobs: tuple[Tensor, ...]
    nbytes: int


class MemoryTier:
    """A tier in memory: host by default, pinned host with `pin_memory`, a GPU's with `device`.

    Room is taken before bytes are copied and given back if they cannot be, so `nbytes` never exceeds `capacity`. Pinned
    memory comes in powers of two, which is what an entry counts there. `copies`: what is written is copied. free_bytes:
    what a write leaves free, where the evictor can spare so much, so that there is room for what is fetched next.
    """

    slow = False

    def __init__(
        self,
        capacity: int,
        evict: Evictor,
        *,
        device: str = "cpu",
        pin_memory: bool = False,
        free_bytes: int = 0,
        name: str = "memory",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.capacity, self.counts = name, capacity, Counts()
        self._evict, self._clock, self._free_bytes = evict, clock, free_bytes
        self.device, has_gpu = torch.device(device), torch.cuda.is_available()
        if self.device.type == "cuda" and self.device.index is None and has_gpu:  # each thread has its own otherwise
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._pin_memory = pin_memory and self.device.type == "cpu" and has_gpu
        self.copies = self._pin_memory or self.device.type != "cpu"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" and has_gpu else None  # type: ignore[no-untyped-call]
        self._slots: dict[ChunkKey, _Slot] = {}  # least recently used first
        self._latest = float("-inf")  # of all uses
        self._pinned: set[ChunkKey] = set()
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """No write is under way: no room is taken for one."""
        self._lock = Lock()
        self._nbytes = sum(slot.nbytes for slot in self._slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes kept now, with those on their way in."""
        return self._nbytes

    @property
    def n_entries(self) -> int:
        """Entries kept now."""
        return len(self._slots)

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """The entries kept under `keys`, or all of them, least recently used first."""
        with self._lock:
            self._settle()
            wanted = list(self._slots) if keys is None else keys
            return {key: self._slots[key].entry for key in wanted if key in self._slots}

    def read(self, key: ChunkKey, first: int, count: int = 1) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """The entry's description and `count` pieces from `first` on, shared and not copied."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None or not 0 <= first < first + count <= len(slot.blobs):
                return None
            self._slots[key] = self._slots.pop(key)
            hits = slot.entry.hits + slot.meta.begins(first)
            slot.entry = replace(slot.entry, last_used=self._now(), hits=hits)
            return slot.meta, *slot.blobs[first : first + count]

    def write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Keep the layers; tensors that already live here are shared, so do not write to them afterwards."""
        meta.check(blobs)
        nbytes = self._size(blobs)
        if not self._reserve(key, nbytes):
            self.counts.add("refused")
            return False
        try:
            blobs = self._home(blobs)
        except BaseException as error:
            self._nbytes_back(nbytes)
            if not isinstance(error, (RuntimeError, AssertionError)):  # out of memory, no such device
                raise
            self.counts.add("failed")
            log.warning("Could not keep %s in tier %s: %s", key, self.name, error)
            return False
        with self._lock:
            self._drop(key)  # written by another thread meanwhile: the same KV
            pinned = key in self._pinned
            entry = Entry(key, self.name, meta.n_tokens, meta.n_layers, meta.sizes, self._now(), 0, pinned)
            self._slots[key] = _Slot(entry, meta, blobs, nbytes)
        return True

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Drop these entries; how many there were."""
        with self._lock:
            doomed = set(keys)
            self._pinned -= doomed
            return sum(self._drop(key) for key in doomed)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction, or stop doing so."""
        with self._lock:
            known = {key for key in keys if key in self._slots}
            self._pinned = self._pinned | known if pinned else self._pinned - known
            for key in known:
                self._slots[key].entry = replace(self._slots[key].entry, pinned=pinned)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note a use now, without counting a hit."""
        with self._lock:
            now = self._now()
            for key in keys:
                if key in self._slots:
                    slot = self._slots[key] = self._slots.pop(key)
                    slot.entry = replace(slot.entry, last_used=now)

    def _now(self) -> float:
        """The time of a use."""
        now = self._clock()
        self._latest = max(self._latest, now)
        return now

    def _settle(self) -> None:
        """Take uses beyond now for uses now, where the clock was set back since."""
        now = self._clock()
        if now >= self._latest:
            return
        self._latest = now
        for slot in self._slots.values():
            if slot.entry.last_used > now:
                slot.entry = replace(slot.entry, last_used=now)

    def _size(self, blobs: Sequence[Tensor]) -> int:
        """Bytes that the layers take here."""
        nbytes = _ends(blobs)[-1] if self.copies else sum(blob.numel() for blob in blobs)
        return 1 << (nbytes - 1).bit_length() if self._pin_memory else nbytes

    def _home(self, blobs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The layers where this tier keeps them: as they are, or copied into one block."""
        if self._pin_memory:
            return _into(torch.empty(_ends(blobs)[-1], dtype=torch.uint8, pin_memory=True), blobs)
        if self._stream is None:
            return tuple(blob.to(self.device) for blob in blobs)
        # The block belongs to the model's stream, on which it is read and freed; it is filled on another, so that the
        # model does not wait for it.
        block = torch.empty(_ends(blobs)[-1], dtype=torch.uint8, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            layers = _into(block, blobs)
        self._stream.synchronize()
        return layers

    def _reserve(self, key: ChunkKey, nbytes: int) -> bool:
        """Take `nbytes`, dropping entries as the evictor says; False, and nothing dropped, if that is not enough."""
        with self._lock:
            self._settle()
            old = self._slots.get(key)
            free = self.capacity - self._nbytes + (old.nbytes if old else 0)
            doomed = self._doomed(key, nbytes - free) if nbytes <= self.capacity else None
            if doomed is None:
                return False
            self._drop(key)
            self.counts.add("evicted", sum(self._drop(victim) for victim in doomed))
            self._nbytes += nbytes
            return True

    def _doomed(self, own: ChunkKey, excess: int) -> list[ChunkKey] | None:
        for wanted in dict.fromkeys((excess + self._free_bytes, excess)):
            others = (slot.entry for key, slot in self._slots.items() if key != own)
            doomed = victims(self._evict, others, wanted)
            if doomed is not None:
                return doomed
        return None

    def _drop(self, key: ChunkKey) -> bool:
        slot = self._slots.pop(key, None)
        self._nbytes -= slot.nbytes if slot else 0
        return slot is not None

    def _nbytes_back(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes


def _ends(blobs: Sequence[Tensor]) -> list[int]:
    """Where each layer ends in one block, if all begin at multiples of `LAYER_ALIGNMENT`."""
    return list(accumulate(-(-blob.numel() // LAYER_ALIGNMENT) * LAYER_ALIGNMENT for blob in blobs))


def _into(block: Tensor, blobs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The layers copied into a block of uint8, as views of it."""
    parts = [block[at : at + blob.numel()] for at, blob in zip([0, *_ends(blobs)], blobs, strict=False)]
    return tuple(part.copy_(blob) for part, blob in zip(parts, blobs, strict=True))
