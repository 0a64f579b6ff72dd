"""This machine's timings with each model: kept in the store's catalog, and corrected by the times of real answers.

`ragfuse.measure` takes the timings; `plan/observed.py` computes the corrections.
"""

from __future__ import annotations

import logging
import platform
import threading
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
from ragfuse.plan.estimate import Estimate
from ragfuse.plan.evict import lru
from ragfuse.plan.observed import (
    MIN_PREFILL_ROWS,
    Seen,
    by_rows,
    corrected,
    factors,
    forgotten_after,
    rows_after,
    seen_after,
)
from ragfuse.process.exit import at_work
from ragfuse.settings import Settings
from ragfuse.store import KVStore, Tier
from ragfuse.store.catalog import Catalog
from ragfuse.store.factory import open_tier
from ragfuse.types.keys import digest
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import MACHINE_VERSION, MachineProfile

log = logging.getLogger("ragfuse.engine")

ROWS = "rows-"
"""Prefix of the catalog name under which the seconds per computed row are kept."""
TIMINGS_RECHECK_S = 60.0
"""Seconds after which the catalog is asked for timings again, as another process may have measured since."""


@dataclass
class _Known:
    """The timings under one name.

    Args:
        machine: The measured timings; None where nothing was measured.
        checked_s: When the catalog was last asked for them.
        seen: Readings of loading times since then.
        rows: Seconds per computed row in the last prefills, oldest first; also without measured timings.
    """

    machine: MachineProfile | None
    checked_s: float
    seen: Seen = field(default_factory=dict)
    rows: tuple[float, ...] = ()


