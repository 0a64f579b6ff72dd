"""Stage 5, remember, and prefetching: background work for later questions.

After an answer, turns and prefixes are saved, and missing chunks are encoded. A passage is encoded
as a chunk once two different prompts within a day contain the passage's lines. Lines are recognised
by digests of their token ids, so no text is stored for this purpose.

Prefetching reads KV from slow tiers into memory before a question needs the KV. It reads the KV of
texts that a retriever found, and of conversations in the order of the request queue. KV that was
not prefetched is read or computed with the question.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

from cachetools import TTLCache

from ragfuse.engine.ask import texts_of
from ragfuse.engine.build import ConversationHistory
from ragfuse.engine.model_records import refusal_of
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.runtime import PACE_S, Runtime, ids_of
from ragfuse.plan.controller import to_prefetch
from ragfuse.process.jobs import BackgroundJobs
from ragfuse.schemas.bind import SchemaUse
from ragfuse.schemas.layout import SchemaRun
from ragfuse.sessions.session_store import Name
from ragfuse.store.deletion import LEARNT
from ragfuse.text.passages import BorderOf, is_code, last_paragraph, passages
from ragfuse.types.answer import Answer
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.kv import Entry
from ragfuse.types.plan import CODE, LoadPlan
from ragfuse.types.prompt import Segment

MAX_WAITING_REQUESTS = 8
"""Maximum queued prefetch requests. Further requests are dropped."""
MAX_TIER_SHARE = 0.5
"""Share of a fast tier's unpinned capacity that one prefetch may fill."""


class Prefetcher:
    """Reads entries from slow tiers one at a time, so that they are copied to the fast tiers.

    Requests take turns, entry by entry. No lock is held while a tier is queried or read.

    Args:
        runtime: The model with its encoder, and the store whose tiers are read.

    Attributes:
        jobs: The queued prefetch requests.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._store, self._runtime = runtime.store, runtime
        self.jobs = BackgroundJobs("prefetch", MAX_WAITING_REQUESTS)
        self._ahead: Iterator[Entry] | None = None
        self._skipped = set[ChunkKey]()

    def submit(self, texts: Iterable[str]) -> None:
        """Prefetch the KV of these texts. Returns at once."""
        self.submit_keys(self._keys(texts_of(texts)))

    def submit_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Prefetch the entries of these keys, in this order (likeliest first). Returns at once."""
        self.jobs.submit(partial(self._read, self._of_keys(keys)))

    def look_ahead(self, waiting: Sequence[Name]) -> None:
        """Prefetch these conversations' KV, in order. Stop the prefetch of an earlier call."""
        known = map(self._runtime.conversations.keys, waiting)
        groups = (self._store.lookup(keys).values() for keys in known)
        self._ahead = self._fitting(groups)
        self.jobs.submit(partial(self._read, self._ahead, is_ahead=True))

    def skip(self, keys: Iterable[ChunkKey]) -> None:
        """Do not prefetch these keys, because a question is reading their entries now."""
        if len(self.jobs):
            self._skipped.update(keys)

    # internal

    def _read(self, entries: Iterator[Entry], is_ahead: bool = False) -> None:
        """Read a request's next entry, then move the request to the end of the queue."""
        if is_ahead and entries is not self._ahead:
            return
        for entry in entries:
            if entry.key not in self._skipped:
                self._store.read_layers(entry.key, 0, entry.n_layers, entry.tier)
                self.jobs.submit(partial(self._read, entries, is_ahead))
                return
        if len(self.jobs) == 1:
            self._skipped.clear()

    def _keys(self, texts: Sequence[str]) -> Iterator[ChunkKey]:
        encoder = self._runtime.encoder
        for text in texts:
            ids = ids_of(text.strip(), encoder.model)
            if len(ids) >= encoder.shortest:
                yield encoder.key(ids, encoder.context)

    def _of_keys(self, keys: Iterable[ChunkKey]) -> Iterator[Entry]:
        """Yield the entries to read; first announce the entries to tiers that can read ahead."""
        found = self._store.lookup(keys)
        for fast in (tier for tier in self._store.tiers if not tier.slow):
            fast.touch([entry.key for entry in found.values() if entry.tier == fast.name])
        chosen = list(self._fitting(([entry] for entry in found.values()), MAX_TIER_SHARE))
        for tier in {entry.tier for entry in chosen}:
            self._store.tier(tier).expect(
                [entry.key for entry in chosen if entry.tier == tier], range(chosen[0].n_layers)
            )
        yield from chosen

    def _fitting(self, groups: Iterable[Collection[Entry]], share: float = 1.0) -> Iterator[Entry]:
        """Yield the slow-tier entries of the first groups that fit into the fast tiers.

        Args:
            groups: Groups of entries. A group is one entry, or the entries of one conversation in
                the request queue (AttentionStore 3.3.1).
            share: Share of a fast tier's unpinned capacity that the groups may fill. A group's
                entries count even if they are already in the fast tier.
        """
        fast = {tier.name: tier for tier in self._store.tiers if not tier.slow}
        if not fast:
            return
        room = min(
            tier.capacity
            - sum(tier.occupied(entry.nbytes) for entry in tier.list() if entry.pinned)
            for tier in fast.values()
        )

        def nbytes(entry: Entry) -> int:
            return max(tier.occupied(entry.nbytes) for tier in fast.values())

        sized = ((group, sum(map(nbytes, group))) for group in groups)
        for group in to_prefetch(sized, int(share * room)):
            yield from (entry for entry in group if entry.tier not in fast)


