"""Chunks that are forgotten: their KV leaves the tiers, in all company and whether it is pinned or not, their texts the
catalog. The caller says which chunks are meant; a medium that does not answer is named, never passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from ragfuse.store import KVStore
from ragfuse.store.bulk import unanswered
from ragfuse.store.catalog import CatalogQueries
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.engine")

Chunk = tuple[str, str]
"""What all entries of one tenant's chunk share, in whatever company it was encoded: digests of model and ids."""


def chunk_of(key: ChunkKey) -> Chunk:
    """The chunk that an entry belongs to."""
    return key.model, key.tokens


def chunk_named(text: str) -> Chunk:
    """The chunk of a key as the catalog has it; one that nobody has where a bad byte makes it none."""
    try:
        return chunk_of(ChunkKey.parse(text))
    except ValueError:
        return "", ""


@dataclass(frozen=True)
class Dropped:
    """What dropping left behind. left: by tier, keys that may still be there, as it could not drop them.

    silent: tiers that were meant and could not drop, or do not answer; unknown: others that do not answer.
    """

    left: Mapping[str, Set[ChunkKey]]
    silent: Sequence[str]
    unknown: Sequence[str] = ()

    def has_left(self, entry: Entry) -> bool:
        """Whether this entry may still be there."""
        return entry.key in self.left.get(entry.tier, ())


def dropped(store: KVStore, left: Mapping[str, Set[ChunkKey]], tier: str | None = None) -> Dropped:
    """What `KVStore.drop` of all tiers, or of one, left behind; asked after every listing, which may lack theirs."""
    quiet = store.silent()
    silent = list(dict.fromkeys([*left, *(name for name in quiet if tier in (None, name))]))
    return Dropped(left, silent, [name for name in quiet if name not in silent])


def forget_texts(catalog: CatalogQueries, chunks: Iterable[Chunk]) -> int:
    """Delete these chunks' texts, of whatever source; how many there were."""
    by_model: dict[str, list[str]] = {}
    for model, tokens in chunks:
        by_model.setdefault(model, []).append(str(ChunkKey(model, tokens)))
    return sum(catalog.delete_texts(model, keys=keys) for model, keys in by_model.items())


def forget_chunks(store: KVStore, catalog: CatalogQueries, chunks: Set[Chunk]) -> int:
    """Forget chunks wherever they are kept, on their way or written down; bytes freed.

    While a tier does not answer the texts stay written down, so that `ragfuse store clear` still finds what it holds.
    """
    if not chunks:
        return 0
    keys = {key for key in store.under_way() if chunk_of(key) in chunks}  # asked first: it may be listed meanwhile
    entries = [entry for entry in store.entries() if chunk_of(entry.key) in chunks]
    done = dropped(store, store.drop(keys.union(entry.key for entry in entries)))
    if done.silent:
        log.warning(unanswered(done.silent, f"of {len(chunks)} chunks to be forgotten, what it holds stays"))
    else:
        forget_texts(catalog, chunks)
    return sum(entry.nbytes for entry in entries if not done.has_left(entry))
