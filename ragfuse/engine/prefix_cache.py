"""The prefix cache: reuses the KV of a prompt's first tokens from earlier prompts and turns.

KV is found by token ids. Exact rows (KV equal to a full prefill's) are in one radix tree, which is
searched for every prompt. `Session.rows` lists a session's exact rows and private rows. The KV of
private rows depends on blended chunks or a truncated history, so only the session itself may read
private rows. An entry's KV keeps the positions at which it was computed. Entries of the tree are in
memory; entries of sessions are also in slow tiers. All entries can be evicted. For models whose
state is not KV per token, such as recurrent models, the whole state is stored instead
(`hf.kept_states`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch

from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.runtime import PACE_S, Runtime
from ragfuse.hf.kept_states import States
from ragfuse.sessions.session import PendingTurn
from ragfuse.store.radix import RadixTree, Rows, holds, merged
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.keys import ChunkKey, Kind, digest, filler_context, token_digest
from ragfuse.types.kv import ChunkKV, Entry, LayerKV
from ragfuse.types.plan import LoadPlan, is_exact
from ragfuse.types.prompt import Prompt, Segment

PREFIX_SAVE_WAIT_S = 5.0
"""Maximum seconds of waiting for a pending save of a shared prefix."""
MAX_BEFORE = 4096
"""Maximum tokens of a prefix. After a longer prefix, the first chunk is not encoded exactly."""
SWEEP_NODES = 256
"""Evicted entries are removed at this many nodes of the tree, and each time the number doubles."""

Spans = Sequence[tuple[int, int]]
"""Ranges lo:hi of a prompt's rows, in order."""


@dataclass(frozen=True)
class _Run:
    """Rows lo:hi of a prompt. `read` is the stored rows, or None if the rows were computed."""

    lo: int
    hi: int
    read: Rows | None = None


