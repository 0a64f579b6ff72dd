"""The prefix cache: the KV of the longest prefix that a prompt shares with an earlier one is read, not computed.

Unlike fused chunks, prefixes are exact: an entry has only rows that a full prefill would give too, and is used at the
positions at which it was computed. Entries are kept in memory only and evicted like everything else there.
Conversations keep KV of their own, blended rows included (`history.py`); an entry that both need is stored once.
Models whose state is not KV per token (such as recurrent ones) have their whole state kept instead (`hf.kept_states`).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from ragfuse.engine.pending_saves import PendingSaves
from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.runtime import Runtime
from ragfuse.hf.kept_states import States, TenantStates
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.radix import RadixTree, Rows
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import is_exact
from ragfuse.types.prompt import Prompt, Segment

log = logging.getLogger("ragfuse.engine")

PREFIX_SAVE_WAIT_S = 5.0
"""Longest time in seconds that a prompt waits for a shared prefix that is being saved, while another prompt uses the
model anyway."""
MAX_BEFORE = 4096
"""Most tokens before a first chunk for it to be encoded after them: they are recomputed for that."""
SWEEP_NODES = 256
"""Tree nodes at which evicted entries are first removed from the tree; again each time it has doubled in size."""


RowsOf = Callable[[int, int], ChunkKV]
"""Returns the KV of a prompt's tokens lo:hi."""


@dataclass
class _Tenant:
    """The known prefixes of one tenant's prompts."""

    tree: RadixTree = field(default_factory=RadixTree)
    sweep_at: int = SWEEP_NODES

    def n_known(self, token_ids: Sequence[int]) -> int:
        """Return how many of the first ids are covered by entries without a gap."""
        chain = _chained(self.tree.match(token_ids))
        return chain[-1].hi if chain else 0


