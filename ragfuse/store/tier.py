"""The interface of a storage tier (`Tier`), the description of an entry (`EntryMeta`), and the choice of victims.

Protocols and values only. A tier stores bytes; `store.py` handles codecs and copies between tiers.
"""

from __future__ import annotations

import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ragfuse.codec import LayerMeta
from ragfuse.store.breaker import Breaker
from ragfuse.store.sizes import check_levels
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey
from ragfuse.types.kv import ChunkKV, Entry

Evictor = Callable[[Sequence[Entry]], Iterable[ChunkKey]]
"""Eviction policy: takes entries and yields the keys to evict, in that order.

A tier stops reading once there is room. It passes a few hundred entries, the least recently used and none of them
pinned, and further ones only while too few bytes came free. A `WholeEvictor` gets all entries at once, pinned ones too;
the tier never evicts these."""

Expired = Callable[[Iterable[Entry], float], Iterable[ChunkKey]]
"""Returns the keys of the entries that are too old at a time (seconds since the epoch); never of a pinned one."""

MAX_PIECES = 1 << 13
"""Most pieces (layers at all levels together) of an entry: 512 layers at 16 levels."""
_MAX_TOKENS, _MAX_NBYTES = 1 << 31, 1 << 44
"""Upper bounds of a plausible entry: tokens; bytes and hits. An index row beyond them is damaged."""
LATEST_S = 1e12
"""Latest plausible time of a use, in seconds since 1970."""
_WINDOW = 256


