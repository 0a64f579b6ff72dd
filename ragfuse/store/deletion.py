"""Delete expired entries, or all KV and texts of the chunks that a caller names.

Tiers that do not respond are reported, because they may still store entries.
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
"""`KnownText.source` of a chunk that was found in several prompts, not in a document."""

Chunk = tuple[str, str]
"""(model digest, token digest) of a chunk. Entries of one chunk differ in context or layout."""


def chunk_of(key: ChunkKey) -> Chunk:
    """Return the chunk that an entry's key belongs to."""
    return key.model, key.tokens


def chunk_named(text: str) -> Chunk:
    """Return the chunk that a `KnownText.key` names, or ("", "") if the key is damaged."""
    try:
        return chunk_of(ChunkKey.parse(text))
    except ValueError:
        return "", ""


def texts_by_chunk(catalog: Catalog, models: Iterable[str]) -> defaultdict[Chunk, list[KnownText]]:
    """Return the known texts of these model digests by chunk. A text occurs once per source."""
    found = defaultdict[Chunk, list[KnownText]](list)
    for model in models:
        for known in catalog.texts(model):
            found[chunk_named(known.key)].append(known)
    return found


def unanswered(names: Sequence[str], consequence: str) -> str:
    """Return a message that lists silent tiers (`names`), states `consequence` and gives advice."""
    return f"No answer from tier {' and '.join(names)}: {consequence}. Try again later."


def forget_texts(catalog: Catalog, chunks: Iterable[Chunk]) -> int:
    """Delete the texts of chunks from the catalog; return the number deleted."""
    return catalog.delete_texts(keys=[str(ChunkKey(*chunk)) for chunk in chunks])


def forget_chunks(store: KVStore, catalog: Catalog, chunks: Set[Chunk]) -> Forgotten:
    """Delete chunks everywhere: stored KV, pending saves and texts.

    If a tier does not respond, the texts are not deleted, because `ragfuse store rm` needs the
    texts to find the entries in that tier.
    """
    if not chunks:
        return Forgotten((), ())
    done = store.forget(key for key in store.all_keys() if chunk_of(key) in chunks)
    if done.silent:
        log.warning(unanswered(done.silent, "KV of the deleted texts may still be stored there"))
    else:
        forget_texts(catalog, chunks)
    return done


def leave_source(
    catalog: Catalog, model: str, texts: Collection[str], is_left: Callable[[str], bool]
) -> set[str]:
    """Delete those sources of a tenant's texts for which `is_left` returns True.

    Skip texts that would then have no source, or only the source `LEARNT`. Return the texts that
    are not skipped. `model` is the digest of model and tenant.
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
    """Return the distinct sources in the given order, except that `LEARNT` comes last."""
    return tuple(sorted(dict.fromkeys(sources), key=lambda source: source == LEARNT))


def gc(store: KVStore) -> dict[str, tuple[int, int]]:
    """Delete expired entries. Return {tier: (number deleted, bytes)} for all tiers that respond.

    Remote tiers expire entries by themselves, so nothing is deleted there.
    """
    freed = dict[str, tuple[int, int]]()
    for tier in store.tiers:
        entries = tier.stat([] if tier.remote else store.too_old(tier.list()))
        old = store.too_old(entries.values())  # an entry may have been used since the listing
        nbytes = sum(entries[key].nbytes for key in old)
        n_deleted = tier.delete(old)
        if tier.answers:
            freed[tier.name] = n_deleted, nbytes if n_deleted else 0
    return freed
