"""Schemas as they are written down: by tenant, in the store's catalog or, without one, in this process alone.

No model is needed: what was encoded of a schema is written down beside it, by model, so that it can be deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ragfuse.errors import InputError, PMLError, StoreError
from ragfuse.process.fork import ForkLock
from ragfuse.schemas.nodes import Item, Module, inner
from ragfuse.schemas.pml import one_of, parse_schema
from ragfuse.store import KVStore
from ragfuse.store.bulk import unanswered
from ragfuse.store.catalog import Catalog
from ragfuse.store.deletion import dropped
from ragfuse.types.keys import ChunkKey, digest

log = logging.getLogger("ragfuse.engine")


@dataclass(frozen=True)
class SchemaInfo:
    """A registered schema in a line: name, the file that it came from, modules, scaffolds, when it was registered."""

    name: str
    file: str
    modules: int
    scaffolds: int
    added: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class StoredSchema:
    """A schema's text and where it came from.

    keys: of what was encoded of it, or may be, by digest of model and tenant. encoded: digest of the text that was
    encoded as a whole, by the same.
    """

    name: str
    pml: str
    file: str = ""
    added: float = 0.0
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    encoded: Mapping[str, str] = field(default_factory=dict)

    def is_encoded(self, model: str) -> bool:
        """Whether just this text was encoded for the digest `model`."""
        return self.encoded.get(model) == digest("schema", self.pml)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredSchema | None:
        """What was written down, None where that is something else."""
        try:
            keys = {str(model): [str(key) for key in keys] for model, keys in data["keys"].items()}
            encoded = {str(model): str(text) for model, text in data.get("encoded", {}).items()}
            return cls(str(data["name"]), str(data["pml"]), str(data["file"]), float(data["added"]), keys, encoded)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


class SchemaRegistry:
    """The schemas of a tenant, by its salt. Threads and processes may share it; of two that write one name, the last.

    clock: seconds since 1970.
    """

    def __init__(
        self, store: KVStore, catalog: Catalog, salt: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._catalog, self._clock = store, catalog, clock
        self._prefix, self._lock = f"schema-{digest('schemas', salt)}-", ForkLock()
        self._here: dict[str, dict[str, Any]] = {}
        self._unwritten = set[str]()  # names of what the catalog did not take

    def put(self, kept: StoredSchema, model: str, keys: Sequence[str], must: bool = True) -> None:
        """Write a schema down in place of another of its name. keys: of its runs, for the digest `model`.

        StoreError where the catalog cannot be written: then this process alone knows the schema. Unless it `must`, that
        is no more than counted and said in the log.
        """
        with self._lock:
            before = self._get(kept.name) or kept
            encoded = {**before.encoded, model: digest("schema", kept.pml)}
            all_keys = _more(before.keys, model, keys)
            self._write(replace(kept, added=self._clock(), keys=all_keys, encoded=encoded), must)

    def note(self, name: str, model: str, keys: Sequence[str]) -> None:
        """Write down what may be encoded of a schema after an answer, so that it goes when the schema does."""
        with self._lock:
            kept = self._get(name)
            if kept is not None:
                self._write(replace(kept, keys=_more(kept.keys, model, keys)))

    def get(self, name: str) -> StoredSchema | None:
        """The schema of that name, None if there is none."""
        with self._lock:
            return self._get(name)

    def ls(self) -> list[SchemaInfo]:
        """All of them, by name; what cannot be read any more has no modules."""
        return [SchemaInfo(kept.name, kept.file, *_counts(kept), kept.added) for kept in self._all()]

    def names(self) -> list[str]:
        """Which there are, sorted."""
        names = self._catalog.strict.names()
        kept = {name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)}
        return sorted(kept | self._unwritten)

    def names_told(self) -> str:
        """Which there are, for an error."""
        try:
            names = self.names()
        except StoreError:
            return "a schema that is registered: which there are cannot be read now"
        return f"{one_of('', names)}" if names else "a schema that is registered: there is none yet"

    def remove(self, name: str) -> int:
        """Forget a schema, and the KV that no other one of the tenant has, in every tier; bytes freed.

        InputError where there is none. What a tier holds that does not answer stays, and is told in the log.
        """
        kept = self.get(name)
        if kept is None:
            raise InputError(f"There is no schema '{name}'; wanted {self.names_told()}.")
        others = {key for each in self._all() if each.name != name for key in _keys(each)}
        with self._lock:
            self._catalog.strict.delete(self._prefix + name)
            self._here.pop(name, None)
            self._unwritten.discard(name)
        gone = {key for key in _keys(kept) if key not in others}
        sizes = [(entry, entry.nbytes) for tier in self._store.tiers for entry in tier.entries(gone).values()]
        done = dropped(self._store, self._store.drop(gone))
        if done.silent:
            log.warning(unanswered(done.silent, f"what it holds of schema '{name}' stays"))
        return sum(nbytes for entry, nbytes in sizes if not done.has_left(entry))

    def _all(self) -> list[StoredSchema]:
        found = map(self.get, self.names())
        return [kept for kept in found if kept is not None]

    def _write(self, kept: StoredSchema, must: bool = False) -> None:
        data = self._here[kept.name] = asdict(kept)
        self._unwritten.add(kept.name)

        catalog = self._catalog.strict if must else self._catalog
        if catalog.put(self._prefix + kept.name, data):
            self._unwritten.discard(kept.name)

    def _get(self, name: str) -> StoredSchema | None:
        answered, found = self._catalog.try_get(self._prefix + name)
        data = found if answered and name not in self._unwritten else self._here.get(name, found)
        return StoredSchema.from_dict(data) if data else None


def _more(before: Mapping[str, Sequence[str]], model: str, keys: Sequence[str]) -> dict[str, list[str]]:
    """Keys by model with more of one; those of texts that were edited since stay, as their KV does."""
    others = {name: list(old) for name, old in before.items()}
    return {**others, model: list(dict.fromkeys([*keys, *others.get(model, [])]))}


def _keys(kept: StoredSchema) -> Iterator[ChunkKey]:
    for keys in kept.keys.values():
        for key in keys:
            try:
                yield ChunkKey.parse(key)
            except ValueError:  # a bad byte costs one entry
                continue


def _counts(kept: StoredSchema) -> tuple[int, int]:
    try:
        schema = parse_schema(kept.pml, kept.file)
    except PMLError:
        return 0, 0
    return _n_modules(schema.items), len(schema.scaffolds)


def _n_modules(items: tuple[Item, ...]) -> int:
    return sum(1 + _n_modules(each.items) for each in inner(items) if isinstance(each, Module))