def windows(candidates: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the unpinned candidates in windows of growing size, lazily; candidates come least recently used first."""
    unpinned, size = (entry for entry in candidates if not entry.pinned), _WINDOW
    while window := list(islice(unpinned, size)):
        yield window
        size *= 4


@runtime_checkable
class WholeEvictor(Protocol):
    """An evictor that evicts groups of entries as a whole, such as all entries of a session.

    A tier that has enough room after some entries of a group evicts the rest of the group, too.
    """

    def together(self, one: ChunkKey, other: ChunkKey) -> bool:
        """Return whether two entries belong to the same group."""
        ...


def victims(
    evict: Evictor,
    candidates: Iterable[Entry],
    excess: int,
    nbytes_of: Callable[[Entry], int] = operator.attrgetter("nbytes"),
) -> list[ChunkKey] | None:
    """Choose the entries to evict so that `excess` bytes come free.

    Args:
        evict: The eviction policy.
        candidates: Entries that may be evicted, least recently used first; pinned ones are skipped.
        excess: Bytes to free.
        nbytes_of: Returns the bytes that an entry occupies in the tier.

    Returns:
        The keys to evict, or None if the policy does not free enough.
    """
    if isinstance(evict, WholeEvictor):
        return _whole_victims(evict, evict.together, list(candidates), excess, nbytes_of)
    chosen: list[ChunkKey] = []
    for window in windows(candidates) if excess > 0 else ():
        nbytes = {entry.key: nbytes_of(entry) for entry in window}
        for key in evict(window):
            if key in nbytes:
                chosen.append(key)
                excess -= nbytes.pop(key)
                if excess <= 0:
                    return chosen
    return chosen if excess <= 0 else None


def _whole_victims(
    evict: Evictor,
    together: Callable[[ChunkKey, ChunkKey], bool],
    entries: Sequence[Entry],
    excess: int,
    nbytes_of: Callable[[Entry], int],
) -> list[ChunkKey] | None:
    chosen: list[ChunkKey] = []
    nbytes = {entry.key: nbytes_of(entry) for entry in entries if not entry.pinned}
    for key in evict(entries) if excess > 0 else ():
        if excess <= 0 and not together(chosen[-1], key):
            break
        if key in nbytes:
            chosen.append(key)
            excess -= nbytes.pop(key)
    return chosen if excess <= 0 else None


def victims_for(
    evict: Evictor, oldest: Callable[[], Iterable[Entry]], excess: int, key: ChunkKey
) -> list[ChunkKey] | None:
    """Choose the entries to evict so that an entry can be written under `key`.

    The old entry under `key` is evicted only if all others do not free enough, so that it stays readable until then.

    Args:
        evict: The eviction policy.
        oldest: Returns the candidates, least recently used first; may be called twice.
        excess: Bytes to free.
        key: Key of the entry that is being written.

    Returns:
        The keys to evict, or None if the policy does not free enough.
    """
    others = victims(evict, (entry for entry in oldest() if entry.key != key), excess)
    return others if others is not None else victims(evict, oldest(), excess)


@dataclass(frozen=True, slots=True)
class EntryMeta:
    """The description that is stored with an entry's bytes.

    A piece is one layer encoded at one codec level. An entry has a piece for every layer at each of its levels, level
    after level: layer i of level j is piece `j * n_layers + i`.

    Args:
        n_tokens: Tokens of the chunk.
        levels: Names of the codec levels, in the order of the pieces.
        layers: The description of every piece.
        version: Format version of what was written.

    Raises:
        ValueError: The parts do not fit together, or there are more than `MAX_PIECES` pieces.
    """

    n_tokens: int
    levels: tuple[str, ...]
    layers: tuple[LayerMeta, ...]
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if type(self.n_tokens) is not int:
            raise ValueError(f"An entry's number of tokens must be whole, found {self.n_tokens!r}.")
        check_levels(self.levels)
        if len(self.layers) > MAX_PIECES:
            raise ValueError(f"An entry has at most {MAX_PIECES} layers over all its levels, found {len(self.layers)}.")
        if not self.layers or len(self.layers) % len(self.levels):
            raise ValueError(f"{len(self.layers)} layers cannot be split evenly over {len(self.levels)} levels.")
        for i, layer in enumerate(self.layers):
            if layer.key_shape[1] != self.n_tokens:
                raise ValueError(f"Layer {i} has {layer.key_shape[1]} tokens, but the entry has {self.n_tokens}.")

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers) // len(self.levels)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, as encoded."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each level, as encoded."""
        return {level: sum(layer.nbytes for layer in self.of_level(level)) for level in self.levels}

    def first(self, level: str) -> int:
        """Return the index of a level's first piece."""
        return self.levels.index(level) * self.n_layers

    def of_level(self, level: str) -> tuple[LayerMeta, ...]:
        """Return the descriptions of the layers at one level."""
        first = self.first(level)
        return self.layers[first : first + self.n_layers]

    def only(self, level: str) -> EntryMeta:
        """Return the description of the same entry at one level only."""
        return self if self.levels == (level,) else replace(self, levels=(level,), layers=self.of_level(level))

    def begins(self, piece: int) -> bool:
        """Return whether a level begins with this piece; reading such a piece counts as a hit of the entry."""
        return piece % self.n_layers == 0

    @classmethod
    def of(cls, kv: ChunkKV, level: str, blobs: Sequence[Tensor]) -> EntryMeta:
        """Return the description of `kv` encoded at one level as `blobs`, one uint8 tensor per layer."""
        layers = tuple(LayerMeta.of(layer, blob) for layer, blob in zip(kv.layers, blobs, strict=True))
        return cls(kv.n_tokens, (level,), layers)

    def check(self, blobs: Sequence[Tensor]) -> None:
        """Raise ValueError if the number of `blobs` or their lengths differ from this description."""
        for layer, blob in zip(self.layers, blobs, strict=True):
            if blob.numel() != layer.nbytes:
                raise ValueError(f"A layer is described as {layer.nbytes} bytes, found {blob.numel()}.")

    def sealed(self, blobs: Sequence[Tensor]) -> EntryMeta:
        """Return this description with a checksum added to every piece that has none."""
        layers = tuple(layer.sealed(blob) for layer, blob in zip(self.layers, blobs, strict=True))
        return replace(self, layers=layers)

    def to_json(self) -> str:
        """Return the description as one line of JSON."""
        layers, levels = [layer.as_dict() for layer in self.layers], list(self.levels)
        return json.dumps({"version": self.version, "n_tokens": self.n_tokens, "levels": levels, "layers": layers})

    @classmethod
    def from_json(cls, text: str | bytes) -> EntryMeta:
        """Return the description that `to_json` wrote.

        Raises:
            ValueError: The text is no such description, or one of another format version.
        """
        data = parsed(text)
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"not an entry of format version {FORMAT_VERSION}")
        try:
            if len(data["layers"]) > MAX_PIECES:
                raise ValueError(f"an entry has at most {MAX_PIECES} layers, found {len(data['layers'])}")
            layers = tuple(LayerMeta.from_dict(layer) for layer in data["layers"])
            return cls(data["n_tokens"], tuple(data["levels"]), layers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an entry: {error!r}") from error


def parsed(text: str | bytes) -> Any:
    """Parse the JSON of an entry's description; raise ValueError if it is invalid, too large or nested too deep."""
    n_opened = text.count("{") + text.count("[") if isinstance(text, str) else text.count(b"{") + text.count(b"[")
    if n_opened > 4 * MAX_PIECES:  # a layer has three; checked before parsing, which would take memory for all
        raise ValueError(
            f"its description (JSON) has {n_opened} lists and objects, more than an entry of {MAX_PIECES} layers has"
        )
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep") from error


def entry_from_row(
    key: ChunkKey,
    tier: str,
    n_tokens: int,
    n_layers: int,
    sizes: Mapping[str, int],
    last_used: float,
    hits: int = 0,
    pinned: bool = False,
) -> Entry:
    """Return an `Entry` built from a row of a tier's index.

    Raises:
        ValueError: A number is impossible, because the row is damaged or somebody else wrote it.
    """
    entry = Entry(key, tier, n_tokens, n_layers, sizes, last_used, hits, pinned)
    n_pieces = n_layers * len(sizes)
    if not (0 < n_tokens < _MAX_TOKENS and n_layers > 0 and n_pieces <= MAX_PIECES):
        raise ValueError(f"invalid counts: {n_tokens} tokens, {n_layers} layers")
    if min(sizes.values()) < 0 or not n_pieces <= entry.nbytes <= _MAX_NBYTES:
        raise ValueError(f"invalid size: {entry.nbytes} bytes for {n_pieces} layers")
    if not (math.isfinite(last_used) and abs(last_used) <= LATEST_S and 0 <= hits <= _MAX_NBYTES):
        raise ValueError(f"invalid use: {hits} hits, last used at {last_used}")
    return entry


Whole = tuple[EntryMeta, tuple[Tensor, ...]]
"""A whole entry: its description and all of its pieces, each uint8 `[nbytes]`."""
LAYER_ALIGNMENT = 64
"""Bytes: in files and blocks of memory every layer begins at a multiple of this."""


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


class Tier(Protocol):
    """A place that stores entries as bytes, up to a limit. Trouble with an entry is counted and logged, never raised.

    Attributes:
        name: Name of the tier in settings, traces and messages.
        capacity: Most bytes that it may store. No write exceeds it; opening a tier that holds more drops nothing.
        slow: Whether the store writes to it in the background.
        counts: Counters: `corrupt` (entries dropped because they could not be read), `evicted`, `refused` (writes for
            which no room could be made) and `failed` (errors of the medium).
    """

    name: str
    capacity: int
    slow: bool
    counts: Counts

    @property
    def nbytes(self) -> int:
        """Bytes stored now."""
        ...

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """Return the stored entries with these keys, or all entries; keys without an entry are left out."""
        ...

    def read(self, key: ChunkKey, first: int, count: int = 1) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """Read some consecutive pieces of an entry. Reading the first piece of a level counts as a hit.

        Args:
            key: The entry.
            first: Index of the first piece (see `EntryMeta`).
            count: How many pieces.

        Returns:
            The description of the whole entry, then the pieces, each uint8 `[nbytes]` and not to be written to. None if
            any of the pieces is missing.
        """
        ...

    def write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store all pieces of an entry or none, evicting other entries if needed.

        An older entry of that key stays readable until the new one is complete, so its bytes count as taken meanwhile.
        It is evicted only if evicting all others is not enough.

        Args:
            key: The entry.
            meta: Its description.
            blobs: Its pieces, each uint8 `[nbytes]`.

        Returns:
            Whether the entry is stored.
        """
        ...

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries, pinned ones too, and return how many there were."""
        ...

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction (but not from `delete`), or stop protecting them."""
        ...


@dataclass(frozen=True)
class Freed:
    """What tidying removed: expired entries, orphans (files and rows that no entry needs), and the bytes of both."""

    expired: int = 0
    orphans: int = 0
    nbytes: int = 0

    def plus(self, other: Freed) -> Freed:
        """Return the sum of both."""
        return Freed(self.expired + other.expired, self.orphans + other.orphans, self.nbytes + other.nbytes)


@runtime_checkable
class Touches(Protocol):
    """What a tier that evicts by last use also has: it can be informed of uses in other tiers."""

    name: str

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit; ignore keys that are not stored here."""
        ...


@runtime_checkable
class Expects(Protocol):
    """Optional part of a tier whose medium can prefetch."""

    def expect(self, keys: Iterable[ChunkKey], first: int, count: int) -> None:
        """Take the hint that `count` pieces from `first` on of these entries will be read soon. Returns at once."""
        ...


@runtime_checkable
class Numbers(Protocol):
    """Optional part of a tier that can count its entries without listing them."""

    @property
    def n_entries(self) -> int:
        """Entries stored now, as far as is known."""
        ...


@runtime_checkable
class Breaks(Protocol):
    """Optional part of a tier whose medium may be down for a while: a circuit breaker."""

    breaker: Breaker


def answers(tier: Tier) -> bool:
    """Return whether a tier's medium answers now. If it does not, the tier lists no entries, but may hold some."""
    failed = tier.counts["failed"]
    tier.nbytes  # noqa: B018 - makes the tier ask its medium
    return tier.counts["failed"] == failed and not (isinstance(tier, Breaks) and tier.breaker.is_open)


@runtime_checkable
class Pads(Protocol):
    """What a tier also has in which an entry occupies more bytes than were written."""

    def occupied(self, nbytes: int) -> int:
        """Return the bytes that an entry of `nbytes` occupies, about."""
        ...


def occupied(tier: object, nbytes: int) -> int:
    """Return the bytes that an entry of `nbytes` occupies in a tier."""
    return tier.occupied(nbytes) if isinstance(tier, Pads) else nbytes


@runtime_checkable
class Tidies(Protocol):
    """Optional part of a tier in which interrupted writes leave something behind."""

    def tidy(self) -> Freed:
        """Remove what no entry needs: files of interrupted writes, and index rows whose entry is gone."""
        ...