MAX_FINGERPRINTS = 65_536
"""Maximum line digests in memory, about 20 MB; the least recently seen digest is dropped."""
TTL_S = 24 * 3600.0
"""Seconds for which the digest of a new line is remembered."""


def met_again(
    plan: LoadPlan, border_of: BorderOf, met: MutableMapping[str, str]
) -> list[tuple[int, ...]]:
    """Return the token ids of passages whose lines also occurred in an earlier, different prompt.

    The question, and text whose KV is in the store, never count as passages.

    Args:
        plan: The plan of the prompt.
        border_of: Returns the line or paragraph border after a token.
        met: Maps the digest of a line to the digest of the first prompt with this line. The call
            adds new lines.
    """
    prompt, read = plan.prompt, {fetch.segment for fetch in (*plan.fetches, *plan.unread)}
    prompt_digest, ids = token_digest(prompt.token_ids), prompt.token_ids
    lo_question, hi_question = prompt.last_user_rows
    lo_question += last_paragraph(ids[lo_question:hi_question], border_of)

    def recurs(begin: int, rows: tuple[int, int]) -> bool:
        lo, hi = rows[0] + begin, rows[1] + begin
        if lo < hi_question and lo_question < hi:
            return False
        return met.setdefault(token_digest(ids[lo:hi]), prompt_digest) != prompt_digest

    found = list[tuple[int, ...]]()
    for index, (segment, (begin, _)) in enumerate(zip(prompt.segments, prompt.spans, strict=True)):
        if segment.kind in ("fresh", "prefix") and index not in read:
            found += [
                segment.tokens[lo:hi]
                for lo, hi in passages(segment.tokens, border_of, partial(recurs, begin))
            ]
    return found


IDLE_WAIT_S = 2.0
"""Maximum seconds that a job waits for decoding to stop. Encoding slows concurrent decoding."""


