"""What is read and what computed for one prompt. Decisions only: nothing here reads a clock, a file or a tensor."""

from __future__ import annotations

from collections.abc import Mapping

from ragfuse.core import ChunkKey, Entry, Fetch, LoadPlan, Prompt, token_digest

AUTO = "auto"
"""The policy that is chosen by what the store holds."""
MEASURED = ("hkvd", 0.15)
"""Policy and ratio for chunks that saw no other text before themselves (CacheBlend 4.3)."""
AMID = ("lego", 0.06)
"""Policy and ratio where all chunks were encoded amid their documents: what is left to mend stands at their beginnings,
and no layer need be computed in full to find it."""


def plan(
    prompt: Prompt,
    entries: Mapping[ChunkKey, Entry],
    policy: str = AUTO,
    ratio: float | None = None,
    lost: frozenset[int] = frozenset(),
) -> LoadPlan:
    """Reads every segment that is in the store, under its best key; `lost` ones were there and could not be read.

    ratio: None for what was measured to be enough: 0.15, or less where `auto` may choose.
    """
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
    blended = [f for f in fetches if prompt.segments[f.segment].kind == "chunk" and not is_exact(prompt, f)]
    settled = settle(policy, ratio, bool(blended) and all(f.key.encoded == "amid" for f in blended))
    return LoadPlan(prompt, settled[1], settled[0], tuple(fetches), tuple(misses))


def settle(policy: str, ratio: float | None, all_amid: bool = False) -> tuple[str, float]:
    """Policy and ratio of one prompt; all_amid: every chunk that is blended was encoded amid its document."""
    chosen = AMID if all_amid and policy == AUTO else MEASURED
    return chosen[0] if policy == AUTO else policy, chosen[1] if ratio is None else ratio


def is_exact(prompt: Prompt, fetch: Fetch) -> bool:
    """Whether a fetched segment attended to just what stands before it here: then its KV is full prefill's own."""
    lo, start = prompt.spans[fetch.segment][0], prompt.segments[fetch.segment].start
    if not lo or not fetch.key.context:
        return not lo and not fetch.key.context
    gapless = start - lo == prompt.segments[0].start
    return gapless and fetch.key.context == token_digest(prompt.token_ids[:lo])