class MachineTimings:
    """Timings by model, device and number of threads. Thread-safe.

    Args:
        tiers: URLs of tiers beside memory and disk; timings are valid for these only.
        catalog: The store's catalog, where timings are kept.
        clock: Returns seconds.
    """

    def __init__(self, tiers: Sequence[str], catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog, self._clock, self._lock = catalog, clock, threading.Lock()
        self._known: dict[str, _Known] = {}
        self._environment = version("torch"), version("transformers"), *tiers

    def machine(self, model: HFModel) -> MachineProfile | None:
        """Return the measured timings for torch's current number of threads; None where nothing was measured.

        The catalog is asked again after a minute, so that timings measured by another process count here too.
        """
        with self._lock:
            return self._of(model).machine

    def now(self, model: HFModel) -> tuple[MachineProfile | None, dict[str, float]]:
        """Return the measured timings, and the factors to multiply them by for tiers that differ in real answers."""
        with self._lock:
            known = self._of(model)
            return known.machine, factors(known.seen)

    def corrected(self, model: HFModel) -> MachineProfile | None:
        """Return the measured timings, corrected by the times of real answers; None where nothing was measured."""
        machine, times = self.now(model)
        return corrected(machine, times) if machine is not None else None

    def learn(self, machine: MachineProfile) -> None:
        """Use these timings from now on, here and in other processes on this store.

        Raises:
            StoreError: They cannot be written to the catalog.
        """
        name = self.name(machine.model, machine.device, machine.threads)
        with self._lock:
            self._known[name] = _Known(machine, self._clock(), rows=self._rows(name))
        self._catalog.strict.put(name, machine.as_dict())

    @at_work()
    def measure(
        self, model: HFModel, store: KVStore, settings: Settings, urls: Sequence[str], progress: Progress
    ) -> MachineProfile:
        """Time a model, the tiers of a store and those at `urls` on this machine, and use the timings from now on.

        Args:
            model: The loaded model.
            store: The store whose tiers are timed.
            settings: Settings of the tiers at `urls`.
            urls: URLs of tiers beside those of the store.
            progress: Called with what is being timed, and the share that is done (0 to 1).

        Raises:
            StoreError: The timings cannot be written to the catalog.
        """
        with ExitStack() as held:
            tiers: list[Tier] = list(store.tiers)
            for url in urls:
                tiers.append(open_tier(url, settings, lru, [tier.name for tier in tiers]))
                held.callback(getattr(tiers[-1], "close", tuple))
            codecs = partial(store.levels.codecs, model=digest(model.fingerprint, settings.salt))
            machine = measure(model, tiers, progress, codecs=codecs)
        self.learn(machine)
        return machine

    def note_load(self, model: HFModel, plan: LoadPlan, load_s: float) -> None:
        """Add a reading: loading the entries of this plan took `load_s` seconds."""
        if plan.forecast is None:
            return
        with self._lock:
            known, read = self._of(model), {fetch.tier for fetch in plan.fetches}
            if known.machine is not None and known.machine.tiers.keys() >= read:
                known.seen = seen_after(known.seen, known.machine, plan.fetches, plan.layers_a_read, load_s)
                known.seen = forgotten_after(known.seen, [f.tier for f in plan.unread if f.tier not in read])

    def estimate(self, model: HFModel) -> Estimate | None:
        """Return the estimate for this machine, corrected by the times of real answers.

        Where nothing was measured it goes by the seconds per row of the last prefills; None before the first of them.
        """
        if (machine := self.corrected(model)) is not None:
            return Estimate(machine)
        with self._lock:
            rows = self._of(model).rows
        return by_rows(rows, model.n_layers) if rows else None

    def note_compute(self, model: HFModel, plan: LoadPlan, seconds: float) -> None:
        """Add a reading: computing this plan took `seconds`. The first one is written to the catalog as well."""
        rows = sum(blend_of(plan).rows(model.n_layers)) / model.n_layers if plan.fetches else len(plan.prompt)
        with self._lock:
            known = self._of(model)
            known.rows, before = rows_after(known.rows, rows, seconds), known.rows
            if known.rows and not before:
                self._keep(self._name_of(model), known.rows[0])

    def name(self, fingerprint: str, device: str, threads: int) -> str:
        """Return the catalog name of timings.

        It covers the machine, the library versions and the tiers, so that timings are not used after a change of these.
        """
        gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
        environment = digest(platform.node(), gpu, *self._environment)
        return f"machine-{fingerprint}-{device}-{threads}-{MACHINE_VERSION}-{environment[:12]}"

    def _of(self, model: HFModel) -> _Known:
        """Return the timings of a model on this machine; call it with the lock held."""
        name = self._name_of(model)
        known, now = self._known.get(name), self._clock()
        if known is None or now - known.checked_s >= TIMINGS_RECHECK_S:
            found = self._stored(name)
            if known is None or found not in (None, known.machine):
                known = self._known[name] = _Known(found, now, rows=known.rows if known else self._rows(name))
            known.checked_s = now
        return known

    def _name_of(self, model: HFModel) -> str:
        return self.name(model.fingerprint, str(model.device), torch.get_num_threads())

    def _keep(self, name: str, row_s: float) -> None:
        """Write the seconds per row to the catalog, for later processes."""
        self._catalog.put(ROWS + name, {"row_s": row_s})

    def _rows(self, name: str) -> tuple[float, ...]:
        """Return the readings per row that an earlier process wrote to the catalog: one or none."""
        try:
            found = self._catalog.get(ROWS + name) or {}
            return rows_after((), MIN_PREFILL_ROWS, MIN_PREFILL_ROWS * float(found.get("row_s", 0.0)))
        except (TypeError, ValueError) as error:
            log.warning(
                "The saved compute speed of this machine could not be read; the next prefills time it again: %s", error
            )
            return ()

    def _stored(self, name: str) -> MachineProfile | None:
        """Return the timings in the catalog; None where there are none, or they cannot be read."""
        try:
            return MachineProfile.from_dict(self._catalog.get(name))
        except ValueError as error:
            log.warning("The saved timings of this machine could not be read; run `ragfuse measure` again: %s", error)
            return None
