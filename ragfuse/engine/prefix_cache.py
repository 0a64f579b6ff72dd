"""Prefix caching: the longest beginning that a prompt shares with an earlier one is read, not computed.

Unlike fused chunks, these are exact: an entry is made only of rows that full prefill would give, too, and is used at
the positions that it was computed at. Entries are kept in memory alone and evicted with everything else there.
Conversations keep rows of their own, blended ones too (`history.py`); an entry that both need is kept once.
Models with a state that is no KV per token have their whole caches kept instead (`hf.states`).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from ragfuse.engine.runtime import Runtime
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.hf.states import States, TenantStates
from ragfuse.plan.controller import is_exact
from ragfuse.process.fork import at_fork, is_torn
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.radix import RadixTree, Rows
from ragfuse.store.writer import Writers
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.prompt import Prompt, Segment

log = logging.getLogger("ragfuse.engine")

PREFIX_SAVE_WAIT_S = 5.0
"""Seconds that a prompt waits, at most, for a beginning that it shares and that is being saved, while it waits for the
model anyway."""
HELD_S = 0.25
"""The same of a prompt that may hold the model meanwhile, so that others wait for it."""
MAX_BEFORE = 4096
"""Tokens before a first chunk, at most, for it to be encoded behind them: they are computed again for that."""
SWEEP_NODES = 256
"""Nodes of a tree after which entries that are gone are looked for, and again whenever it has doubled."""


RowsOf = Callable[[int, int], ChunkKV]
"""KV of a prompt's tokens lo:hi."""


@dataclass
class _Tenant:
    """What is known of one tenant's prompts."""

    tree: RadixTree = field(default_factory=RadixTree)
    sweep_at: int = SWEEP_NODES

    def n_known(self, token_ids: Sequence[int]) -> int:
        """Tokens that the ids begin with and whose entries follow each other without a gap."""
        chain = _chained(self.tree.match(token_ids))
        return chain[-1].hi if chain else 0