class PrefixCache:
    """Finds and saves the KV of prefixes: a radix tree of token ids, with entries in the store.

    Thread-safe.

    Args:
        runtime: Provides the model with its encoder, the store and the queue of saves.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._settings, self._runtime, self._store = runtime.settings, runtime, runtime.store
        self._fast = [tier.name for tier in self._store.tiers if not tier.slow]
        self._changed = threading.Condition()
        self._tree, self._sweep_at = RadixTree(), SWEEP_NODES
        self._pending = runtime.saves
        self._computed = list[tuple[int, ...]]()  # prompts planned but not yet prefilled
        self._states = States(self._settings.memory_bytes, self._settings.min_chunk_tokens)

    @property
    def is_on(self) -> bool:
        """True if prefix caching is enabled and there is a memory tier."""
        return self._settings.prefix_cache and bool(self._fast)

    # before the prefill

    def placed(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its cached prefix as segments of kind "prefix".

        History segments do not change. The final token is always computed.
        """
        if not self.is_on or not _is_plain(prompt):
            return prompt
        placed = zip(prompt.segments, prompt.spans, strict=True)
        n_past = max((hi for segment, (_, hi) in placed if segment.kind == "history"), default=0)
        with self._changed:
            known = self._tree.match(prompt.token_ids)
            found = [each.cut(n_past, len(prompt) - 1) for each in known]
            found = [each for each in found if each.lo < each.hi]
            keys = {each.key for each in found}
        entries = self._stored(keys)
        # Entries of conversations may have only lossy levels, which are not exact.
        found = [
            each
            for each in found
            if each.key in entries and LEVEL_NAMES[0] in entries[each.key].sizes
        ]
        return with_rows(prompt, found, "prefix")

    @property
    def kept_states(self) -> States | None:
        """Kept states of a model whose cache is not KV per token; None if prefix caching is off."""
        return self._states if self.is_on else None

    @contextmanager
    def turn(self, prompt: Prompt) -> Iterator[None]:
        """Wait while another prompt computes or saves the same prefix, then enter the `with` block.

        During the block, other prompts with this prefix wait. The wait for saves takes at most
        `PREFIX_SAVE_WAIT_S` seconds. The wait for prefills has no limit.
        """
        if not self.is_on or not _is_plain(prompt):
            yield
            return
        ids = prompt.token_ids

        def shares() -> bool:
            at = _n_chained(self._tree.match(ids)) + self._settings.min_chunk_tokens
            return at < len(ids) and any(ids[:at] == other[:at] for other in self._computed)

        with self._changed:
            self._changed.wait_for(lambda: not shares())
            self._computed.append(ids)
            keys = {each.key for each in self._tree.match(ids)}
        try:
            self._pending.wait(keys, PREFIX_SAVE_WAIT_S)
            yield
        finally:
            with self._changed:
                self._computed.remove(ids)
                self._changed.notify_all()

    # after the prefill

    def save(self, ready: PreparedPrompt, written: Sequence[int] = ()) -> None:
        """Save a prompt's exact rows to memory, in the background. Skip rows already cached.

        Called before decoding (AttentionStore 3.2.2), and again afterwards for the answer's rows.

        Args:
            ready: The prefilled prompt.
            written: The generated ids; () before decoding.
        """
        prompt, n_exact = ready.plan.prompt, exact_rows(ready.plan)
        if not self.is_on or not self._can_save(ready) or (written and n_exact < len(prompt)):
            return
        n_exact = ready.n_held(len(written)) if written else n_exact
        ids, turn = (*prompt.token_ids, *written), prompt.conversation
        owns = isinstance(turn, PendingTurn) and not written
        with self._changed:
            n_known = 0 if owns else _n_chained(self._tree.match(ids[:n_exact]))
        kept = list[_Run]()
        for run in [_Run(n_known, n_exact)] if written else _runs(ready.plan, owns):
            lo = max(run.lo, n_known)
            # A short run at the end is not saved, because a later prompt may extend it. A short run
            # before the first chunk is saved, since `prefix_to_encode` needs every row there.
            shortest = (
                self._settings.min_chunk_tokens if run.hi == n_exact != prompt.first_chunk else 1
            )
            if run.hi <= n_exact and (run.read or run.hi - lo >= shortest):
                kept.append(run if run.read else _Run(lo, run.hi))
        self._save(ready, ids, kept, n_exact)

    def keep(
        self, ready: PreparedPrompt, turn: PendingTurn, written: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[Rows, ...]]:
        """Save the rows of a prompt and its answer for the next turn of the conversation.

        Other prompts find the exact rows too. Rows whose KV depends on blended chunks, lossy KV or
        a truncated history are saved as one entry. This entry never counts as exact, because its
        key contains a digest of how the prompt was computed.

        Args:
            ready: The prefilled prompt.
            turn: The answered turn.
            written: The answer's ids whose KV is in the cache of `ready`.

        Returns:
            The conversation's token ids, including truncated tokens, and the `Rows` with the KV of
            the tokens that were not truncated.
        """
        if not self._can_save(ready):
            return (), ()
        plan, prompt, encoder = ready.plan, ready.plan.prompt, self._runtime.encoder
        ids, n_exact = (*prompt.token_ids, *written), exact_rows(plan)
        runs = _runs(plan, owns=True)
        if len(written) >= encoder.shortest:
            runs.append(_Run(len(prompt), len(ids)))
        n_exact = len(ids) if n_exact == len(prompt) else n_exact
        parts = merged(
            sorted(self._save(ready, ids, runs, n_exact, turn), key=lambda part: part.lo)
        )
        (row, left_out), placed = turn.left_out, list[Rows]()
        for part in parts:
            for each, by in ((part.cut(0, row), 0), (part.cut(row, part.hi), len(left_out))):
                if each.lo < each.hi:
                    lo, hi, origin = each.lo + by, each.hi + by, each.origin + by
                    placed.append(replace(each, lo=lo, hi=hi, origin=origin))
        return (*ids[:row], *left_out, *ids[row : parts[-1].hi]), tuple(placed)

    def prefix_to_encode(self, ready: PreparedPrompt) -> tuple[tuple[int, ...], int]:
        """Return the ids to encode in the background, so that the first chunk is exact next time.

        Only the prefix precedes the first chunk. The chunk's exact KV therefore serves every prompt
        that begins with this prefix and chunk.

        Returns:
            The prompt's ids up to the end of its first chunk, and the number of ids before the
            chunk. There are no ids if the first chunk was not blended, or if a row before the chunk
            was computed, because computed rows may differ in each prompt.
        """
        n_exact, prompt = exact_rows(ready.plan), ready.plan.prompt
        for segment, (lo, hi) in zip(prompt.segments, prompt.spans, strict=True):
            is_first = 0 < lo == n_exact == prompt.first_chunk and segment.kind == "chunk"
            is_long = lo <= MAX_BEFORE and hi - lo >= self._settings.min_chunk_tokens
            if is_first and is_long and self.is_on and self._can_save(ready):
                has_recurred = all(run.read for run in _runs(ready.plan) if run.hi <= n_exact)
                return (prompt.token_ids[:hi], lo) if has_recurred else ((), 0)
        return (), 0

    def extend(self, token_ids: Sequence[int], n_exact: int) -> None:
        """Encode the ids after the first `n_exact` ids, if these first ids are still cached."""
        encoder, before, run = self._runtime.encoder, token_ids[:n_exact], token_ids[n_exact:]
        with self._changed:
            known = self._tree.match(before)
        if _n_chained(known) < n_exact:
            return  # no prompt would find the new entry
        key = encoder.key(run, token_digest(before))
        encoder.save(key, lambda: encoder.model.encode(run, before), persistent=False, exact=True)
        self._insert(token_ids, [Rows(n_exact, len(token_ids), key, 0, n_exact)])

    def forget(self, runs: Collection[Sequence[int]]) -> None:
        """Delete all entries whose KV depends on one of the runs of token ids in `runs`."""
        self._states.forget(lambda ids: any(holds(ids, run) for run in runs))
        with self._changed:
            keys = set().union(*map(self._tree.holding, runs)) if runs else set()
            self._tree.discard(keys)
        self._pending.wait(keys, PREFIX_SAVE_WAIT_S)
        self._store.forget(keys)

    def close(self) -> None:
        """Release the kept states."""
        self._states.clear()

    # internal

    def _can_save(self, ready: PreparedPrompt) -> bool:
        profile = self._runtime.encoder.model.profile
        movable = not profile.refusal or profile.fixed
        return movable and ready.prefill.cache is not None and _is_plain(ready.plan.prompt)

    def _exact(self, token_ids: Sequence[int], lo: int, hi: int) -> Rows:
        """Return the `Rows` of a new entry for tokens lo:hi, whose positions are lo to hi."""
        key = self._runtime.encoder.key(
            token_ids[lo:hi], token_digest(token_ids[:lo]) if lo else ""
        )
        return Rows(lo, hi, replace(key, layout=f"at{lo}" if lo else ""))

    def _insert(self, token_ids: Sequence[int], parts: Sequence[Rows]) -> set[ChunkKey]:
        """Insert the parts up to the first gap into the tree; return the inserted keys."""
        if not self.is_on or not parts:
            return set()
        with self._changed:
            known = self._tree.match(token_ids)
            return self._tree.insert(token_ids, _chained([*known, *parts]))

    def _stored(self, keys: set[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the entries of `keys` that are in the store; remove evicted keys from the tree."""
        pending = self._pending.names  # asked before the store, so that no save is missed
        entries = self._store.lookup(keys)
        if evicted := keys - pending - set(entries):
            with self._changed:
                self._tree.discard(evicted)
        return entries

    def _save(
        self,
        ready: PreparedPrompt,
        ids: Sequence[int],
        runs: Sequence[_Run],
        n_exact: int,
        turn: PendingTurn | None = None,
    ) -> list[Rows]:
        """Save the KV of a prompt's runs in the background; return the `Rows` of all runs.

        Args:
            ready: The prefilled prompt.
            ids: The ids of prompt and answer.
            runs: The runs of rows; runs that were read are not saved again.
            n_exact: Number of leading rows that are exact.
            turn: The turn of a session, for which all runs are saved. None means to save only runs
                that were inserted into the tree.
        """
        encoder, parts, new = self._runtime.encoder, list[Rows](), dict[ChunkKey, Spans]()
        for run in runs:
            if run.read or run.hi <= n_exact:
                parts.append(run.read or self._exact(ids, run.lo, run.hi))
                new |= {} if run.read else {parts[-1].key: [(run.lo, run.hi)]}
        exact = [each for each in parts if each.hi <= n_exact]
        if private := [(run.lo, run.hi) for run in runs if not run.read and run.hi > n_exact]:
            tokens = [token for lo, hi in private for token in ids[lo:hi]]
            context = filler_context(
                digest("history", _plan_digest(ready.plan), str(private[0][0]))
            )
            key = encoder.key(tokens, context)
            new[key] = private
            ends = accumulate(hi - lo for lo, hi in private)
            parts += [
                Rows(lo, hi, key, end - (hi - lo))
                for (lo, hi), end in zip(private, ends, strict=True)
            ]
        # under one lock: a thread that finds rows in the tree also sees that their save is pending
        with self._changed:
            inserted = self._insert(ids, exact)
            if turn is None:
                new = {key: spans for key, spans in new.items() if key in inserted}
            if new:
                kv, is_persistent = ready.prefill.kv, turn is not None
                names = {*new, *([turn.id] if turn is not None else ())}
                self._pending.submit(partial(self._write, kv, new, is_persistent), names, kv.nbytes)
        return parts

    def _write(self, kv: ChunkKV, new: Mapping[ChunkKey, Spans], is_persistent: bool) -> None:
        """Write entries to memory, losslessly. If the tree has grown, remove evicted entries.

        If `is_persistent`, entries are also written to slow tiers.
        """
        encoder = replace(self._runtime.encoder, pace_s=0.0 if self._fast else PACE_S)
        for key, spans in new.items():
            encoder.save(key, partial(_copied, kv, spans), is_persistent, exact=True)
        if self._tree.n_nodes >= self._sweep_at:
            with self._changed:
                keys = self._tree.keys
            self._stored(keys)
            self._sweep_at = max(SWEEP_NODES, 2 * self._tree.n_nodes)


def exact_rows(plan: LoadPlan) -> int:
    """Return the number of exact rows: the rows before the first blended or lossy segment."""
    lossy = (
        f.segment for f in plan.fetches if f.level != LEVEL_NAMES[0] or not is_exact(plan.prompt, f)
    )
    first = min(lossy, default=None)
    return len(plan.prompt) if first is None else plan.prompt.spans[first][0]


def with_rows(prompt: Prompt, found: Sequence[Rows], kind: Kind) -> Prompt:
    """Return the prompt with the stored rows `found` (sorted by position) as segments of `kind`."""
    segments, at, ids = list[Segment](), 0, prompt.token_ids
    for each in found:
        segments += _between(prompt, at, each.lo)
        rows, at = (each.row, each.row + each.hi - each.lo), each.hi
        start = prompt.segments[0].start + each.lo
        tokens = ids[each.lo : each.hi]
        segments.append(Segment(tokens, start, kind, (each.key,), rows=rows, origin=each.origin))
    segments += _between(prompt, at, len(prompt))
    return replace(prompt, segments=tuple(segments)) if found else prompt


def without_rows(prompt: Prompt, lo: int, hi: int) -> Prompt:
    """Return a prompt without rows lo:hi. Later rows move to close the gap (AttentionStore 3.4)."""
    count, segments = hi - lo, _between(prompt, 0, lo)
    for rest in _between(prompt, hi, len(prompt)):
        origin = rest.origin - count if rest.origin is not None else None
        segments.append(replace(rest, start=rest.start - count, origin=origin))
    first, stop = prompt.last_user_rows
    return replace(
        prompt,
        segments=tuple(segments),
        truncated=count,
        last_user_rows=(max(0, first - count), max(0, stop - count)),
        first_chunk=max(-1, prompt.first_chunk - count),
    )


def _between(prompt: Prompt, lo: int, hi: int) -> list[Segment]:
    placed = zip(prompt.segments, prompt.spans, strict=True)
    return [
        _cut(segment, max(lo, begin) - begin, min(hi, end) - begin)
        for segment, (begin, end) in placed
        if max(lo, begin) < min(hi, end)
    ]


def _cut(segment: Segment, lo: int, hi: int) -> Segment:
    if (lo, hi) == (0, len(segment.tokens)):
        return segment
    found = replace(segment, tokens=segment.tokens[lo:hi], start=segment.start + lo)
    if not segment.keys:
        return found
    return replace(found, rows=(segment.row + lo, segment.row + hi), stored=segment.run)


def _runs(plan: LoadPlan, owns: bool = False) -> list[_Run]:
    """Split a prompt's rows into runs; all rows of a run were read, or all rows were computed.

    Args:
        plan: The plan by which the prompt was computed.
        owns: True if rows that were read from another prompt's entry count as computed, so that
            these rows get their own entry.
    """
    prompt, n_exact, runs = plan.prompt, exact_rows(plan), list[_Run]()
    fetches = {fetch.segment: fetch for fetch in (*plan.fetches, *plan.unread)}
    for index, (segment, (lo, hi)) in enumerate(zip(prompt.segments, prompt.spans, strict=True)):
        fetch, is_history = fetches.get(index), segment.kind == "history"
        if fetch is not None and (is_history or (hi <= n_exact and not owns)):
            runs.append(_Run(lo, hi, Rows(lo, hi, fetch.key, segment.row, segment.shift)))
        elif runs and runs[-1].read is None and runs[-1].hi == lo != n_exact and not is_history:
            runs[-1] = _Run(runs[-1].lo, hi)
        else:
            runs.append(_Run(lo, hi))
    return runs


def _plan_digest(plan: LoadPlan) -> str:
    read = [f"{fetch.segment} {fetch.key} {fetch.level}" for fetch in plan.fetches]
    return digest("made", token_digest(plan.prompt.token_ids), plan.policy, repr(plan.ratio), *read)


def _chained(parts: Sequence[Rows]) -> list[Rows]:
    """Return adjacent parts from row 0 to the first gap; where parts overlap, the first counts."""
    chain: list[Rows] = []
    for part in sorted(parts, key=lambda part: part.lo):
        at = chain[-1].hi if chain else 0
        if part.lo <= at < part.hi:
            chain.append(part.cut(at, part.hi))
    return chain


def _n_chained(parts: Sequence[Rows]) -> int:
    """Return how many rows are covered from row 0 to the first gap."""
    return next((part.hi for part in reversed(_chained(parts))), 0)


def _copied(kv: ChunkKV, spans: Spans) -> ChunkKV:
    """Return a copy of these rows that shares no memory with the prompt's KV."""

    def rows_of(part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part[:, lo:hi] for lo, hi in spans], 1)

    return ChunkKV(tuple(LayerKV(rows_of(each.keys), rows_of(each.values)) for each in kv.layers))


def _is_plain(prompt: Prompt) -> bool:
    """Return whether the prompt's positions are 0, 1, 2, ...; False for prompts over a schema."""
    return prompt.schema_use is None and prompt.segments[-1].stop == len(prompt)
