"""Delete chunks completely, KV and texts, and those that have expired.

The caller decides which. A tier that does not answer is reported, as it may still hold some.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence, Set

from ragfuse.store.catalog import Catalog, KnownText
from ragfuse.store.store import Forgotten, KVStore
from ragfuse.types.keys import ChunkKey
from ragfuse.types.texts import whole_text

log = logging.getLogger("ragfuse.store")

LEARNT = "seen again"
"""The source of known chunks that were learnt from several prompts: no document."""

Chunk = tuple[str, str]
"""One tenant's chunk, in whatever context it was encoded: digests of model and token ids."""


def chunk_of(key: ChunkKey) -> Chunk:
    """Return the chunk that an entry belongs to."""
    return key.model, key.tokens


def chunk_named(text: str) -> Chunk:
    """Return the chunk of a key in the catalog; ("", "") for a damaged one."""
    try:
        return chunk_of(ChunkKey.parse(text))
    except ValueError:
        return "", ""


def texts_by_chunk(catalog: Catalog, models: Iterable[str]) -> defaultdict[Chunk, list[KnownText]]:
    """Return the catalog's texts of these model digests by chunk, one for each source."""
    found = defaultdict[Chunk, list[KnownText]](list)
    for model in models:
        for known in catalog.texts(model):
            found[chunk_named(known.key)].append(known)
    return found


def unanswered(names: Sequence[str], consequence: str) -> str:
    """Return a message that these tiers do not answer, with the consequence and what to do."""
    return f"Tier {' and '.join(names)} does not answer: {consequence}. Try again later."


def forget_texts(catalog: Catalog, chunks: Iterable[Chunk]) -> int:
    """Delete the texts of chunks from the catalog, and return how many there were."""
    return catalog.delete_texts(keys=[str(ChunkKey(*chunk)) for chunk in chunks])


def forget_chunks(store: KVStore, catalog: Catalog, chunks: Set[Chunk]) -> Forgotten:
    """Delete chunks everywhere: stored KV, pending saves and texts.

    Texts stay while a tier does not answer, so that `ragfuse store rm` still finds what it holds.
    """
    if not chunks:
        return Forgotten((), ())
    done = store.forget(key for key in store.all_keys() if chunk_of(key) in chunks)
    if done.silent:
        log.warning(unanswered(done.silent, "it may still have KV of what was deleted"))
    else:
        forget_texts(catalog, chunks)
    return done


def leave_source(
    catalog: Catalog, model: str, texts: Collection[str], is_left: Callable[[str], bool]
) -> set[str]:
    """Forget that a tenant's texts came from the sources that `is_left` names, where another one
    holds them too; return those texts. What was learnt from prompts is no source, and the only
    source of a text stays.
    """
    wanted = {whole_text(text).strip() for text in texts}
    rows = [row for row in catalog.texts(model) if row.text in wanted]
    shared = {row.text for row in rows if row.source != LEARNT and not is_left(row.source)}
    stale = [row for row in rows if is_left(row.source) and row.text in shared]
    for source in {row.source for row in stale}:
        catalog.delete_texts(
            model, source=source, keys=[row.key for row in stale if row.source == source]
        )
    return {text for text in texts if whole_text(text).strip() in shared}


def sources_in_order(sources: Iterable[str]) -> tuple[str, ...]:
    """Return the sources of a text, the first one first and what was learnt last."""
    return tuple(sorted(dict.fromkeys(sources), key=lambda source: source == LEARNT))


def gc(store: KVStore) -> dict[str, tuple[int, int]]:
    """Delete expired entries; return how many and their bytes by tier name, without tiers that do
    not answer. Remote tiers expire entries by themselves.
    """
    freed = dict[str, tuple[int, int]]()
    for tier in store.tiers:
        entries = tier.stat([] if tier.remote else store.too_old(tier.list()))
        old = store.too_old(entries.values())  # one may have been used while listing
        nbytes = sum(entries[key].nbytes for key in old)
        n_deleted = tier.delete(old)
        if tier.answers:
            freed[tier.name] = n_deleted, nbytes if n_deleted else 0
    return freed
