"""Change the codec levels of stored entries, each in its own tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragfuse.codec import RAW
from ragfuse.store.bulk import Outcome, OutcomeBuilder, Progress
from ragfuse.store.levels import by_loss, joined
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Tier, Whole
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Location = tuple[str, ChunkKey]
"""An entry: the name of its tier, and its key."""


def recode(
    store: KVStore, locations: Iterable[Location], levels: Sequence[str], progress: Progress | None = None
) -> Outcome:
    """Store entries at exactly these levels: levels that an entry has are kept, others encoded from raw.

    The raw level may come from another tier. An entry without a raw level anywhere stays as it was and is reported: a
    lossy level is never the source of another. If this is interrupted, each entry is whole, as before or recoded.

    Args:
        store: The store.
        locations: The entries.
        levels: The codec levels.
        progress: Called with the bytes done and in all.
    """
    wanted, tally = by_loss(levels), OutcomeBuilder()
    entries = _known(store, locations)
    done, total = 0, sum(entry.nbytes for entry in entries.values())
    for (name, key), entry in entries.items():
        if tuple(entry.sizes) == wanted:
            tally.known += 1
        elif why := _recoded(store, store.tier(name), entry, wanted, tally):
            tally.fail(f"{key} in tier {name}", why)
        done += entry.nbytes
        if progress is not None:
            progress(done, total)
    return tally.outcome()


def _known(store: KVStore, locations: Iterable[Location]) -> dict[Location, Entry]:
    """Return the entries that exist, least recently used first, so that rewriting keeps their order of use."""
    wanted: dict[str, list[ChunkKey]] = {}
    for name, key in locations:
        wanted.setdefault(name, []).append(key)
    found = [entry for name, keys in wanted.items() for entry in store.tier(name).entries(keys).values()]
    return {(entry.tier, entry.key): entry for entry in sorted(found, key=lambda entry: entry.last_used)}


def _recoded(store: KVStore, tier: Tier, entry: Entry, wanted: Sequence[str], tally: OutcomeBuilder) -> str | None:
    """Rewrite one entry; return None if that worked, else the reason why it stays as it was."""
    whole = store.whole_in(tier, entry)
    if whole is None:
        return "it is no longer stored, or cannot be read"
    source = (
        whole if RAW.name in whole[0].levels or set(wanted) <= set(whole[0].levels) else _raw(store, whole, entry.key)
    )
    try:
        recoded = joined(
            [store.levels.at(entry.key, whole if _has(whole, level) else source, level) for level in wanted]
        )
    except ValueError as error:
        return str(error)
    if not store.write_whole(entry.key, *recoded, tier):
        return f"tier {tier.name} has no space for it, or did not accept it"
    stored = tier.entries([entry.key]).get(entry.key)
    tally.add((tier.name, entry.key), stored.nbytes if stored is not None else recoded[0].nbytes, entry.nbytes)
    return None


def _has(whole: Whole, level: str) -> bool:
    return level in whole[0].levels


def _raw(store: KVStore, whole: Whole, key: ChunkKey) -> Whole:
    """Return the chunk's raw copy from any tier, or `whole` if there is none."""
    other = store.read_whole(key)
    return other if other is not None and _has(other, RAW.name) and other[0].n_tokens == whole[0].n_tokens else whole
