"""A tenant's schemas, in the catalog or in this process, with the keys of their KV."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ragfuse.errors import InputError
from ragfuse.schemas.pml import one_of
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.store.deletion import unanswered
from ragfuse.types.keys import ChunkKey, digest

log = logging.getLogger("ragfuse.engine")


@dataclass(frozen=True)
class StoredSchema:
    """A schema's text with the keys of its KV.

    Args:
        name: Name of the schema.
        pml: Its text.
        file: The file from which it was read.
        added: Time of registration, in seconds since the epoch.
        keys: Keys under which its KV may be stored, by digest of model and tenant.
        encoded: Digest of the text whose KV was completely encoded, by digest of model and tenant.
    """

    name: str
    pml: str
    file: str = ""
    added: float = 0.0
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    encoded: Mapping[str, str] = field(default_factory=dict)

    def is_encoded(self, model: str) -> bool:
        """Return whether exactly this text was encoded for `model` (digest of model and tenant)."""
        return self.encoded.get(model) == digest("schema", self.pml)

    def with_keys(self, model: str, keys: Sequence[str]) -> StoredSchema:
        """Return a copy with more keys for one model; keys of earlier versions stay."""
        known = dict.fromkeys((*keys, *self.keys.get(model, ())))
        return replace(self, keys={**self.keys, model: list(known)})


class SchemaRegistry:
    """A tenant's registered schemas. Safe for threads and processes; the last write wins."""

    def __init__(self, store: KVStore, catalog: Catalog, salt: str = "") -> None:
        self._store, self._catalog = store, catalog
        self._prefix, self._lock = f"schema-{digest('schemas', salt)}-", threading.Lock()
        self._in_process: dict[str, StoredSchema] = {}
        self._unwritten = set[str]()  # names that could not be written to the catalog

    def put(
        self, schema: StoredSchema, model: str, keys: Sequence[str], required: bool = True
    ) -> None:
        """Register a schema, replacing one of the same name.

        Args:
            schema: The schema.
            model: Digest of model and tenant.
            keys: Keys of its KV for that model.
            required: False: a failed write to the catalog is only counted and logged.

        Raises:
            StoreError: The catalog cannot be written; then only this process knows the schema.
        """
        with self._lock:
            previous = self._get(schema.name) or schema
            encoded = {**previous.encoded, model: digest("schema", schema.pml)}
            self._write(
                replace(
                    previous.with_keys(model, keys),
                    pml=schema.pml,
                    file=schema.file,
                    added=time.time(),
                    encoded=encoded,
                ),
                required,
            )

    def note(self, name: str, model: str, keys: Sequence[str]) -> None:
        """Record keys under which a schema's KV may be stored, so that `remove` deletes it."""
        with self._lock:
            schema = self._get(name)
            if schema is not None:
                self._write(schema.with_keys(model, keys))

    def get(self, name: str) -> StoredSchema | None:
        """Return the schema called `name`, or None."""
        with self._lock:
            return self._get(name)

    def ls(self) -> list[StoredSchema]:
        """Return all schemas, sorted by name."""
        return [schema for schema in map(self.get, self.names()) if schema is not None]

    def names(self) -> list[str]:
        """Return the names of all schemas, sorted."""
        return sorted({*self._catalog.strict.names(self._prefix), *self._unwritten})

    def describe_names(self) -> str:
        """Return the names of all schemas as text for an error message."""
        names = self.names()
        return f"{one_of('', names)}" if names else "a registered schema (there is none yet)"

    def remove(self, name: str) -> int:
        """Delete a schema and, in every tier, the KV that no other schema of the tenant uses.

        KV in an unresponsive tier stays; this is logged.

        Returns:
            The bytes freed.

        Raises:
            InputError: The schema does not exist.
        """
        schema = self.get(name)
        if schema is None:
            raise InputError(f"There is no schema '{name}'; wanted {self.describe_names()}.")
        others = {key for each in self.ls() if each.name != name for key in _keys(each)}
        with self._lock:
            self._catalog.strict.delete(self._prefix + name)
            self._in_process.pop(name, None)
            self._unwritten.discard(name)
        done = self._store.forget(_keys(schema) - others)
        if done.silent:
            log.warning(
                "%s Add and remove the schema again then.",
                unanswered(done.silent, f"it may still have KV of schema '{name}'"),
            )
        return done.nbytes

    def _write(self, schema: StoredSchema, required: bool = False) -> None:
        self._in_process[schema.name] = schema
        self._unwritten.add(schema.name)

        catalog = self._catalog.strict if required else self._catalog
        if catalog.put(self._prefix + schema.name, schema):
            self._unwritten.discard(schema.name)

    def _get(self, name: str) -> StoredSchema | None:
        answered, found = self._catalog.tried(
            lambda file: file.get(self._prefix + name, StoredSchema)
        )
        if answered and name not in self._unwritten:
            return found
        return self._in_process.get(name, found)


def _keys(schema: StoredSchema) -> set[ChunkKey]:
    return {ChunkKey.parse(key) for keys in schema.keys.values() for key in keys}
