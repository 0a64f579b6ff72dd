"""What is read and what computed for one prompt. Decisions only: nothing here reads a clock, a file or a tensor."""

from __future__ import annotations

from collections.abc import Mapping

from ragfuse.core import ChunkKey, Entry, Fetch, LoadPlan, Prompt, token_digest

AUTO = "auto"
"""The policy that is chosen by what the store holds."""
MEASURED = ("hkvd", 0.15)
"""Policy and ratio for chunks that saw no other text before themselves, and for models that are not calibrated
(CacheBlend 4.3)."""


def plan(
    prompt: Prompt,
    entries: Mapping[ChunkKey, Entry],
    policy: str = AUTO,
    ratio: float | None = None,
    lost: frozenset[int] = frozenset(),
    choice: tuple[str, float] | None = None,
) -> LoadPlan:
    """Reads every segment that is in the store, under its best key; `lost` ones were there and could not be read.

    ratio: None for what was measured to be enough: 0.15, or what `choice` says. choice: policy and ratio that this
    model's calibration chose, for `auto` over chunks that were encoded amid other text.
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
    all_amid = bool(blended) and all(f.key.encoded == "amid" for f in blended)
    settled = settle(policy, ratio, choice if all_amid else None)
    return LoadPlan(prompt, settled[1], settled[0], tuple(fetches), tuple(misses))


def settle(policy: str, ratio: float | None, choice: tuple[str, float] | None = None) -> tuple[str, float]:
    """Policy and ratio of one prompt; choice: what `auto` takes, None for the conservative `MEASURED`."""
    chosen = choice if choice is not None and policy == AUTO else MEASURED
    return chosen[0] if policy == AUTO else policy, chosen[1] if ratio is None else ratio


def is_exact(prompt: Prompt, fetch: Fetch) -> bool:
    """Whether a fetched segment attended to just what stands before it here: then its KV is full prefill's own."""
    lo, start = prompt.spans[fetch.segment][0], prompt.segments[fetch.segment].start
    if not lo or not fetch.key.context:
        return not lo and not fetch.key.context
    gapless = start - lo == prompt.segments[0].start
    return gapless and fetch.key.context == token_digest(prompt.token_ids[:lo])
