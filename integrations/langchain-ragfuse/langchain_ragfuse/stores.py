"""The disk and Redis stores through LangChain's key-value interface: embeddings and documents beside their KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from langchain_core.stores import BaseStore

from ragfuse import ByteStore, Settings


class RagFuseByteStore(BaseStore[str, bytes]):
    """Bytes by name in the tier that keeps chunks' KV, or in another folder or at another URL (redis://, s3://, ...).

    For CacheBackedEmbeddings as it is: what is used longest ago makes room, like any KV. For the documents of a
    ParentDocumentRetriever, which nobody can make again, `pinned=True`: then a value stays until it is deleted.
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
        """The value of each key, None where there is none."""
        return self._bytes.get(keys)

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Keep these values; StoreError for one that is not kept."""
        self._bytes.put(key_value_pairs)

    def mdelete(self, keys: Sequence[str]) -> None:
        """Forget these; unknown keys are no error."""
        self._bytes.delete(keys)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """Keys that begin so, in no order."""
        yield from self._bytes.names(prefix or "")

    def close(self) -> None:
        """Let go of all files and connections."""
        self._bytes.close()