class RememberStage:
    """Saves turns, prefixes, missed chunks and recurring passages of answered questions.

    Args:
        prompts: Provides the index of known chunks.
        history: Saves the turns of conversations.
        prefixes: The prefix cache, which saves prefixes.
        prefetcher: Prefetches the likely entries of the next prompt.
    """

    def __init__(
        self,
        prompts: PromptBuilder,
        history: ConversationHistory,
        prefixes: PrefixCache,
        prefetcher: Prefetcher,
    ) -> None:
        self._prompts, self._history, self._prefixes, self._prefetcher = (
            prompts,
            history,
            prefixes,
            prefetcher,
        )
        self._runtime = prompts.runtime
        self._met: TTLCache[str, str] = TTLCache(MAX_FINGERPRINTS, TTL_S)

    def begin(self, prepared: PreparedPrompt) -> None:
        """Start saving a prompt's new KV, to overlap with decoding (AttentionStore 3.2.2)."""
        if prepared.request.ask.reuse:
            self._prefixes.save(prepared)

    def remember(self, prepared: PreparedPrompt, answer: Answer, ids: Sequence[int]) -> None:
        """Save the turn and the KV of an answered question; queue missed chunks for encoding.

        Args:
            prepared: The prefilled prompt.
            answer: The answer. If the request was abandoned, neither turn nor KV is saved.
            ids: The generated ids of the answer.
        """
        if not prepared.request.ask.reuse:
            return
        self._submit(prepared)
        if not prepared.request.is_abandoned:
            self._history.after(prepared, answer, ids)
            self._prefixes.save(prepared, ids)

    def _submit(self, prepared: PreparedPrompt) -> None:
        """Queue the background jobs of an answered prompt."""
        plan, profile = prepared.plan, self._runtime.model.profile
        schema_use = plan.prompt.schema_use
        if not profile.refusal or (profile.fixed and schema_use is not None):
            for each in missed(plan):
                self._queue(each.tokens, partial(self._encode, each))
        if not profile.refusal:
            ids, n_exact = self._prefixes.prefix_to_encode(prepared)
            if ids:
                self._queue(ids, partial(self._prefixes.extend, ids, n_exact))
        settings = self._runtime.settings
        learns = settings.learn == "text" and schema_use is None
        if learns and not refusal_of(self._runtime.profile, settings.policy):
            self._queue(plan.prompt.token_ids, partial(self._learn, plan))
        # entries that load too slowly from a slow tier, and unchosen modules of unions
        others = schema_use.others if isinstance(schema_use, SchemaUse) else ()
        if wanted := (*(fetch.key for fetch in plan.unread), *others):
            self._prefetcher.submit_keys(wanted)

    def _queue(self, ids: tuple[int, ...], do: Callable[[], object]) -> None:
        """Queue a job unless one is queued for the same ids. The job waits for decoding to stop."""

        def once_idle() -> None:
            self._runtime.model.batcher.wait_idle(IDLE_WAIT_S)
            do()

        if ids not in self._runtime.jobs.names:
            self._runtime.jobs.submit(once_idle, [ids])

    # in the background

    def _learn(self, plan: LoadPlan) -> None:
        model = self._runtime.model
        for ids in met_again(plan, model.border, self._met):
            if is_code(model.text(ids)):
                self._prompts.note("", CODE, ids)
            else:
                self._queue(ids, partial(self._encode, Segment(ids, 0, "chunk", source=LEARNT)))

    def _encode(self, each: Segment | SchemaRun) -> None:
        encoder = replace(self._runtime.encoder, pace_s=PACE_S)
        if isinstance(each, SchemaRun):
            encoder.keep_run(each)
            return
        text = each.text or self._text(each.tokens)
        encoder.keep_chunk(each.tokens, persistent=bool(text))
        self._prompts.note(text, each.source, each.tokens)

    def _text(self, tokens: tuple[int, ...]) -> str:
        """Return the text of token ids; "" if tokenising this text gives different ids."""
        model = self._runtime.model
        text = model.text(tokens).strip()
        return text if tuple(model.tokens(text)) == tokens else ""


def missed(plan: LoadPlan) -> Iterator[Segment | SchemaRun]:
    """Yield each missed chunk or schema run once, for encoding after the answer."""
    segments, schema_use = plan.prompt.segments, plan.prompt.schema_use
    hits = {fetch.key for fetch in (*plan.fetches, *plan.unread)}
    if isinstance(schema_use, SchemaUse):
        lacking = {segments[at].keys[0] for at, _ in plan.misses} - hits
        yield from (run for key, run in schema_use.runs.items() if key in lacking)
        return
    for segment in segments:  # `prefix_cache.py` saves prefixes and turns
        if segment.kind == "chunk" and segment.keys[0] not in hits:
            hits.add(segment.keys[0])
            yield replace(segment, tokens=segment.run)
