"""LangChain's key-value store interface over the tiers of ragfuse, for embeddings and documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from langchain_core.stores import BaseStore

from ragfuse import ByteStore, Settings
from ragfuse.types.arguments import checks_arguments


@checks_arguments
class RagFuseByteStore(BaseStore[str, bytes]):
    """Values in bytes by name, in the disk tier of the chunk store or in another place.

    By default the least recently used values are evicted, like KV, which suits CacheBackedEmbeddings. For documents of
    a ParentDocumentRetriever, which cannot be recomputed, set `pinned=True`.

    Args:
        where: A folder or URL (redis://, s3://, ...); None: the disk tier that the settings describe.
        namespace: Names in different namespaces are independent.
        pinned: Keep values until they are deleted.
        settings: None: from the environment, ragfuse.toml and the defaults.
    """

    def __init__(
        self,
        where: str | Path | None = None,
        *,
        namespace: str = "langchain",
        pinned: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self._bytes = ByteStore(where, namespace, pinned, settings)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value of each key; None for a key without one."""
        return self._bytes.get(keys)

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Store these values; raises StoreError for the first that cannot be stored."""
        self._bytes.put(key_value_pairs)

    def mdelete(self, keys: Sequence[str]) -> None:
        """Delete these keys; unknown keys are ignored."""
        self._bytes.delete(keys)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """Yield the keys that begin with `prefix`, in no particular order."""
        yield from self._bytes.names(prefix or "")

    def close(self) -> None:
        """Close all files and connections."""
        self._bytes.close()
