"""How one engine plans: by its model's verdict, by what was asked, and by this machine's timings where it has any.

What is decided is told in `plan` and `model_profiles`, how timings are kept in `machine_timings.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice

from ragfuse.engine.background import Work, work_after
from ragfuse.engine.machine_timings import Timings
from ragfuse.engine.model_profiles import Hint, refusal_of
from ragfuse.engine.options import Ask
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.hf.model import HFModel
from ragfuse.hf.states import TenantStates
from ragfuse.measure import Progress, measure
from ragfuse.plan.controller import LoadingController, settle
from ragfuse.plan.evict import lru
from ragfuse.plan.tiers import choose_level, choose_tier, promotions
from ragfuse.process.fork import ForkLock
from ragfuse.settings import AUTO_LEVEL, Settings
from ragfuse.store import KVStore, Tier
from ragfuse.store.factory import open_tier
from ragfuse.store.tier import Breaks
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import MachineProfile, ModelProfile
from ragfuse.types.prompt import Prompt
from ragfuse.types.reasons import (
    DOCUMENTS_ALTERED,
    ENCODING,
    FIRST_SEEN,
    FULL_PREFILL_ASKED,
    MISSING,
    NOTHING_STORED,
    PROMPT_TOO_SHORT,
)

log = logging.getLogger("ragfuse.engine")

SHORT = 32
"""Tokens of a prompt under which there is nothing to save."""
PROMOTED = 2
"""Chunks that are copied to a faster tier after one answer, at most."""


class Planner:
    """Plans an engine's prompts over its store, by `timings` where this machine was measured."""

    def __init__(
        self,
        settings: Settings,
        store: KVStore,
        timings: Timings,
        prefixes: PrefixCache,
        is_encoding: Callable[[tuple[int, ...]], bool] = lambda tokens: False,
    ) -> None:
        self.timings, self._prefixes, self._is_encoding = timings, prefixes, is_encoding
        self._settings, self._store = settings, store
        self._hint, self._lock = Hint(), ForkLock()
        self._promoted = 0

    def plan(
        self,
        prompt: Prompt,
        ask: Ask,
        model: HFModel,
        profile: ModelProfile,
        lost: frozenset[int] = frozenset(),
        counts: bool = True,
    ) -> LoadPlan:
        """What to read and compute for a prompt; `lost` segments were there and could not be read.

        Unless it `counts`, no hit or miss is told in the store's counts. The plan's prompt is this one with what it
        shares with earlier prompts in place; with `lost` segments, it is one that a plan gave.
        """
        if ask.reuse and not lost:
            prompt = self._prefixes.placed(prompt)
        settings = self._settings
        policy = ask.policy or settings.policy
        ratio = settings.ratio if ask.ratio is None else ask.ratio
        machine, corrections = self.timings.now(model)
        controller = LoadingController(machine, profile.choice, corrections)
        blends = any(segment.kind == "chunk" for segment in prompt.segments)
        refusal = refusal_of(_judged(prompt, profile, blends), policy) if ask.reuse else FULL_PREFILL_ASKED
        left, why_left = frozenset[ChunkKey](), refusal
        if refusal and blends and ask.reuse and not refusal_of(_judged(prompt, profile, False), policy):
            left = frozenset(key for segment in prompt.segments if segment.kind == "chunk" for key in segment.keys)
            refusal = ""  # what is exact is read all the same
        if refusal:
            full = controller.plan(prompt, {}, policy, ratio, deadline_s=ask.deadline_s).refused(refusal)
            return replace(full, n_before=self._n_before(prompt, model)) if ask.reuse else full
        keys = [key for segment in prompt.segments for key in segment.keys if key not in left]
        entries = self._store.lookup(keys, counts=counts)
        others = self._store.copies(entries) if machine is not None else {}
        found = controller.plan(prompt, entries, policy, ratio, lost, ask.deadline_s, others)
        lacking = (miss for miss in found.misses if (prompt.segments[miss[0]].kind, miss[1]) != ("prefix", MISSING))
        found = replace(found, misses=tuple(self._told(prompt, *miss) for miss in lacking))  # a new beginning: new text
        if left:
            chunks = {at for at, segment in enumerate(prompt.segments) if segment.kind == "chunk"}
            found = replace(found, misses=tuple((at, why_left if at in chunks else why) for at, why in found.misses))
            return found if found.fetches or found.refusal else found.refused(why_left)
        if found.fetches or found.refusal:
            if blends:
                self._hint.give(profile, policy, settings.model)
            return found
        is_pending = any(why == ENCODING for _, why in found.misses)
        why = ENCODING if is_pending else self._nothing(prompt, bool(lost))
        return replace(found.refused(why), misses=found.misses)

    def kept(self) -> TenantStates | None:
        """Where beginnings are kept of a model with a state that is no KV per token; None where nowhere."""
        return self._prefixes.kept()

    def _n_before(self, prompt: Prompt, model: HFModel) -> int:
        kept, kind = self.kept() if prompt.taken is None else None, model.profile.state
        state = kept.beginning(prompt.token_ids, kind)[0] if kept is not None and kind else None
        return state.n_tokens if state is not None else 0

    def settle(self, prompt: Prompt) -> None:
        """Wait a while for what is being saved of the prompt's beginning. The model is another prompt's meanwhile."""
        self._prefixes.settle(prompt)

    def home(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> str | None:
        """The slow tier that a new chunk belongs in; None: all, as asked for or as this machine was not measured."""
        machine, slow = self.timings.corrected(model), [tier.name for tier in self._slow]
        if machine is None or len(slow) < 2 or self._settings.placement == "all":
            return None
        prices, ratio = self._settings.prices.model_dump(), self._ratio(profile)
        written = {tier: self._store.levels.of(tier) for tier in slow} | self.levels(model, profile, n_tokens, nbytes)
        return choose_tier(n_tokens, nbytes, machine, slow, prices, ratio, written)

    def levels(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> dict[str, tuple[str, ...]]:
        """The level that a new chunk is written at into each tier whose level is `auto`, raw until it was measured."""
        chosen = [tier for tier, levels in self._settings.written.items() if levels == (AUTO_LEVEL,)]
        machine = self.timings.corrected(model) if chosen else None
        if machine is None:
            return {}
        ratio = self._ratio(profile)
        return {tier: (choose_level(n_tokens, nbytes, machine, tier, ratio),) for tier in chosen}

    def work_after(self, plan: LoadPlan) -> Iterator[Work]:
        """What is to be done in the background once a prompt is answered."""
        yield from work_after(plan)
        used = tuple(fetch.key for fetch in (*plan.fetches, *plan.unread))
        if used and plan.forecast is not None and len(self._slow) > 1:
            yield Work((), used=used)

    def promote(self, model: HFModel, keys: Sequence[ChunkKey]) -> None:
        """Copy those of these chunks that are hit often to a faster tier that has room, a few; see `plan.tiers`."""
        machine = self.timings.corrected(model)
        if machine is None:
            return
        entries = [entry for tier in self._store.tiers for entry in tier.entries(keys).values()]
        room = {tier.name: tier.capacity - tier.nbytes for tier in self._slow}
        pinned = {entry.key for entry in entries if entry.pinned}
        for key, tier in islice(promotions(entries, machine, room), PROMOTED):
            self._copy(key, self._store.tier(tier), key in pinned)

    def take_promoted(self) -> int:
        """Chunks that were copied to a faster tier since this was last asked."""
        with self._lock:
            taken, self._promoted = self._promoted, 0
            return taken

    def measure(self, model: HFModel, stores: Sequence[str], progress: Progress) -> MachineProfile:
        """New timings, of the store's own tiers and of those at the URLs; learned."""
        with ExitStack() as opened:
            tiers: list[Tier] = list(self._store.tiers)
            for url in stores:
                tiers.append(open_tier(url, self._settings, lru, [tier.name for tier in tiers]))
                opened.callback(getattr(tiers[-1], "close", lambda: None))
            codecs = partial(self._store.levels.codecs, model=digest(model.fingerprint, self._settings.salt))
            machine = measure(model, tiers, progress, codecs=codecs)
        self.timings.learn(machine)
        return machine

    def _ratio(self, profile: ModelProfile) -> float:
        """The share of a chunk that is recomputed unless a question says otherwise."""
        return settle(self._settings.policy, self._settings.ratio, profile.choice)[1]

    def _told(self, prompt: Prompt, index: int, why: str) -> tuple[int, str]:
        """A miss, and why: an entry may be there that cannot be decoded here, or on its way."""
        segment = prompt.segments[index]
        if why == MISSING and segment.kind == "chunk" and self._is_encoding(segment.stored or segment.tokens):
            return index, ENCODING
        reasons = (self._store.why_not(key) for key in segment.keys if why == MISSING)
        return index, next(filter(None, reasons), why)

    def _nothing(self, prompt: Prompt, lost: bool) -> str:
        """Why a prompt was found nowhere: of tiers that do not answer, nobody knows."""
        if len(prompt) < SHORT:
            return f"{PROMPT_TOO_SHORT}: {len(prompt)} tokens"
        tiers = self._store.tiers  # what the look-up just met: an answer does not wait for being asked again
        silent = [tier.name for tier in tiers if isinstance(tier, Breaks) and tier.breaker.is_open]
        there = f", as far as is known: {' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
        if prompt.altered:
            return f"{DOCUMENTS_ALTERED}: {prompt.altered}"
        first = not (silent or lost) and any(segment.kind == "chunk" for segment in prompt.segments)
        return FIRST_SEEN if first else f"{NOTHING_STORED}{there if silent else ''}"

    @property
    def _slow(self) -> list[Tier]:
        return [tier for tier in self._store.tiers if tier.slow]

    def _copy(self, key: ChunkKey, tier: Tier, pinned: bool) -> None:
        """Keep a chunk in a faster tier too; what cannot be read or kept stays as it is."""
        whole = self._store.read_whole(key)
        if whole is None or not self._store.write_whole(key, *whole, tier):
            return
        if pinned:
            tier.pin([key], True)
        tier.counts.add("promoted")
        log.info("Promoted %s to tier %s, as it is used often", key, tier.name)
        with self._lock:
            self._promoted += 1


def _judged(prompt: Prompt, profile: ModelProfile, blends: bool) -> ModelProfile:
    """What is known of a model as far as it concerns a prompt: what is used as it is needs no calibration, and no
    moving where it stands as it was encoded."""
    if blends:
        return profile
    stays = prompt.taken is not None or any(segment.kind == "prefix" for segment in prompt.segments)
    return replace(profile, safe=None, refusal="" if profile.fixed and stays else profile.refusal)
