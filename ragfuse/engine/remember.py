"""Stage 5, remember: save and encode in the background what later prompts can reuse of a prompt and
its answer.

A passage whose lines a second prompt contains is encoded from that prompt's ids, and is a known
chunk from then on. No text is remembered for that: a line is recognised by a digest of its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

from cachetools import TTLCache

from ragfuse.engine.build import ConversationHistory
from ragfuse.engine.model_records import refusal_of
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.request import PreparedPrompt
from ragfuse.schemas.bind import SchemaUse
from ragfuse.schemas.layout import SchemaRun
from ragfuse.store.deletion import LEARNT
from ragfuse.text.passages import BorderOf, is_code, last_paragraph, passages
from ragfuse.types.answer import Answer
from ragfuse.types.keys import token_digest
from ragfuse.types.plan import CODE, LoadPlan
from ragfuse.types.prompt import Segment

MAX_FINGERPRINTS = 65_536
"""Most fingerprints that are remembered, about 20 MB; the one seen longest ago is dropped first."""
TTL_S = 24 * 3600.0
"""Seconds that a fingerprint is remembered."""


def met_again(
    plan: LoadPlan, border_of: BorderOf, met: MutableMapping[str, str]
) -> list[tuple[int, ...]]:
    """Return the token ids of passages whose lines an earlier, different prompt had, too.

    Text found in the store, and the question itself, are not learnt.

    Args:
        plan: The plan of the prompt.
        border_of: How a token ends lines and paragraphs.
        met: The prompt that held each line first, by digests; new lines are added.
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
"""Most seconds that a job waits until no answer is generated, as encoding delays its tokens."""


class RememberStage:
    """Saves what questions leave for later ones: turns, prefixes, missed chunks, recurring
    passages.

    Args:
        prompts: Knows chunks.
        history: Saves turns.
        prefixes: Saves prefixes.
        prefetcher: Brings what the next prompt may want to memory.
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
        """Save the new KV of a prompt while its answer is generated (AttentionStore 3.2.2)."""
        if prepared.request.ask.reuse:
            self._prefixes.save(prepared)

    def remember(self, prepared: PreparedPrompt, answer: Answer, ids: Sequence[int]) -> None:
        """Save a question's turn and the KV of its answer, and queue its missing chunks for
        encoding.

        Args:
            prepared: The prompt.
            answer: Its answer; one that nobody reads is no part of its conversation.
            ids: The ids that the answer was generated as.
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
        # what loads too slowly from its tier, and the other modules of unions
        others = schema_use.others if isinstance(schema_use, SchemaUse) else ()
        if wanted := (*(fetch.key for fetch in plan.unread), *others):
            self._prefetcher.submit_keys(wanted)

    def _queue(self, ids: tuple[int, ...], do: Callable[[], object]) -> None:
        """Queue a job once, known by the ids that it is about, for when no answer is generated."""

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
        encoder = self._runtime.encoder.in_background()
        if isinstance(each, SchemaRun):
            encoder.keep_run(each)
            return
        text = each.text or self._text(each.tokens)
        encoder.keep_chunk(each.tokens, persistent=bool(text))
        self._prompts.note(text, each.source, each.tokens)

    def _text(self, tokens: tuple[int, ...]) -> str:
        """Return the text of ids; "" where it is not tokenised as these."""
        model = self._runtime.model
        text = model.text(tokens).strip()
        return text if tuple(model.tokens(text)) == tokens else ""


def missed(plan: LoadPlan) -> Iterator[Segment | SchemaRun]:
    """Yield each missed chunk or run of a schema once, to be encoded after the answer."""
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
