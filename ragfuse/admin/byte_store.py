"""A store of named byte values in one tier, for data that belongs with the documents, such as embeddings.

Each value is an entry in the tier's own format (`store/named.py`), and `ragfuse store` manages it like any other. The
values are not KV, so no prompt ever hits them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ragfuse.engine.store_opener import open_kept
from ragfuse.errors import StoreError
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile, KVStore
from ragfuse.store.deletion import unanswered
from ragfuse.store.named import as_entry, value_of
from ragfuse.store.tenants import hidden
from ragfuse.types.arguments import checks_arguments
from ragfuse.types.keys import ChunkKey, digest


@checks_arguments
class ByteStore:
    """A mapping of names to bytes in a folder or at a URL. Thread-safe, and shared with other processes.

    Values are evicted least recently used first and expire after `ttl_s`, like KV. Different salts in the settings
    (tenants) do not see each other's values.

    Args:
        where: A folder or URL with a capacity of `tier_bytes`; None: the disk tier of the settings, which shares its
            capacity with the KV there.
        namespace: Names in different namespaces are independent.
        pinned: Values are never evicted and never expire.
        settings: The settings; None: environment, ragfuse.toml, defaults.

    Raises:
        StoreError: The place cannot be used.
    """

    def __init__(
        self,
        where: str | Path | None = None,
        namespace: str = "default",
        pinned: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self._settings, self._namespace, self._pinned = (settings or Settings()).placed(), namespace, pinned
        self._digest = digest("bytes", namespace, self._settings.salt)
        self._store = self._open(where)
        self._tier = self._store.tiers[0]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the value of each name; None for a name without a readable value."""
        keys = [self._key(name) for name in names]
        found = {key: value_of(self._tier, key) for key in self._store.lookup(keys)}
        return [found.get(key) for key in keys]

    def put(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        """Write values, replacing those of the same names; StoreError for the first that cannot be written."""
        for name, value in pairs:
            key = self._key(name)
            if not self._tier.put(key, *as_entry(name, value)):
                raise StoreError(
                    f"'{name}' ({len(value):,} bytes) could not be stored in tier {self._tier.name}: the tier does not "
                    f"answer, or has too little space left. See: ragfuse store ls"
                )
            if self._pinned:
                self._tier.pin([key], True)

    def delete(self, names: Iterable[str]) -> None:
        """Delete values; unknown names are ignored. StoreError if the tier does not answer."""
        silent = self._store.forget([self._key(name) for name in names]).silent
        if silent:
            raise StoreError(unanswered(silent, "what was to be deleted may still be there"))

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that begin with `prefix`, in no particular order."""
        for key in (entry.key for entry in self._tier.list()):
            data = value_of(self._tier, key, 1) if key.model == self._digest else None
            name = None if data is None else data.decode("utf-8", "surrogatepass")
            if name is not None and name.startswith(prefix):
                yield name

    def close(self) -> None:
        """Close all files."""
        self._store.close()

    def __enter__(self) -> ByteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside

    def _open(self, where: str | Path | None) -> KVStore:
        settings = self._settings
        disk_folder = settings.store_path.resolve()
        if where is None or ("://" not in str(where) and Path(where).expanduser().resolve() == disk_folder):
            if not settings.disk_bytes:
                raise StoreError(
                    "disk_bytes is 0, so there is no disk tier to store values in. Set disk_bytes, or pass a folder or "
                    "URL."
                )
            # `ragfuse store ls` shows these fields as the model and the tenant of the entries.
            with CatalogFile(settings.store_path, settings.shared_with) as catalog:
                fields = {"model": f"bytes of '{self._namespace}'", "dtype": "", "tenant": hidden(settings.salt)}
                catalog.settle(f"tenant-{self._digest}", fields)
            return open_kept(settings.model_copy(update={"gpu_bytes": 0, "memory_bytes": 0, "tiers": ()}))
        changes = {"gpu_bytes": 0, "memory_bytes": 0, "disk_bytes": 0, "tiers": (str(where),)}
        return open_kept(settings.model_copy(update=changes).placed())

    def _key(self, name: str) -> ChunkKey:
        return ChunkKey(self._digest, digest("name", name.encode("utf-8", "surrogatepass")))
