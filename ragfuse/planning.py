"""How one engine plans: by its model's verdict, by what was asked, and by this machine's timings where it has any.

What is decided is told in `plan` and `gate`; the timings are kept in the store's book.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import islice

import torch

from ragfuse.asking import Ask
from ragfuse.core import ChunkKey, Entry, LoadPlan, Prompt, digest
from ragfuse.errors import StoreError
from ragfuse.gate import Booked, Hint, refusal_of
from ragfuse.hf.model import HFModel
from ragfuse.measure import Progress, measure
from ragfuse.plan.controller import LoadingController, settle
from ragfuse.plan.evict import lru
from ragfuse.plan.seen import Seen, corrected, factors, forgotten_after, seen_after
from ragfuse.plan.tiers import choose_tier, promotions
from ragfuse.profiles import MACHINE_VERSION, MachineProfile, ModelProfile
from ragfuse.saving import Work, work_after
from ragfuse.settings import Settings
from ragfuse.store import KVStore, Tier
from ragfuse.store.opening import open_tier

log = logging.getLogger("ragfuse.engine")

UNASKED = "full prefill was asked for"
PROMOTED = 2
"""Chunks that are copied to a faster tier after one answer, at most."""
ASK_AGAIN_S = 60.0
"""Seconds after which the book is asked again for timings: another process may have measured meanwhile."""


@dataclass
class _Known:
    """Timings under one name, None if there are none, when the book was last asked for them, what was seen since."""

    machine: MachineProfile | None
    asked_s: float
    seen: Seen = field(default_factory=dict)


class Planner:
    """Plans an engine's prompts over its store. `booked` asks the store's book; `clock` gives seconds."""

    def __init__(
        self, settings: Settings, store: KVStore, booked: Booked, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._store, self._booked, self._clock = settings, store, booked, clock
        self._hint, self._lock = Hint(), threading.Lock()
        self._known: dict[str, _Known] = {}
        self._promoted = 0
        self._around = version("torch"), version("transformers"), *settings.tiers

    def plan(
        self,
        prompt: Prompt,
        ask: Ask,
        model: HFModel,
        profile: ModelProfile,
        lost: frozenset[int] = frozenset(),
    ) -> LoadPlan:
        """What to read and compute for a prompt; `lost` segments were there and could not be read."""
        settings = self._settings
        policy = ask.policy or settings.policy
        ratio = settings.ratio if ask.ratio is None else ask.ratio
        machine, corrections = self._seen(model)
        controller = LoadingController(machine, profile.choice, corrections)
        refusal = refusal_of(profile, policy) if ask.reuse else UNASKED
        if refusal:
            return controller.plan(prompt, {}, policy, ratio, deadline_s=ask.deadline_s).refused(refusal)
        keys = [key for segment in prompt.segments for key in segment.keys]
        found = controller.plan(prompt, self._entries(keys), policy, ratio, lost, ask.deadline_s)
        if found.fetches or found.refusal:
            self._hint.give(profile, policy, settings.model)
            return found
        why = "nothing of it is in the store" if keys else "it holds no chunk that is long enough"
        return replace(found.refused(why), misses=found.misses)

    def home(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> str | None:
        """The slow tier that a new chunk belongs in; None: this machine was not measured, so all of them."""
        (machine, corrections), slow = self._seen(model), [tier.name for tier in self._slow]
        if machine is None or len(slow) < 2:
            return None
        machine, prices = corrected(machine, corrections), self._settings.prices.model_dump()
        ratio = settle(self._settings.policy, self._settings.ratio, profile.choice)[1]
        return choose_tier(n_tokens, nbytes, machine, slow, prices, ratio)

    def machine(self, model: HFModel) -> MachineProfile | None:
        """This machine's timings with a model, on as many threads as torch has now; None where there are none.

        The book is asked once a minute at most, so that what another process measures counts here too.
        """
        with self._lock:
            return self._of(model).machine

    def saw(self, model: HFModel, plan: LoadPlan, load_s: float) -> None:
        """Go on from what reading took, in seconds, for a plan that was carried out."""
        if plan.forecast is None:
            return
        with self._lock:
            known, read = self._of(model), {fetch.tier for fetch in plan.fetches}
            if known.machine is not None and known.machine.tiers.keys() >= read:
                known.seen = seen_after(known.seen, known.machine, plan.fetches, plan.layers_a_read, load_s)
                known.seen = forgotten_after(known.seen, [f.tier for f in plan.unread if f.tier not in read])

    def learn(self, machine: MachineProfile) -> None:
        """Plan by these timings from now on, here and in later processes on this store."""
        name = self._name(machine.model, machine.device, machine.threads)
        with self._lock:
            self._known[name] = _Known(machine, self._clock())
        self._booked(lambda book: book.put(name, machine.as_dict()), None)

    def work_after(self, plan: LoadPlan) -> Iterator[Work]:
        """What is to be done in the background once a prompt is answered."""
        yield from work_after(plan)
        used = tuple(fetch.key for fetch in (*plan.fetches, *plan.unread))
        if used and plan.forecast is not None and len(self._slow) > 1:
            yield Work((), (), used=used)

    def promote(self, model: HFModel, keys: Sequence[ChunkKey]) -> None:
        """Copy those of these chunks that are hit often to a faster tier that has room, a few; see `plan.tiers`."""
        machine, corrections = self._seen(model)
        if machine is None:
            return
        entries = [entry for tier in self._store.tiers for entry in tier.entries(keys).values()]
        room = {tier.name: tier.capacity - tier.nbytes for tier in self._slow}
        pinned = {entry.key for entry in entries if entry.pinned}
        for key, tier in islice(promotions(entries, corrected(machine, corrections), room), PROMOTED):
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
            machine = measure(model, tiers, progress)
        self.learn(machine)
        return machine

    def _entries(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Entry]:
        """What the store has of these, at the level that it reads: others' bytes are not counted."""
        level, found = self._store.codec.name, self._store.lookup(keys)
        return {key: _at(entry, level) if level in entry.sizes else entry for key, entry in found.items()}

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

    def _seen(self, model: HFModel) -> tuple[MachineProfile | None, dict[str, float]]:
        """This machine's timings, and how many times as long tiers take by what answers took."""
        with self._lock:
            known = self._of(model)
            return known.machine, factors(known.seen)

    def _of(self, model: HFModel) -> _Known:
        """What is known of a model on this machine; the lock is held."""
        name = self._name(model.fingerprint, str(model.device), torch.get_num_threads())
        known, now = self._known.get(name), self._clock()
        if known is None or now - known.asked_s >= ASK_AGAIN_S:
            found = self._asked(name)
            if known is None or found not in (None, known.machine):
                known = self._known[name] = _Known(found, now)
            known.asked_s = now
        return known

    def _asked(self, name: str) -> MachineProfile | None:
        """What the book says; a book that cannot be read is no reason not to answer."""
        try:
            return MachineProfile.from_dict(self._booked(lambda book: book.get(name), None))
        except (StoreError, ValueError) as error:
            log.warning("The timings of this machine could not be read: %s", error)
            return None

    def _name(self, fingerprint: str, device: str, threads: int) -> str:
        """Timings are only as good as the machine, the libraries and the further tiers that they were taken with."""
        gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
        around = digest(platform.node(), gpu, *self._around)
        return f"machine-{fingerprint}-{device}-{threads}-{MACHINE_VERSION}-{around[:12]}"


def _at(entry: Entry, level: str) -> Entry:
    """The entry with what one level takes."""
    return replace(entry, sizes={level: entry.sizes[level]}) if len(entry.sizes) > 1 else entry
