"""What is read and what computed for one prompt. Decisions only: nothing here reads a clock, a file or a tensor."""

from __future__ import annotations

from collections.abc import Mapping

from ragfuse.core import ChunkKey, Entry, Fetch, LoadPlan, Prompt, token_digest


def plan(
    prompt: Prompt, entries: Mapping[ChunkKey, Entry], policy: str, ratio: float, lost: frozenset[int] = frozenset()
) -> LoadPlan:
    """Reads every segment that is in the store, under its best key; `lost` ones were there and could not be read."""
    fetches, misses = [], []
    for index, segment in enumerate(prompt.segments):
        if segment.kind == "fresh":
            continue
        entry = next((entries[key] for key in segment.keys if key in entries), None)
        if index in lost:
            misses.append((index, "its entry could not be read"))
        elif entry is None:
            misses.append((index, "not in the store"))
        elif entry.n_tokens != len(segment.tokens):
            misses.append((index, f"its entry holds {entry.n_tokens} tokens"))
        else:
            level, nbytes = next(iter(entry.sizes.items()))
            fetches.append(Fetch(index, entry.key, entry.tier, level, nbytes))
    return LoadPlan(prompt, ratio, policy, tuple(fetches), tuple(misses))


def is_exact(prompt: Prompt, fetch: Fetch) -> bool:
    """Whether a fetched segment attended to just what stands before it here: then its KV is full prefill's own."""
    lo, start = prompt.spans[fetch.segment][0], prompt.segments[fetch.segment].start
    if not lo or not fetch.key.context:
        return not lo and not fetch.key.context
    gapless = start - lo == prompt.segments[0].start
    return gapless and fetch.key.context == token_digest(prompt.token_ids[:lo])
