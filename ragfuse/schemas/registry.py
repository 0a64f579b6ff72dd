"""A tenant's registered schemas with their KV keys, in the catalog or in this process."""

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
    """A registered schema: the PML text, and the keys of the schema's KV.

    Args:
        name: Name of the schema.
        pml: The PML text of the schema.
        file: The file from which the schema was read. "" if unknown.
        added: Time of registration, in seconds since the epoch.
        keys: Keys under which the schema's KV may be stored, for each digest of model and tenant.
        encoded: Digest of the last fully encoded PML text, for each digest of model and tenant.
    """

    name: str
    pml: str
    file: str = ""
    added: float = 0.0
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    encoded: Mapping[str, str] = field(default_factory=dict)

    def is_encoded(self, model: str) -> bool:
        """Return whether this PML text is encoded. `model` is a digest of model and tenant."""
        return self.encoded.get(model) == digest("schema", self.pml)

    def with_keys(self, model: str, keys: Sequence[str]) -> StoredSchema:
        """Return a copy with more keys for one model. Keys of the schema's earlier texts stay."""
        known = dict.fromkeys((*keys, *self.keys.get(model, ())))
        return replace(self, keys={**self.keys, model: list(known)})


class SchemaRegistry:
    """A tenant's registered schemas. Safe for threads and processes; the latest write wins."""

    def __init__(self, store: KVStore, catalog: Catalog, salt: str = "") -> None:
        self._store, self._catalog = store, catalog
        self._prefix, self._lock = f"schema-{digest('schemas', salt)}-", threading.Lock()
        self._in_process: dict[str, StoredSchema] = {}
        self._unwritten = set[str]()  # names that could not be written to the catalog

    def put(
        self, schema: StoredSchema, model: str, keys: Sequence[str], required: bool = True
    ) -> None:
        """Register a schema. A registered schema of the same name is replaced.

        Args:
            schema: The schema.
            model: Digest of model and tenant.
            keys: Keys of the schema's KV for the model.
            required: True to raise an error if the catalog cannot be written. If False, the failed
                write is only counted and logged. Either way, this process knows the schema.

        Raises:
            StoreError: The catalog cannot be written, and `required` is True.
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
        """Record further keys of a schema's KV, so that `remove` deletes this KV too."""
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
        """Return up to eight schema names as text for an error message."""
        names = self.names()
        return one_of("", names) if names else "a registered schema (there is none yet)"

    def remove(self, name: str) -> int:
        """Delete a schema and, in every tier, the KV that only this schema uses.

        If a tier does not respond, its KV is not deleted, and a warning is logged.

        Returns:
            The bytes freed.

        Raises:
            InputError: The schema does not exist.
        """
        schema = self.get(name)
        if schema is None:
            raise InputError(f"There is no schema '{name}'. Use {self.describe_names()}.")
        others = {key for each in self.ls() if each.name != name for key in _keys(each)}
        with self._lock:
            self._catalog.strict.delete(self._prefix + name)
            self._in_process.pop(name, None)
            self._unwritten.discard(name)
        done = self._store.forget(_keys(schema) - others)
        if done.silent:
            log.warning(
                "%s Then register and remove the schema again, to delete the rest.",
                unanswered(done.silent, f"KV of schema '{name}' may still be stored there"),
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
