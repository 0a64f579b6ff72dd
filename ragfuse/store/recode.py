"""Entries kept at other codec levels from now on, each where it is. Which ones is not asked here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragfuse.codec import RAW
from ragfuse.store.bulk import Outcome, OutcomeBuilder, Progress
from ragfuse.store.levels import by_loss, joined
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Tier, Whole
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Place = tuple[str, ChunkKey]
"""An entry by the name of its tier, and its key."""


def recode(store: KVStore, places: Iterable[Place], levels: Sequence[str], progress: Progress | None = None) -> Outcome:
    """Keep these entries at just these levels. What an entry has already is taken as it is, all else encoded from raw.

    An entry that is kept raw in another tier may come from there. One that is raw nowhere stays as it was, which is
    told: what was lost does not come back, and nothing lossy is encoded again. Stopped at any moment, each entry is
    whole: as before, or recoded.
    """
    wanted, tally = by_loss(levels), OutcomeBuilder()
    known = _known(store, places)
    done, total = 0, sum(entry.nbytes for entry in known.values())
    for (name, key), entry in known.items():
        if tuple(entry.sizes) == wanted:
            tally.known += 1
        elif why := _recoded(store, store.tier(name), entry, wanted, tally):
            tally.fail(f"{key} in tier {name}", why)
        done += entry.nbytes
        if progress is not None:
            progress(done, total)
    return tally.outcome()


def _known(store: KVStore, places: Iterable[Place]) -> dict[Place, Entry]:
    """The entries that are there, used longest ago first: so that their order stays."""
    wanted: dict[str, list[ChunkKey]] = {}
    for name, key in places:
        wanted.setdefault(name, []).append(key)
    found = [entry for name, keys in wanted.items() for entry in store.tier(name).entries(keys).values()]
    return {(entry.tier, entry.key): entry for entry in sorted(found, key=lambda entry: entry.last_used)}


def _recoded(store: KVStore, tier: Tier, entry: Entry, wanted: Sequence[str], tally: OutcomeBuilder) -> str | None:
    """Write one entry anew; why it stays as it was, None if it does not."""
    own = store.whole_in(tier, entry)
    if own is None:
        return "it is not there any more, or cannot be read"
    source = own if RAW.name in own[0].levels or set(wanted) <= set(own[0].levels) else _raw(store, own, entry.key)
    try:
        made = joined([store.levels.at(entry.key, own if _has(own, level) else source, level) for level in wanted])
    except ValueError as error:
        return str(error)
    if not store.write_whole(entry.key, *made, tier):
        return f"tier {tier.name} has no room for it beside what it has, or does not take it"
    now = tier.entries([entry.key]).get(entry.key)
    tally.took((tier.name, entry.key), now.nbytes if now is not None else made[0].nbytes, entry.nbytes)
    return None


def _has(whole: Whole, level: str) -> bool:
    return level in whole[0].levels


def _raw(store: KVStore, own: Whole, key: ChunkKey) -> Whole:
    """The chunk as it is kept raw in another tier; `own` where it is raw in none."""
    other = store.read_whole(key)
    return other if other is not None and _has(other, RAW.name) and other[0].n_tokens == own[0].n_tokens else own
