"""What a tier is, what an entry says of itself, and who may be asked whom to drop.

Protocol and values only. Tiers keep bytes; codecs, keys of a prompt and promotion between tiers are `store.py`'s.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ragfuse.codec import LayerMeta
from ragfuse.process.fork import at_fork
from ragfuse.store.breaker import Breaker
from ragfuse.store.sizes import check_levels
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey
from ragfuse.types.kv import ChunkKV, Entry

Evictor = Callable[[Sequence[Entry]], Iterable[ChunkKey]]
"""Yields keys to drop, the first first; a tier stops asking once there is room, and never drops a pinned entry.

It is shown the entries used longest ago, some hundreds, and further ones only while what it yields is not enough; all
at once, pinned ones too, if it is a `WholeEvictor`."""

Expired = Callable[[Iterable[Entry], float], Iterable[ChunkKey]]
"""Keys of those entries that are too old to be kept at this time, in seconds since the epoch; never a pinned one."""

MOST_PIECES = 1 << 13
"""Layers of an entry at all its levels together, at most: 512 layers at 16 levels."""
_MOST_TOKENS, _MOST_NBYTES = 1 << 31, 1 << 44
"""Of what an index tells: no entry has more tokens, bytes or hits."""
LATEST_S = 1e12
"""Seconds since 1970 beyond which nothing was used."""
_WINDOW = 256


def windows(candidates: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The unpinned candidates, given oldest first, in pieces of growing size: only as many are made as are needed."""
    unpinned, size = (entry for entry in candidates if not entry.pinned), _WINDOW
    while window := list(islice(unpinned, size)):
        yield window
        size *= 4


@runtime_checkable
class WholeEvictor(Protocol):
    """An evictor that drops several entries as one: a tier that has room in their midst drops the rest of them, too."""

    def together(self, one: ChunkKey, other: ChunkKey) -> bool:
        """Whether both go or none."""
        ...


def victims(evict: Evictor, candidates: Iterable[Entry], excess: int) -> list[ChunkKey] | None:
    """Whom of the candidates, oldest first, to drop to free `excess` bytes; None if the evictor gives too little."""
    if isinstance(evict, WholeEvictor):
        return _whole_victims(evict, evict.together, list(candidates), excess)
    chosen: list[ChunkKey] = []
    for window in windows(candidates) if excess > 0 else ():
        nbytes = {entry.key: entry.nbytes for entry in window}
        for key in evict(window):
            if key in nbytes:
                chosen.append(key)
                excess -= nbytes.pop(key)
                if excess <= 0:
                    return chosen
    return chosen if excess <= 0 else None


def _whole_victims(
    evict: Evictor, together: Callable[[ChunkKey, ChunkKey], bool], entries: Sequence[Entry], excess: int
) -> list[ChunkKey] | None:
    chosen: list[ChunkKey] = []
    nbytes = {entry.key: entry.nbytes for entry in entries if not entry.pinned}
    for key in evict(entries) if excess > 0 else ():
        if excess <= 0 and not together(chosen[-1], key):
            break
        if key in nbytes:
            chosen.append(key)
            excess -= nbytes.pop(key)
    return chosen if excess <= 0 else None


def victims_for(
    evict: Evictor, oldest: Callable[[], Iterable[Entry]], excess: int, own: ChunkKey
) -> list[ChunkKey] | None:
    """Whom of `oldest()` to drop for what is written under `own`: an entry there goes only if all others do not do."""
    others = victims(evict, (entry for entry in oldest() if entry.key != own), excess)
    return others if others is not None else victims(evict, oldest(), excess)


