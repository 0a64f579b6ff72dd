"""Stage 2, plan: decide what is read and what is computed, from the model's profile, the store and
machine timings.

The decisions themselves are in `ragfuse.plan` and `model_profiles.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ragfuse.engine.model_profiles import hint, refusal_of
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.request import Request
from ragfuse.engine.runtime import Runtime
from ragfuse.fuse.select import cost_of
from ragfuse.plan.controller import Controller
from ragfuse.telemetry.otel import planned
from ragfuse.types.plan import (
    AUTO,
    DOCUMENTS_ALTERED,
    ENCODING,
    FULL_PREFILL_ASKED,
    MISSING,
    NOT_ENCODED,
    NOTHING_STORED,
    PROMPT_TOO_SHORT,
    LoadPlan,
)
from ragfuse.types.profiles import ModelProfile
from ragfuse.types.prompt import Prompt, Segment

log = logging.getLogger("ragfuse.engine")

MIN_PROMPT_TOKENS = 32
"""Prompts of fewer tokens are too short to gain from reuse."""


class Planner:
    """Makes the plans of an engine's prompts.

    Args:
        runtime: Timings of this machine, the store where entries are looked up, the catalog of
            known texts, and chunks that wait to be encoded.
        prefixes: The prefix cache.
    """

    def __init__(self, runtime: Runtime, prefixes: PrefixCache) -> None:
        self._runtime, self._prefixes, self._store = runtime, prefixes, runtime.store
        self._is_hinted = False

    @planned
    def plan(
        self, prompt: Prompt, request: Request, lost: frozenset[int] = frozenset()
    ) -> LoadPlan:
        """Decide what to read and what to compute for a prompt.

        Args:
            prompt: The built prompt; where segments are lost, the prompt of the earlier plan.
            request: The request.
            lost: Indices of segments whose entries could not be read.

        Returns:
            The plan. Its prompt has segments of kind "prefix" where the prefix cache has a hit.
        """
        profile, ask, settings = self._runtime.profile, request.ask, self._runtime.settings
        if ask.reuse and not lost:
            prompt = self._prefixes.placed(prompt)
        policy, costs = ask.policy or settings.policy, self._runtime.timings.costs(request.model)
        controller = Controller(
            cost_of,
            costs,
            profile.default_choice,
            policy,
            settings.ratio if ask.ratio is None else ask.ratio,
            request.left_s,
            [tier.name for tier in self._store.tiers if tier.remote],
        )
        refusal = refusal_of(_exactly(prompt, profile), policy)
        if refusal or not ask.reuse:
            why = refusal if ask.reuse else FULL_PREFILL_ASKED
            return controller.plan(prompt, {}).with_full_prefill(why)
        chunks = {at for at, segment in enumerate(prompt.segments) if segment.kind == "chunk"}
        # then exact segments are read alone
        unblended = refusal_of(profile, policy) if chunks else ""
        keys = [
            key
            for at, each in enumerate(prompt.segments)
            for key in each.keys
            if not (unblended and at in chunks)
        ]
        entries = self._store.lookup(keys)
        found = controller.plan(prompt, entries, lost)
        misses = list[tuple[int, str]]()
        for at, why in found.misses:
            if unblended and at in chunks:
                misses.append((at, unblended))
            # such a prefix is new text, not a miss
            elif (prompt.segments[at].kind, why) != ("prefix", MISSING):
                misses.append((at, self._explained(prompt.segments[at], why)))
        found = replace(found, misses=tuple(misses))
        if found.fetches or found.fallback_reason:
            is_default = policy == AUTO and profile.choice is None
            if chunks and not unblended and is_default and not self._is_hinted:
                self._is_hinted = True
                hint(profile, settings, request.model)
            return found
        why = unblended
        if not why:
            is_pending = any(why == ENCODING for _, why in found.misses)
            why = ENCODING if is_pending else self._why_nothing(prompt, bool(lost))
        return replace(found.with_full_prefill(why), misses=() if unblended else found.misses)

    def _explained(self, segment: Segment, why: str) -> str:
        """Return the precise reason of a miss: its entry may be undecodable here, or still being
        encoded.
        """
        if why != MISSING:
            return why
        if (segment.stored or segment.tokens) in self._runtime.jobs.names:
            return ENCODING
        return next(filter(None, map(self._store.levels.why_not, segment.keys)), why)

    def _why_nothing(self, prompt: Prompt, lost: bool) -> str:
        """Return why nothing of a prompt was found, with the tiers that do not answer and may have
        it.
        """
        if len(prompt) < MIN_PROMPT_TOKENS:
            return f"{PROMPT_TOO_SHORT}: {len(prompt)} tokens"
        # their breakers know from the lookup just done; do not ask slow tiers again
        silent = [tier.name for tier in self._store.tiers if not tier.answers]
        if prompt.altered:
            return DOCUMENTS_ALTERED
        if silent:
            return f"{NOTHING_STORED}, as far as is known: {' and '.join(silent)} not answering"
        has_chunks = any(segment.kind == "chunk" for segment in prompt.segments)
        return NOT_ENCODED if has_chunks and not lost else NOTHING_STORED


def _exactly(prompt: Prompt, profile: ModelProfile) -> ModelProfile:
    """Return the profile as far as it concerns the segments of a prompt that are not blended.

    They need no calibration, and those that are used at their encoded positions no model whose KV
    can be moved.
    """
    shifts = [segment.shift for segment in prompt.segments if segment.kind in ("prefix", "history")]
    stays = prompt.schema_use is not None or (bool(shifts) and not any(shifts))
    return replace(profile, safe=None, refusal="" if profile.fixed and stays else profile.refusal)