class PrefixCache:
    """The beginnings of one engine's prompts. Thread-safe."""

    def __init__(self, settings: Settings, runtime: Runtime, store: KVStore) -> None:
        self._settings, self._runtime, self._store = settings, runtime, store
        self._fast = [tier.name for tier in store.tiers if not tier.slow]
        self._changed = threading.Condition()
        self._tenants = defaultdict[str, _Tenant](_Tenant)
        self._writer = Writers(["prefix"], settings.writer_queue)
        self._waiting, self._waiting_bytes = set[ChunkKey](), 0
        self._states = States(settings.memory_bytes)
        at_fork(self)

    def renew(self) -> None:
        """Nothing is being saved; what was known is known, unless it was being changed."""
        if is_torn(self._changed):
            self._tenants = defaultdict[str, _Tenant](_Tenant)
        self._changed = threading.Condition()
        self._waiting, self._waiting_bytes = set[ChunkKey](), 0

    @property
    def is_on(self) -> bool:
        """Whether there is memory to keep anything in, and it is wanted."""
        return self._settings.prefix_cache and bool(self._fast)

    @property
    def _is_lossless(self) -> bool:
        """Whether memory keeps what others put there at full precision."""
        return LEVEL_NAMES[0] in self._store.levels.of(self._fast[-1])

    def placed(self, prompt: Prompt) -> Prompt:
        """The prompt with all that it shares with an earlier one as segments of kind "prefix".

        What is known of its conversation stays as it is, and so does the last token: it is always computed.
        """
        if not self.is_on or not _is_plain(prompt):
            return prompt
        n_past = _n_history(prompt)
        with self._changed:
            tree = self._tenants[self._runtime.encoder.digest].tree
            found = [each.cut(n_past, len(prompt) - 1) for each in tree.match(prompt.token_ids) if each.hi > n_past]
            found = [each for each in found if each.hi - each.lo > 0]
            keys = {each.key for each in found}
            self._changed.wait_for(lambda: not keys & self._waiting, HELD_S)
        there = self._store.lookup(keys, counts=False) if keys else {}
        if gone := keys - set(there):
            with self._changed:
                tree.discard(gone - self._waiting)
        # A conversation's entries may be kept in fewer bits elsewhere: what was read so would not be exact.
        found = [each for each in found if each.key in there and LEVEL_NAMES[0] in there[each.key].sizes]
        return replace(prompt, segments=tuple(_with(prompt, found))) if found else prompt

    def kept(self) -> TenantStates | None:
        """What is kept of prompts of a model with a state that is no KV per token; None where nothing is to be."""
        if not self.is_on:
            return None
        return TenantStates(self._states, self._runtime.encoder.digest, self._settings.min_chunk_tokens)

    def settle(self, prompt: Prompt) -> None:
        """Wait for what is being saved of the prompt's beginning, `PREFIX_SAVE_WAIT_S` at most."""
        if self.is_on and _is_plain(prompt):
            with self._changed:
                keys = {each.key for each in self._tenants[self._runtime.encoder.digest].tree.match(prompt.token_ids)}
                self._changed.wait_for(lambda: not keys & self._waiting, PREFIX_SAVE_WAIT_S)

    def begin(self, ready: PreparedPrompt) -> None:
        """Save what is exact of a prompt that is prefilled and not known yet, while its answer is written.

        What its conversation saves of it is known by then (`expect`) and not saved twice. A failure is logged, and
        costs nothing but the reuse.
        """
        with _logged():
            if not self._can_save(ready):
                return
            prompt, n_exact, least = ready.plan.prompt, exact_rows(ready), self._settings.min_chunk_tokens
            ids = prompt.token_ids
            parts = list(_parts(ready, n_exact))
            n_known = self._n_known(ids[:n_exact])
            runs = ((max(lo, n_known), hi) for lo, hi in _computed(parts, n_exact))
            # A short end waits for what follows it, unless that is the first chunk: `missing_beginning` wants all
            # before it.
            ends = {n_exact} - {prompt.first_chunk}
            runs = ((lo, hi) for lo, hi in runs if hi - lo >= (least if hi in ends else 1))
            made = [self._entry(ids, lo, hi) for lo, hi in runs]
            if made or parts:
                kv = ready.prefill.kv
                self._save(ids, [*parts, *made], made, lambda lo, hi: _rows(kv, lo, hi), kv.nbytes if made else 0)

    def after(self, ready: PreparedPrompt, written: Sequence[int]) -> None:
        """Save the KV of an answer, too, written as these ids behind a prompt that is exact.

        A failure is logged, and costs nothing but the reuse.
        """
        with _logged():
            n_prompt, n_rows = len(ready.plan.prompt), ready.n_held(len(written))
            if not self._can_save(ready) or exact_rows(ready) < n_prompt:
                return
            ids = (*ready.plan.prompt.token_ids, *written)[:n_rows]
            lo = self._n_known(ids)
            if n_rows - lo >= self._settings.min_chunk_tokens:
                made = self._entry(ids, lo, n_rows)
                kv = _rows(ready.prefill.rows(lo, n_rows), 0, n_rows - lo)
                self._save(ids, [made], [made], lambda lo, hi: kv, kv.nbytes)

    def missing_beginning(self, ready: PreparedPrompt) -> tuple[Sequence[int], int]:
        """What an answered prompt begins with, to the end of its first chunk, where that was blended: its ids, and how
        many of them are exact. No ids where nothing is lacking.

        The first chunk stands where nothing but the beginning stands before it, so it can be exact the next time: what
        it costs to blend it is most of what blending costs.
        """
        n_exact, prompt = exact_rows(ready), ready.plan.prompt
        for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
            is_first = 0 < lo == n_exact == prompt.first_chunk and segment.kind == "chunk"
            if is_first and lo <= MAX_BEFORE and hi - lo >= self._settings.min_chunk_tokens and self._can_save(ready):
                return prompt.token_ids[:hi], lo
        return (), 0

    def extend(self, token_ids: Sequence[int], n_exact: int) -> None:
        """Encode what follows a beginning that is known, and know it too."""
        encoder, tier = self._runtime.encoder, self._fast[-1]
        before, run = token_ids[:n_exact], token_ids[n_exact:]
        with self._changed:
            known = self._tenants[encoder.digest].tree.match(before)
        if not known or _chained(known)[-1:] != known[-1:] or known[-1].hi < n_exact:
            return  # nothing would lead to it
        key = encoder.key(run, token_digest(before))
        if not self._store.lookup([key], counts=False):
            kv = encoder.model.encode(run, before)
            self._store.put(key, kv, tier=tier, levels={tier: LEVEL_NAMES[:1]})
        self.note(token_ids, n_exact, key)

    def note(self, token_ids: Sequence[int], lo: int, key: ChunkKey) -> None:
        """Know that tokens from `lo` on are kept under `key`, at positions from 0 on."""
        if self.is_on:
            with self._changed:
                self._insert(token_ids, [Rows(lo, len(token_ids), key, 0, lo)])
            self._sweep_later()

    def expect(self, token_ids: Sequence[int], lo: int, key: ChunkKey) -> None:
        """The same of what a conversation is about to keep: a prompt that shares it waits until it is `saved`.

        Where memory keeps it in fewer bits, it is not exact and not known here.
        """
        if self.is_on and self._is_lossless:
            with self._changed:
                self._waiting.add(key)
            self.note(token_ids, lo, key)

    def saved(self, keys: Iterable[ChunkKey]) -> None:
        """What was expected is kept now, or will not be."""
        with self._changed:
            self._waiting.difference_update(keys)
            self._changed.notify_all()

    def forget(self, runs: Collection[Sequence[int]]) -> None:
        """Drop all beginnings that hold one of these runs of tokens, from there on."""
        self._states.forget(self._runtime.encoder.digest, runs)
        with self._changed:
            tree = self._tenants[self._runtime.encoder.digest].tree
            keys = set().union(*map(tree.holding, runs)) if runs else set()
            tree.discard(keys)
            self._changed.wait_for(lambda: not keys & self._waiting, PREFIX_SAVE_WAIT_S)
        self._store.forget(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was computed is saved; False if that took too long."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Save what waits, or as much of it as `timeout_s` allows, and take no more."""
        self._states.clear()
        self._writer.close(timeout_s)

    def _can_save(self, ready: PreparedPrompt) -> bool:
        profile = self._runtime.encoder.model.profile
        movable = not profile.refusal or profile.fixed
        return self.is_on and movable and ready.prefill.cache is not None and _is_plain(ready.plan.prompt)

    def _entry(self, token_ids: Sequence[int], lo: int, hi: int) -> Rows:
        """Tokens lo:hi as an entry of their own, whose keys stay at the positions that they were computed at.

        A beginning has the key of a conversation's, unless those lose bits in memory.
        """
        context = token_digest(token_ids[:lo]) if lo else ""
        layout = "" if not lo and self._is_lossless else f"at{lo}"
        key = replace(self._runtime.encoder.key(token_ids[lo:hi], context), layout=layout)
        return Rows(lo, hi, key)

    def _n_known(self, token_ids: Sequence[int]) -> int:
        with self._changed:
            return self._tenants[self._runtime.encoder.digest].n_known(token_ids)

    def _insert(self, token_ids: Sequence[int], parts: Sequence[Rows]) -> set[ChunkKey]:
        """Take the parts into the tree, under the lock; the keys that a node has from now on.

        Parts that do not follow what is known are left out: their beginning is not kept.
        """
        tree = self._tenants[self._runtime.encoder.digest].tree
        known = [each for each in tree.match(token_ids) if each.hi <= min(part.lo for part in parts)]
        return tree.insert(token_ids, _chained([*known, *parts]))

    def _sweep_later(self) -> None:
        """Look in the background for entries that were evicted, where the tree has doubled since the last time."""
        with self._changed:
            tenant = self._tenants[self._runtime.encoder.digest]
            if tenant.tree.n_nodes < tenant.sweep_at:
                return
            tenant.sweep_at = 2 * tenant.tree.n_nodes
        self._writer.submit("prefix", partial(self._sweep, tenant), counts=False)

    def _sweep(self, tenant: _Tenant) -> None:
        with self._changed:
            keys = tenant.tree.keys - self._waiting
        gone = keys - set(self._store.lookup(keys, counts=False))
        with self._changed:
            tenant.tree.discard(gone)
            tenant.sweep_at = max(SWEEP_NODES, 2 * tenant.tree.n_nodes)

    def _save(self, ids: Sequence[int], parts: Sequence[Rows], made: Sequence[Rows], rows: RowsOf, held: int) -> None:
        """Know all parts from now on, and save those of `made` that were not known in the background.

        rows: gives KV of the tokens lo:hi. held: bytes that stay in memory until they are saved.
        """
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + held > self._settings.history_buffer_bytes:
                return
            taken = self._insert(ids, sorted(parts, key=lambda part: part.lo))
            made = [each for each in made if each.key in taken]
            self._waiting |= {each.key for each in made}
            self._waiting_bytes += held
        self._sweep_later()
        if not made or not self._writer.submit("prefix", partial(self._write, rows, made, held)):
            self._done(made, held)

    def _write(self, rows: RowsOf, made: Sequence[Rows], held: int) -> None:
        tier = self._fast[-1]
        try:
            for each in made:
                if not self._store.lookup([each.key], counts=False):
                    self._store.put(each.key, rows(each.lo, each.hi), tier=tier, levels={tier: LEVEL_NAMES[:1]})
        finally:
            self._done(made, held)

    def _done(self, made: Sequence[Rows], held: int) -> None:
        with self._changed:
            self._waiting -= {each.key for each in made}
            self._waiting_bytes -= held
            self._changed.notify_all()


def exact_rows(ready: PreparedPrompt) -> int:
    """How many rows a prompt begins with that are full prefill's own: up to the first that is blended or lossy."""
    plan = ready.plan
    lossy = (f.segment for f in plan.fetches if f.level != LEVEL_NAMES[0] or not is_exact(plan.prompt, f))
    first = min(lossy, default=None)
    return len(plan.prompt) if first is None else plan.prompt.spans[first][0]


def _parts(ready: PreparedPrompt, n_exact: int) -> Iterator[Rows]:
    """What a prompt read of its exact beginning."""
    prompt = ready.plan.prompt
    for fetch in sorted(ready.plan.fetches, key=lambda fetch: fetch.segment):
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        if hi <= n_exact:
            yield Rows(lo, hi, fetch.key, (segment.rows or (0, 0))[0], segment.shift)


def _computed(parts: Sequence[Rows], n_exact: int) -> Iterator[tuple[int, int]]:
    """Rows of an exact beginning that were not read, as lo:hi."""
    at = 0
    for part in parts:
        if at < part.lo:
            yield at, part.lo
        at = part.hi
    if at < n_exact:
        yield at, n_exact


def _chained(parts: Sequence[Rows]) -> list[Rows]:
    """Parts as far as each follows the one before, from 0 on."""
    chain: list[Rows] = []
    for part in parts:
        if part.lo != (chain[-1].hi if chain else 0):
            break
        chain.append(part)
    return chain


def _rows(kv: ChunkKV, lo: int, hi: int) -> ChunkKV:
    """A copy of rows that shares nothing with the prompt's."""
    return ChunkKV(tuple(LayerKV(each.keys[:, lo:hi].clone(), each.values[:, lo:hi].clone()) for each in kv.layers))


@contextmanager
def _logged() -> Iterator[None]:
    """Let no failure to save through to the answer."""
    try:
        yield
    except Exception as error:
        log.warning("A prompt's beginning was not kept for the next prompt: %s", error)
        log.debug("Where it failed", exc_info=True)


def _is_plain(prompt: Prompt) -> bool:
    """Whether its tokens stand at 0, 1, 2 ... as in any other prompt."""
    return prompt.taken is None and prompt.segments[-1].stop == len(prompt)


def _n_history(prompt: Prompt) -> int:
    """Rows of what it goes on with."""
    placed = zip(prompt.segments, prompt.spans, strict=True)
    return max((hi for segment, (_, hi) in placed if segment.kind == "history"), default=0)


def _with(prompt: Prompt, found: Sequence[Rows]) -> Iterator[Segment]:
    """A prompt's segments with others in place of the tokens that were found."""
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
    """Tokens lo:hi of a segment."""
    if (lo, hi) == (0, len(segment.tokens)):
        return segment
    first = (segment.rows or (0, 0))[0]
    rows, stored = ((first + lo, first + hi), segment.stored or segment.tokens) if segment.keys else (None, ())
    return replace(segment, tokens=segment.tokens[lo:hi], start=segment.start + lo, rows=rows, stored=stored)