@dataclass(frozen=True, slots=True)
class EntryMeta:
    """What is written beside an entry's bytes: n_tokens, the codec's levels, every piece's description, the version.

    An entry holds every layer at every one of its levels, one level after the other: layer i of level j is piece
    `j * n_layers + i`, of which `layers` has the descriptions.
    """

    n_tokens: int
    levels: tuple[str, ...]
    layers: tuple[LayerMeta, ...]
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if type(self.n_tokens) is not int:
            raise ValueError(f"An entry of {self.n_tokens!r} tokens holds nothing.")
        check_levels(self.levels)
        if len(self.layers) > MOST_PIECES:
            raise ValueError(f"At most {MOST_PIECES} layers wanted, {len(self.layers)} found.")
        if not self.layers or len(self.layers) % len(self.levels):
            raise ValueError(f"{len(self.layers)} layers are not as many at each of {len(self.levels)} levels.")
        for i, layer in enumerate(self.layers):
            if layer.key_shape[1] != self.n_tokens:
                raise ValueError(f"Layer {i} holds {layer.key_shape[1]} tokens, the entry {self.n_tokens}.")

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
        """Bytes of every level, as encoded."""
        return {level: sum(layer.nbytes for layer in self.of_level(level)) for level in self.levels}

    def first(self, level: str) -> int:
        """The piece that a level begins with."""
        return self.levels.index(level) * self.n_layers

    def of_level(self, level: str) -> tuple[LayerMeta, ...]:
        """Descriptions of the layers at one level."""
        first = self.first(level)
        return self.layers[first : first + self.n_layers]

    def only(self, level: str) -> EntryMeta:
        """The same entry without its other levels."""
        return self if self.levels == (level,) else replace(self, levels=(level,), layers=self.of_level(level))

    def begins(self, piece: int) -> bool:
        """Whether a level begins there: who reads that uses the entry once more."""
        return piece % self.n_layers == 0

    @classmethod
    def of(cls, kv: ChunkKV, level: str, blobs: Sequence[Tensor]) -> EntryMeta:
        """The description of `kv` encoded as `blobs`, one per layer, at one level."""
        layers = tuple(LayerMeta.of(layer, blob) for layer, blob in zip(kv.layers, blobs, strict=True))
        return cls(kv.n_tokens, (level,), layers)

    def check(self, blobs: Sequence[Tensor]) -> None:
        """ValueError if `blobs` are not as many and as long as described."""
        for layer, blob in zip(self.layers, blobs, strict=True):
            if blob.numel() != layer.nbytes:
                raise ValueError(f"{layer.nbytes} bytes described, {blob.numel()} given.")

    def sealed(self, blobs: Sequence[Tensor]) -> EntryMeta:
        """This description with a checksum for every layer that has none."""
        layers = tuple(layer.sealed(blob) for layer, blob in zip(self.layers, blobs, strict=True))
        return replace(self, layers=layers)

    def to_json(self) -> str:
        """One line of JSON."""
        layers, levels = [layer.as_dict() for layer in self.layers], list(self.levels)
        return json.dumps({"version": self.version, "n_tokens": self.n_tokens, "levels": levels, "layers": layers})

    @classmethod
    def from_json(cls, text: str | bytes) -> EntryMeta:
        """The description written by `to_json`; ValueError if it is none, or one of another version."""
        data = parsed(text)
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"an entry of format version {FORMAT_VERSION} wanted")
        try:
            if len(data["layers"]) > MOST_PIECES:
                raise ValueError(f"at most {MOST_PIECES} layers wanted, {len(data['layers'])} found")
            layers = tuple(LayerMeta.from_dict(layer) for layer in data["layers"])
            return cls(data["n_tokens"], tuple(data["levels"]), layers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an entry: {error!r}") from error


def parsed(text: str | bytes) -> Any:
    """Return what JSON says of an entry; ValueError for what is none, and for too much or too deep."""
    n_opened = text.count("{") + text.count("[") if isinstance(text, str) else text.count(b"{") + text.count(b"[")
    if n_opened > 4 * MOST_PIECES:  # a layer has three; counted before objects are made of them
        raise ValueError(f"{n_opened} lists and objects found, more than {MOST_PIECES} layers have")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists or objects too deep in each other") from error


def told_entry(
    key: ChunkKey,
    tier: str,
    n_tokens: int,
    n_layers: int,
    sizes: Mapping[str, int],
    last_used: float,
    hits: int = 0,
    pinned: bool = False,
) -> Entry:
    """Return the entry that an index tells of; ValueError for numbers that no entry has, whoever wrote them there."""
    entry = Entry(key, tier, n_tokens, n_layers, sizes, last_used, hits, pinned)
    n_pieces = n_layers * len(sizes)
    if not (0 < n_tokens < _MOST_TOKENS and n_layers > 0 and n_pieces <= MOST_PIECES):
        raise ValueError(f"{n_tokens} tokens in {n_layers} layers are none")
    if min(sizes.values()) < 0 or not n_pieces <= entry.nbytes <= _MOST_NBYTES:
        raise ValueError(f"{entry.nbytes} bytes do not hold {n_pieces} layers")
    if not (math.isfinite(last_used) and abs(last_used) <= LATEST_S and 0 <= hits <= _MOST_NBYTES):
        raise ValueError(f"{hits} hits, the last at {last_used}, are none")
    return entry


Whole = tuple[EntryMeta, tuple[Tensor, ...]]
"""An entry: its description, and all of its pieces."""
LAYER_ALIGNMENT = 64
"""Bytes: in files and blocks of memory every layer begins at a multiple of this."""


class Counts:
    """Counters by name, exact under threads."""

    def __init__(self) -> None:
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Count from nothing."""
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        """Count `n` more."""
        with self._lock:
            self._counts[name] += n

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]


class Tier(Protocol):
    """A place for bytes with a limit. Trouble with an entry is counted and logged, never raised.

    `counts` holds corrupt (entries dropped because they could not be read), evicted, refused (no room could be made),
    failed (the medium said no) and promoted (copied in by whoever plans, being hit often). A `slow` tier is written in
    the background. No write brings `nbytes` over `capacity`; opening what holds more drops nothing.
    """

    name: str
    capacity: int
    slow: bool
    counts: Counts

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        ...

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """The entries kept under `keys`, or all of them; missing ones are left out."""
        ...

    def read(self, key: ChunkKey, first: int, count: int = 1) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """The entry's description and `count` pieces from `first` on, uint8 [nbytes] each, not to be written to.

        None if any of them is not there. Reading the piece that a level begins with is a hit.
        """
        ...

    def write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Keep the pieces of one entry, all or none, dropping others if needed; False if they were not kept.

        An entry of that key makes room only once all others that may go are not enough, and is there until then.
        """
        ...

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Drop these entries; how many there were."""
        ...

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction, or stop doing so. Deleting still works."""
        ...


@dataclass(frozen=True)
class Freed:
    """What tidying gave back: entries that were too old, things that no entry needs, and the bytes of both."""

    expired: int = 0
    orphans: int = 0
    nbytes: int = 0

    def plus(self, other: Freed) -> Freed:
        """Both together."""
        return Freed(self.expired + other.expired, self.orphans + other.orphans, self.nbytes + other.nbytes)


@runtime_checkable
class Touches(Protocol):
    """What a tier may have beside `Tier`, where entries grow old: it hears, seldom, of uses in other tiers."""

    name: str

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note a use now, without counting a hit; of what is not kept here, nothing."""
        ...


@runtime_checkable
class Expects(Protocol):
    """What a tier may have beside `Tier`, where a medium can bring bytes before they are read."""

    def expect(self, keys: Iterable[ChunkKey], first: int, count: int) -> None:
        """`count` pieces from `first` on of these will be read soon. Never waits for them, and promises nothing."""
        ...


@runtime_checkable
class Numbers(Protocol):
    """What a tier may have beside `Tier`, where it knows how many entries it has without listing them."""

    @property
    def n_entries(self) -> int:
        """Entries kept now, as far as is known."""
        ...


@runtime_checkable
class Breaks(Protocol):
    """What a tier may have beside `Tier`, where its medium may be down for a while."""

    breaker: Breaker


def answers(tier: Tier) -> bool:
    """Whether a tier's medium answers now: one that does not is said to hold nothing, which is not known."""
    failed = tier.counts["failed"]
    tier.nbytes  # noqa: B018 - asked for the sake of asking
    return tier.counts["failed"] == failed and not (isinstance(tier, Breaks) and tier.breaker.is_open)


@runtime_checkable
class Tidies(Protocol):
    """What a tier may have beside `Tier`, where writes that never ended leave something behind."""

    def tidy(self) -> Freed:
        """Free what no entry needs: what writers that died have left, and rows of what is gone."""
        ...