class PrefixCache:
    """The prefix cache of one engine: a radix tree of token ids per tenant, with entries in the store. Thread-safe.

    Args:
        settings: Whether it is on, the shortest run worth an entry, and sizes.
        runtime: The model and its encoder.
        store: Where entries are kept, in its last fast tier.
        pending: Saves in the background.
    """

    def __init__(self, settings: Settings, runtime: Runtime, store: KVStore, pending: PendingSaves) -> None:
        self._settings, self._runtime, self._store = settings, runtime, store
        self._fast = [tier.name for tier in store.tiers if not tier.slow]
        self._changed = threading.Condition()
        self._tenants = defaultdict[str, _Tenant](_Tenant)
        self._pending = pending
        self._computed = list[tuple[int, ...]]()  # prompts that are planned and not prefilled yet
        self._states = States(settings.memory_bytes)

    @property
    def is_on(self) -> bool:
        """Whether prefix caching is enabled and there is a memory tier for it."""
        return self._settings.prefix_cache and bool(self._fast)

    @property
    def _is_lossless(self) -> bool:
        """Whether the memory tier stores all KV losslessly, that of conversations too."""
        return LEVEL_NAMES[0] in self._store.levels.of(self._fast[-1])

    def placed(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the prefix it shares with earlier prompts as segments of kind "prefix".

        History segments stay, and so does the last token, which is always computed.
        """
        if not self.is_on or not _is_plain(prompt):
            return prompt
        n_past = _n_history(prompt)
        with self._changed:
            tree = self._tenants[self._runtime.encoder.digest].tree
            found = [each.cut(n_past, len(prompt) - 1) for each in tree.match(prompt.token_ids) if each.hi > n_past]
            found = [each for each in found if each.hi - each.lo > 0]
            keys = {each.key for each in found}
        entries = self._store.lookup(keys) if keys else {}
        if evicted := keys - set(entries):
            with self._changed:
                tree.discard(evicted - self._pending.among(evicted))
        # Entries of conversations may exist at lossy levels only, and would not be exact.
        found = [each for each in found if each.key in entries and LEVEL_NAMES[0] in entries[each.key].sizes]
        return replace(prompt, segments=tuple(_with(prompt, found))) if found else prompt

    def kept_states(self) -> TenantStates | None:
        """Return the kept states of a model whose cache is not KV per token; None where prefix caching is off."""
        if not self.is_on:
            return None
        return TenantStates(self._states, self._runtime.encoder.digest, self._settings.min_chunk_tokens)

    @contextmanager
    def turn(self, prompt: Prompt) -> Iterator[None]:
        """Wait for what other prompts are about to save of this one's beginning, and let such prompts wait for it.

        Saves are waited for at most `PREFIX_SAVE_WAIT_S` seconds, prefills until they are over.
        """
        if not self.is_on or not _is_plain(prompt):
            yield
            return
        ids, tree = prompt.token_ids, self._tenants[self._runtime.encoder.digest].tree

        def shares() -> bool:
            at = self._n_known(ids) + self._settings.min_chunk_tokens
            return at < len(ids) and any(ids[:at] == other[:at] for other in self._computed)

        with self._changed:
            self._changed.wait_for(lambda: not shares())
            self._computed.append(ids)
            keys = {each.key for each in tree.match(ids)}
        try:
            self._pending.wait(keys, PREFIX_SAVE_WAIT_S)
            yield
        finally:
            with self._changed:
                self._computed.remove(ids)
                self._changed.notify_all()

    def begin(self, ready: PreparedPrompt) -> None:
        """Start saving the exact rows of a prefilled prompt that are not cached yet, while its answer is generated.

        Rows that its conversation saves are known already (`note_raw`) and not saved twice.
        """
        if not self._can_save(ready):
            return
        prompt, n_exact, min_tokens = ready.plan.prompt, exact_rows(ready), self._settings.min_chunk_tokens
        ids = prompt.token_ids
        parts = list(_parts(ready, n_exact))
        n_known = self._n_known(ids[:n_exact])
        runs = ((max(lo, n_known), hi) for lo, hi in _computed(parts, n_exact))
        # A short last run is not saved, as a later prompt may extend it. It is saved where the first chunk follows,
        # since `prefix_to_encode` needs every row before that chunk.
        ends = {n_exact} - {prompt.first_chunk}
        runs = ((lo, hi) for lo, hi in runs if hi - lo >= (min_tokens if hi in ends else 1))
        new = [self._entry(ids, lo, hi) for lo, hi in runs]
        if new or parts:
            kv = ready.prefill.kv
            self._save(ids, [*parts, *new], new, lambda lo, hi: _rows(kv, lo, hi), kv.nbytes if new else 0)

    def after(self, ready: PreparedPrompt, written: Sequence[int]) -> None:
        """Save the KV of an answer, generated as the ids `written`, where its whole prompt is exact."""
        n_prompt, n_rows = len(ready.plan.prompt), ready.n_held(len(written))
        if not self._can_save(ready) or exact_rows(ready) < n_prompt:
            return
        ids = (*ready.plan.prompt.token_ids, *written)[:n_rows]
        lo = self._n_known(ids)
        if n_rows - lo >= self._settings.min_chunk_tokens:
            new = self._entry(ids, lo, n_rows)
            kv = _rows(ready.prefill.rows(lo, n_rows), 0, n_rows - lo)
            self._save(ids, [new], [new], lambda lo, hi: kv, kv.nbytes)

    def prefix_to_encode(self, ready: PreparedPrompt) -> tuple[Sequence[int], int]:
        """Return the prefix to encode in the background so that the prompt's first chunk is exact the next time.

        Only the prefix stands before the first chunk, so its exact KV serves every prompt with both. Blending the first
        chunk is most of the cost of blending.

        Returns:
            The prompt's ids up to the end of its first chunk, and how many of them are exact already. No ids where the
            first chunk was not blended, or where what is before it was computed: it may be another one each time.
        """
        n_exact, prompt = exact_rows(ready), ready.plan.prompt
        for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
            is_first = 0 < lo == n_exact == prompt.first_chunk and segment.kind == "chunk"
            if is_first and lo <= MAX_BEFORE and hi - lo >= self._settings.min_chunk_tokens and self._can_save(ready):
                has_recurred = not any(_computed(list(_parts(ready, n_exact)), n_exact))
                return (prompt.token_ids[:hi], lo) if has_recurred else ((), 0)
        return (), 0

    def extend(self, token_ids: Sequence[int], n_exact: int) -> None:
        """Encode the ids after a cached prefix of `n_exact` tokens, and add them to the cache.

        Does nothing where the prefix is no longer cached.
        """
        encoder, tier = self._runtime.encoder, self._fast[-1]
        before, run = token_ids[:n_exact], token_ids[n_exact:]
        with self._changed:
            known = self._tenants[encoder.digest].tree.match(before)
        if not known or _chained(known)[-1:] != known[-1:] or known[-1].hi < n_exact:
            return  # no match would reach the new entry
        key = encoder.key(run, token_digest(before))
        if not self._store.lookup([key]):
            kv = encoder.model.encode(run, before)
            self._store.put(key, kv, tier=tier, levels={tier: LEVEL_NAMES[:1]})
        self.note(token_ids, n_exact, key)

    def note(self, token_ids: Sequence[int], lo: int, key: ChunkKey) -> None:
        """Add an entry to the tree: the tokens from `lo` on are stored under `key`, at positions from 0 on."""
        if self.is_on:
            with self._changed:
                self._insert(token_ids, [Rows(lo, len(token_ids), key, 0, lo)])
            self._sweep_later()

    def note_raw(self, token_ids: Sequence[int], lo: int, key: ChunkKey) -> None:
        """Add an entry that a conversation is about to store; prompts that share it wait until it is.

        Does nothing where memory stores KV at a lossy level, as the entry would not be exact.
        """
        if self.is_on and self._is_lossless:
            self.note(token_ids, lo, key)

    def forget(self, runs: Collection[Sequence[int]]) -> None:
        """Drop every entry that holds one of these runs of tokens, and the entries that follow it."""
        self._states.forget(self._runtime.encoder.digest, runs)
        with self._changed:
            tree = self._tenants[self._runtime.encoder.digest].tree
            keys = set().union(*map(tree.holding, runs)) if runs else set()
            tree.discard(keys)
        self._pending.wait(keys, PREFIX_SAVE_WAIT_S)
        self._store.forget(keys)

    def close(self) -> None:
        """Release the kept states."""
        self._states.clear()

    def _can_save(self, ready: PreparedPrompt) -> bool:
        profile = self._runtime.encoder.model.profile
        movable = not profile.refusal or profile.fixed
        return self.is_on and movable and ready.prefill.cache is not None and _is_plain(ready.plan.prompt)

    def _entry(self, token_ids: Sequence[int], lo: int, hi: int) -> Rows:
        """Return tokens lo:hi as a new entry; its KV stays at the positions at which it was computed.

        An entry from token 0 on has the same key as a conversation's, so that it is stored once, unless conversations
        are stored at a lossy level in memory.
        """
        context = token_digest(token_ids[:lo]) if lo else ""
        layout = "" if not lo and self._is_lossless else f"at{lo}"
        key = replace(self._runtime.encoder.key(token_ids[lo:hi], context), layout=layout)
        return Rows(lo, hi, key)

    def _n_known(self, token_ids: Sequence[int]) -> int:
        with self._changed:
            return self._tenants[self._runtime.encoder.digest].n_known(token_ids)

    def _insert(self, token_ids: Sequence[int], parts: Sequence[Rows]) -> set[ChunkKey]:
        """Insert the parts into the tree and return the keys that became nodes. The lock is held.

        Parts that do not directly follow known entries are left out, as no match would reach them.
        """
        tree = self._tenants[self._runtime.encoder.digest].tree
        known = [each for each in tree.match(token_ids) if each.hi <= min(part.lo for part in parts)]
        return tree.insert(token_ids, _chained([*known, *parts]))

    def _sweep_later(self) -> None:
        """Remove evicted entries from the tree in the background if it has doubled in size since the last sweep."""
        with self._changed:
            tenant = self._tenants[self._runtime.encoder.digest]
            if tenant.tree.n_nodes < tenant.sweep_at:
                return
            tenant.sweep_at = 2 * tenant.tree.n_nodes
        self._pending.later(partial(self._sweep, tenant))

    def _sweep(self, tenant: _Tenant) -> None:
        with self._changed:
            keys = tenant.tree.keys
        evicted = keys - self._pending.among(keys) - set(self._store.lookup(keys))
        with self._changed:
            tenant.tree.discard(evicted)
            tenant.sweep_at = max(SWEEP_NODES, 2 * tenant.tree.n_nodes)

    def _save(self, ids: Sequence[int], parts: Sequence[Rows], new: Sequence[Rows], rows: RowsOf, nbytes: int) -> None:
        """Insert all parts into the tree, and save the new ones that became nodes in the background.

        Args:
            ids: The token ids from the prompt's start.
            parts: All entries that cover them.
            new: Those of the parts that are not stored yet.
            rows: Returns the KV of tokens lo:hi.
            nbytes: Bytes that stay in memory until these entries are saved.
        """
        with self._changed:
            inserted = self._insert(ids, sorted(parts, key=lambda part: part.lo))
        new = [each for each in new if each.key in inserted]
        if new:
            self._pending.submit({each.key for each in new}, nbytes, partial(self._write, rows, new))
        self._sweep_later()

    def _write(self, rows: RowsOf, new: Sequence[Rows]) -> None:
        tier = self._fast[-1]
        for each in new:
            if not self._store.lookup([each.key]):
                self._store.put(each.key, rows(each.lo, each.hi), tier=tier, levels={tier: LEVEL_NAMES[:1]})


def exact_rows(ready: PreparedPrompt) -> int:
    """Return how many of a prompt's first rows equal a full prefill's: those before the first blended or lossy one."""
    plan = ready.plan
    lossy = (f.segment for f in plan.fetches if f.level != LEVEL_NAMES[0] or not is_exact(plan.prompt, f))
    first = min(lossy, default=None)
    return len(plan.prompt) if first is None else plan.prompt.spans[first][0]


def _parts(ready: PreparedPrompt, n_exact: int) -> Iterator[Rows]:
    """Yield the entries that were read for a prompt's first `n_exact` rows."""
    prompt = ready.plan.prompt
    for fetch in sorted(ready.plan.fetches, key=lambda fetch: fetch.segment):
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        if hi <= n_exact:
            yield Rows(lo, hi, fetch.key, (segment.rows or (0, 0))[0], segment.shift)


def _computed(parts: Sequence[Rows], n_exact: int) -> Iterator[tuple[int, int]]:
    """Yield the runs lo:hi of the first `n_exact` rows that were computed, not read."""
    at = 0
    for part in parts:
        if at < part.lo:
            yield at, part.lo
        at = part.hi
    if at < n_exact:
        yield at, n_exact


def _chained(parts: Sequence[Rows]) -> list[Rows]:
    """Return the first parts, from row 0 on, up to the first gap."""
    chain: list[Rows] = []
    for part in parts:
        if part.lo != (chain[-1].hi if chain else 0):
            break
        chain.append(part)
    return chain


def _rows(kv: ChunkKV, lo: int, hi: int) -> ChunkKV:
    """Return a copy of rows lo:hi that shares no memory with the prompt's KV."""
    return ChunkKV(tuple(LayerKV(each.keys[:, lo:hi].clone(), each.values[:, lo:hi].clone()) for each in kv.layers))


def _is_plain(prompt: Prompt) -> bool:
    """Return whether the prompt's positions are 0, 1, 2, ..., unlike those of a prompt over a schema."""
    return prompt.schema_use is None and prompt.segments[-1].stop == len(prompt)


def _n_history(prompt: Prompt) -> int:
    """Return how many of a prompt's first rows are conversation history."""
    placed = zip(prompt.segments, prompt.spans, strict=True)
    return max((hi for segment, (_, hi) in placed if segment.kind == "history"), default=0)


def _with(prompt: Prompt, found: Sequence[Rows]) -> Iterator[Segment]:
    """Yield a prompt's segments, with prefix segments in place of the tokens that were found."""
    ends = list(accumulate(len(segment.tokens) for segment in prompt.segments))
    at = 0
    for rows in (*found, None):
        lo = rows.lo if rows is not None else len(prompt)
        for index in range(bisect_right(ends, at), len(ends)):
            begin = ends[index] - len(prompt.segments[index].tokens)
            if max(at, begin) >= lo:
                break
            yield _cut(prompt.segments[index], max(at, begin) - begin, min(lo, ends[index]) - begin)
        if rows is None:
            return
        tokens, span = prompt.token_ids[rows.lo : rows.hi], (rows.row, rows.row + rows.hi - rows.lo)
        start = prompt.segments[0].start + rows.lo
        yield Segment(tokens, start, "prefix", (rows.key,), rows=span, origin=rows.origin)
        at = rows.hi


def _cut(segment: Segment, lo: int, hi: int) -> Segment:
    """Return a segment of tokens lo:hi of a segment."""
    if (lo, hi) == (0, len(segment.tokens)):
        return segment
    first = (segment.rows or (0, 0))[0]
    rows, stored = ((first + lo, first + hi), segment.stored or segment.tokens) if segment.keys else (None, ())
    return replace(segment, tokens=segment.tokens[lo:hi], start=segment.start + lo, rows=rows, stored=stored)
