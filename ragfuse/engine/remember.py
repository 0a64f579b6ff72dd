"""Stage 6, remember: save and encode in the background what later prompts can reuse of a prompt and
its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ragfuse.engine.background import IDLE_WAIT_S, EncodeJob, jobs_after
from ragfuse.engine.history import ConversationHistory
from ragfuse.engine.model_profiles import refusal_of
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.prompt_builder import PromptBuilder
from ragfuse.engine.recurrence import RecurringPassages
from ragfuse.engine.request import PreparedPrompt
from ragfuse.schemas.bind import SchemaUse
from ragfuse.store.deletion import LEARNT
from ragfuse.text.passages import is_code
from ragfuse.types.answer import Answer
from ragfuse.types.reasons import CODE


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
        self._runtime, self._passages = prompts.runtime, RecurringPassages()

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
        """Queue the background jobs of an answered prompt: chunks to encode, passages to learn."""
        plan, profile = prepared.plan, self._runtime.model.profile
        schema_use = plan.prompt.schema_use
        if not profile.refusal or (profile.fixed and schema_use is not None):
            for job in jobs_after(plan):
                self._queue(job)
        if not profile.refusal:
            prefix, n_exact = self._prefixes.prefix_to_encode(prepared)
            if prefix:
                self._queue(EncodeJob("prefix", tuple(prefix), n_prefix=n_exact))
        settings = self._runtime.settings
        learns = settings.learn == "text" and schema_use is None
        if learns and not refusal_of(self._runtime.profile, settings.policy):
            self._queue(EncodeJob("learn", plan.prompt.token_ids, plan=plan))
        # what loads too slowly from its tier, and the other modules of unions
        others = schema_use.others if isinstance(schema_use, SchemaUse) else ()
        if wanted := (*(fetch.key for fetch in plan.unread), *others):
            self._prefetcher.submit_keys(wanted)

    def _queue(self, job: EncodeJob) -> None:
        """Queue a job; equal jobs wait only once."""
        if job not in self._runtime.jobs.names:
            self._runtime.jobs.submit(partial(self._do, job), [job])

    # in the background

    def _do(self, job: EncodeJob) -> None:
        model = self._runtime.model
        if job.plan is not None:
            for run in self._passages.met_again(job.plan, model.border):
                if is_code(model.text(run)):
                    self._prompts.note("", CODE, run)
                else:
                    self._queue(EncodeJob("chunk", run, source=LEARNT))
            return
        model.batcher.wait_idle(IDLE_WAIT_S)
        if job.kind == "prefix":
            self._prefixes.extend(job.tokens, job.n_prefix)
            return
        encoder = self._runtime.encoder.in_background()
        if job.run is not None:
            encoder.keep_run(job.run)
            return
        text = job.text or self._text(job.tokens)
        encoder.keep_chunk(job.tokens, persistent=bool(text))
        self._prompts.note(text, job.source, job.tokens)

    def _text(self, tokens: tuple[int, ...]) -> str:
        """The text of ids, where it is tokenised as these; else "": then later processes do not
        know it.
        """
        model = self._runtime.model
        text = model.text(tokens).strip()
        return text if tuple(model.tokens(text)) == tokens else ""
