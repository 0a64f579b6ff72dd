"""The interface of a storage tier, the description of an entry, and the choice of what to evict."""

from __future__ import annotations

import logging
import operator
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import Any

from torch import Tensor

from ragfuse.codec import LayerMeta
from ragfuse.plan.evict import Evictor
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV, Entry
from ragfuse.types.sizes import UNLIMITED


def victims(
    evict: Evictor,
    candidates: Iterable[Entry],
    excess: int,
    nbytes_of: Callable[[Entry], int] = operator.attrgetter("nbytes"),
) -> list[ChunkKey] | None:
    """Return the keys whose eviction frees `excess` bytes; None if the policy frees too little.

    `candidates` are sorted by last use, the oldest first, and are consumed lazily. Pinned entries
    are never chosen. `nbytes_of` returns the bytes that an entry occupies.
    """
    chosen, nbytes = list[ChunkKey](), dict[ChunkKey, int]()

    def noted() -> Iterator[Entry]:
        for entry in candidates:
            nbytes[entry.key] = 0 if entry.pinned else nbytes_of(entry)
            yield entry

    for group in evict(noted()) if excess > 0 else ():
        doomed = [key for key in group if nbytes.get(key)]
        chosen += doomed
        excess -= sum(nbytes.pop(key) for key in doomed)
        if excess <= 0:
            break
    return chosen if excess <= 0 else None


@dataclass(frozen=True, slots=True)
class EntryMeta:
    """The description of an entry, stored together with the entry's bytes.

    A piece is one layer at one codec level. An entry has one piece for every layer at every level,
    level by level: layer i of level j is piece `j * n_layers + i`.

    Args:
        n_tokens: Number of tokens in the chunk.
        levels: Names of the codec levels, in the order of the pieces.
        layers: The description of each piece, level by level.
    """

    n_tokens: int
    levels: tuple[str, ...]
    layers: tuple[LayerMeta, ...]

    @property
    def n_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.layers) // len(self.levels)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, as encoded."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each level, as encoded."""
        return {
            level: sum(layer.nbytes for layer in self.only(level).layers) for level in self.levels
        }

    def pieces(self, layers: range, level: str | None = None) -> range | None:
        """Return the indices of the pieces of `layers` at `level` (None means the first level). If
        the entry lacks the level or a layer, return None.
        """
        if (
            level not in (None, *self.levels)
            or not 0 <= layers.start < layers.stop <= self.n_layers
        ):
            return None
        first = self.levels.index(level or self.levels[0]) * self.n_layers
        return range(first + layers.start, first + layers.stop)

    def only(self, level: str) -> EntryMeta:
        """Return the description of this entry reduced to one level."""
        first = self.levels.index(level) * self.n_layers
        return replace(self, levels=(level,), layers=self.layers[first : first + self.n_layers])

    @classmethod
    def of(cls, kv: ChunkKV, level: str, blobs: Sequence[Tensor]) -> EntryMeta:
        """Return the description of `kv` encoded as `blobs`, one uint8 tensor per layer."""
        layers = tuple(
            LayerMeta.of(layer, blob) for layer, blob in zip(kv.layers, blobs, strict=True)
        )
        return cls(kv.n_tokens, (level,), layers)

    def sealed(self, blobs: Sequence[Tensor]) -> EntryMeta:
        """Return a copy in which every piece has a checksum; missing checksums are computed."""
        layers = tuple(layer.sealed(blob) for layer, blob in zip(self.layers, blobs, strict=True))
        return replace(self, layers=layers)

    def entry(self, key: ChunkKey, tier: str, nbytes: int, last_used: float) -> Entry:
        """Return the `Entry` for a tier. The first level's size includes header and padding."""
        sizes = self.sizes
        sizes[self.levels[0]] += nbytes - self.nbytes
        return Entry(key, tier, self.n_tokens, self.n_layers, sizes, last_used)


