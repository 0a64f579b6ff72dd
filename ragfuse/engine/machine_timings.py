"""This machine's timings with a model: as the store's catalog keeps them, and corrected by what answers took.

Nothing here measures or plans; how readings correct what was measured is told in `plan/observed.py`.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import torch

from ragfuse.hf.model import HFModel
from ragfuse.measure import Progress, measure
from ragfuse.plan.controller import blend_of
from ragfuse.plan.evict import lru
from ragfuse.plan.observed import LEAST_ROWS, Seen, corrected, factors, forgotten_after, row_s, rows_after, seen_after
from ragfuse.process.fork import ForkLock
from ragfuse.settings import Settings
from ragfuse.store import KVStore, Tier
from ragfuse.store.catalog import Catalog
from ragfuse.store.factory import open_tier
from ragfuse.types.keys import digest
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import MACHINE_VERSION, MachineProfile

log = logging.getLogger("ragfuse.engine")

ROWS = "rows-"
"""Begins the name, in a catalog, of what computing a row takes."""
TIMINGS_RECHECK_S = 60.0
"""Seconds after which the catalog is asked again for timings: another process may have measured meanwhile."""


@dataclass
class _Known:
    """Timings under one name, None if there are none, when the catalog was last asked for them, what was seen since.

    rows: seconds of a computed row in the last prefills, oldest first, also where nothing was measured.
    """

    machine: MachineProfile | None
    asked_s: float
    seen: Seen = field(default_factory=dict)
    rows: tuple[float, ...] = ()


class MachineTimings:
    """Timings by model, device and threads. `catalog` is the store's, `clock` gives seconds.

    tiers: the URLs of further tiers, which timings belong to. Threads may share it.
    """

    def __init__(self, tiers: Sequence[str], catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog, self._clock, self._lock = catalog, clock, ForkLock()
        self._known: dict[str, _Known] = {}
        self._around = version("torch"), version("transformers"), *tiers

    def machine(self, model: HFModel) -> MachineProfile | None:
        """As measured, on as many threads as torch has now; None where nothing was.

        The catalog is asked once a minute at most, so that what another process measures counts here too.
        """
        with self._lock:
            return self._of(model).machine

    def now(self, model: HFModel) -> tuple[MachineProfile | None, dict[str, float]]:
        """As measured, and how many times as long tiers take by what answers took."""
        with self._lock:
            known = self._of(model)
            return known.machine, factors(known.seen)

    def corrected(self, model: HFModel) -> MachineProfile | None:
        """Both in one."""
        machine, times = self.now(model)
        return corrected(machine, times) if machine is not None else None

    def learn(self, machine: MachineProfile) -> None:
        """Go by these from now on, here and in later processes on this store; StoreError where it cannot be written."""
        name = self.name(machine.model, machine.device, machine.threads)
        with self._lock:
            self._known[name] = _Known(machine, self._clock(), rows=self._rows(name))
        self._catalog.strict.put(name, machine.as_dict())

    def measure(
        self, model: HFModel, store: KVStore, settings: Settings, urls: Sequence[str], progress: Progress
    ) -> MachineProfile:
        """Time a model, the tiers of a store and those at `urls` on this machine, and go by that from now on."""
        with ExitStack() as held:
            tiers: list[Tier] = list(store.tiers)
            for url in urls:
                tiers.append(open_tier(url, settings, lru, [tier.name for tier in tiers]))
                held.callback(getattr(tiers[-1], "close", tuple))
            codecs = partial(store.levels.codecs, model=digest(model.fingerprint, settings.salt))
            machine = measure(model, tiers, progress, codecs=codecs)
        self.learn(machine)
        return machine

    def saw(self, model: HFModel, plan: LoadPlan, load_s: float) -> None:
        """Go on from what reading took, in seconds, for a plan that was carried out."""
        if plan.forecast is None:
            return
        with self._lock:
            known, read = self._of(model), {fetch.tier for fetch in plan.fetches}
            if known.machine is not None and known.machine.tiers.keys() >= read:
                known.seen = seen_after(known.seen, known.machine, plan.fetches, plan.layers_a_read, load_s)
                known.seen = forgotten_after(known.seen, [f.tier for f in plan.unread if f.tier not in read])

    def row_s(self, model: HFModel) -> float | None:
        """Seconds of a computed row, by what prefills took, for where nothing was measured; None: none was seen."""
        with self._lock:
            return row_s(self._of(model).rows)

    def computed(self, model: HFModel, plan: LoadPlan, seconds: float) -> None:
        """Go on from what computing took for a plan that was carried out; the first time, later processes do too."""
        rows = sum(blend_of(plan).rows(model.n_layers)) / model.n_layers if plan.fetches else len(plan.prompt)
        with self._lock:
            known = self._of(model)
            known.rows, before = rows_after(known.rows, rows, seconds), known.rows
            if known.rows and not before:
                self._keep(self._name_of(model), known.rows[0])

    def name(self, fingerprint: str, device: str, threads: int) -> str:
        """Timings are only as good as the machine, the libraries and the further tiers that they were taken with."""
        gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
        around = digest(platform.node(), gpu, *self._around)
        return f"machine-{fingerprint}-{device}-{threads}-{MACHINE_VERSION}-{around[:12]}"

    def _of(self, model: HFModel) -> _Known:
        """What is known of a model on this machine; the lock is held."""
        name = self._name_of(model)
        known, now = self._known.get(name), self._clock()
        if known is None or now - known.asked_s >= TIMINGS_RECHECK_S:
            found = self._asked(name)
            if known is None or found not in (None, known.machine):
                known = self._known[name] = _Known(found, now, rows=known.rows if known else self._rows(name))
            known.asked_s = now
        return known

    def _name_of(self, model: HFModel) -> str:
        return self.name(model.fingerprint, str(model.device), torch.get_num_threads())

    def _keep(self, name: str, row_s: float) -> None:
        """For later processes."""
        self._catalog.put(ROWS + name, {"row_s": row_s})

    def _rows(self, name: str) -> tuple[float, ...]:
        """What a process before this one saw."""
        try:
            found = self._catalog.get(ROWS + name) or {}
            return rows_after((), LEAST_ROWS, LEAST_ROWS * float(found.get("row_s", 0.0)))
        except (TypeError, ValueError) as error:
            log.warning("What computing takes on this machine could not be read: %s", error)
            return ()

    def _asked(self, name: str) -> MachineProfile | None:
        """What the catalog says, None where it says nothing."""
        try:
            return MachineProfile.from_dict(self._catalog.get(name))
        except ValueError as error:
            log.warning("The timings of this machine could not be read: %s", error)
            return None