ReadLayers = tuple[EntryMeta, *tuple[Tensor, ...]]
"""The description of a whole entry, then some encoded layers, uint8 `[nbytes]`, read-only."""
Whole = tuple[EntryMeta, tuple[Tensor, ...]]
"""A whole entry: the description and all pieces, each a uint8 tensor `[nbytes]`."""
LAYER_ALIGNMENT = 64
"""In files and in blocks of memory, every layer begins at a multiple of this number of bytes."""


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of `LAYER_ALIGNMENT`."""
    return -(-nbytes // LAYER_ALIGNMENT) * LAYER_ALIGNMENT


def rooms(block: Tensor, blobs: Sequence[Tensor]) -> list[Tensor]:
    """Cut one aligned view per blob, as long as the blob, from the uint8 tensor `block`."""
    ends = accumulate(aligned(blob.numel()) for blob in blobs)
    return [block[at : at + blob.numel()] for at, blob in zip([0, *ends], blobs, strict=False)]


class Counts:
    """Thread-safe counters by name."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        """Add `n` to a counter."""
        with self._lock:
            self._counts[name] += n

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]


class Tier(ABC):
    """A place that stores entries as bytes: memory, a disk, Redis or a bucket. Problems with an
    entry are counted and logged, not raised.

    `capacity` is `UNLIMITED` if the backend itself evicts and expires entries, as Redis does.
    `pin`, `touch` and `expect` do nothing unless a subclass overrides them.

    Args:
        name: Name of the tier in settings, traces and messages.
        capacity: Maximum bytes that the tier may store. No write exceeds this maximum. Opening a
            tier that already stores more bytes evicts nothing.

    Attributes:
        slow: True if the store writes to this tier in the background.
        remote: True if the tier is across a network. Streaming from a remote tier has a deadline.
        pins: True if the tier supports pins.
        copies: True if writes copy the tensors; False if a fast tier keeps the caller's tensors.
        counts: Counters: `corrupt` (entries dropped because they could not be read), `evicted`,
            `refused` (writes for which no room could be made) and `failed` (failed requests, and
            writes skipped while the backend was down).
    """

    slow = True
    remote = False
    pins = False
    copies = False

    def __init__(self, name: str, capacity: int = UNLIMITED) -> None:
        self.name, self.capacity, self.counts = name, capacity, Counts()

    @abstractmethod
    def get(self, key: ChunkKey, layers: range, level: str | None = None) -> ReadLayers | None:
        """Read some layers of an entry at one level. Reading layer 0 counts as a hit.

        Args:
            key: The entry.
            layers: Indices of the layers to read.
            level: The codec level. None means the first level of the entry.

        Returns:
            The entry's description, then the encoded layers. None if the entry, the level or a
            layer is missing.
        """

    @abstractmethod
    def put(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store all pieces of an entry, or none. An older entry of `key` is replaced, and other
        entries are evicted if necessary.

        Args:
            key: The entry.
            meta: The description of the entry.
            blobs: The pieces of the entry, each uint8 `[nbytes]`.

        Returns:
            True if the entry is stored.
        """

    @abstractmethod
    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries, pinned or not; return the number of deleted entries."""

    @abstractmethod
    def stat(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the stored entries with these keys."""

    @abstractmethod
    def list(self) -> Sequence[Entry]:
        """Return all entries."""

    @property
    def nbytes(self) -> int:
        """Bytes stored now; 0 if the tier does not know the size of its backend's data."""
        return 0

    @property
    def answers(self) -> bool:
        """False after a failure of the backend, until a request succeeds again."""
        return True

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Pin or unpin entries. Pinned entries are never evicted, but can be deleted."""

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit."""

    def expect(self, keys: Iterable[ChunkKey], layers: range, level: str | None = None) -> None:
        """Hint that these layers of these entries will be read soon. Returns at once."""

    def occupied(self, nbytes: int) -> int:
        """Return the bytes that the tier allocates for an entry of `nbytes`."""
        return nbytes

    def close(self) -> None:
        """Release all resources. Later lookups are misses. Idempotent."""


def totals(tiers: Iterable[Tier], entries: Collection[Entry]) -> list[dict[str, Any]]:
    """Return each tier's name, capacity, and totals: entries, bytes, tokens, pins and hits."""
    found = list[dict[str, Any]]()
    for tier in tiers:
        mine = [entry for entry in entries if entry.tier == tier.name]
        names = ("nbytes", "n_tokens", "pinned", "hits")
        sums = {name: sum(getattr(entry, name) for entry in mine) for name in names}
        found.append({"name": tier.name, "entries": len(mine), **sums, "capacity": tier.capacity})
    return found


log = logging.getLogger("ragfuse.store")

COOL_DOWN_S = 10.0
"""Seconds after a failed call until the next call is admitted."""


class Breaker:
    """A circuit breaker that opens at the first failed call.

    After a failure, calls are rejected for `COOL_DOWN_S` seconds. Then a trial call is admitted
    every `COOL_DOWN_S` seconds, until a trial succeeds. The caller reports the result of each
    admitted call by `failed` or `succeeded`. The first failure and the recovery are logged.

    Args:
        name: Name of the tier or catalog, for the log.
        clock: Returns the time in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._clock = name, clock
        self._lock, self._again_at = Lock(), 0.0
        self.is_open = self._is_trial = False

    def enter(self) -> bool:
        """Return whether the caller may make a call now."""
        with self._lock:
            now = self._clock()
            if self.is_open and now < self._again_at:
                return False
            self._again_at = now + COOL_DOWN_S  # while open, this trial is the only call
            self._is_trial = self.is_open
            return True

    def failed(self, doing: str, error: Exception) -> None:
        """Record a failed call. The log names the action `doing`, such as "list entries"."""
        with self._lock:
            was_open, self.is_open = self.is_open, True
            self._is_trial = False
            self._again_at = self._clock() + COOL_DOWN_S
        if not was_open:
            why = f"{type(error).__name__}: {error}"[:300]
            message = "%s could not %s (%s). ragfuse continues without it and retries every %g s"
            log.warning(message, self.name, doing, why, COOL_DOWN_S)

    def succeeded(self) -> None:
        """Record a successful call. Only a trial call closes an open breaker."""
        with self._lock:
            if not self._is_trial:
                return
            self.is_open = self._is_trial = False
        log.info("%s answers again and is in use", self.name)


_PARTED = re.compile(r"([?&])")
_SECRET = re.compile(r"user|pass|secret|token|key", re.IGNORECASE)


def shown(url: str) -> str:
    """Return a URL for messages: without user and password, and with secret parameters hidden."""
    scheme, slashes, rest = url.strip().partition("//")
    # user and password are between // and the last @
    head, *parameters = _PARTED.split(scheme + slashes + rest.rpartition("@")[2])
    return head + "".join(map(_hidden, parameters))


def _hidden(parameter: str) -> str:
    name, equals, _ = parameter.partition("=")
    return f"{name}=..." if equals and _SECRET.search(name) else parameter
