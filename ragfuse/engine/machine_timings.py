"""What each model costs on this machine: kept in the store's catalog, and corrected by the times of
real answers.

`load.timings` takes the timings; `plan.observed` computes the corrections.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import torch

from ragfuse.hf.model import HFModel
from ragfuse.load.timings import Progress, measure
from ragfuse.plan.cost import COST_VERSION, CostModel
from ragfuse.plan.observed import Observed
from ragfuse.process.jobs import at_work
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog
from ragfuse.types.keys import digest
from ragfuse.types.plan import LoadPlan


@dataclass
class _Known:
    """The timings under one name: those measured, and what was observed."""

    measured: CostModel | None
    observed: Observed = field(default_factory=Observed)


class MachineTimings:
    """Timings by model, device and number of threads. Thread-safe.

    Args:
        tiers: URLs of tiers beside memory and disk; timings are valid for these only.
        catalog: The store's catalog, where timings are kept.
    """

    def __init__(self, tiers: Sequence[str], catalog: Catalog) -> None:
        self._catalog, self._lock = catalog, threading.Lock()
        self._known: dict[str, _Known] = {}
        self._environment = version("torch"), version("transformers"), *tiers

    def machine(self, model: HFModel) -> CostModel | None:
        """Return what was measured for torch's current number of threads, also by another process;
        None where nothing was.
        """
        with self._lock:
            return self._of(model).measured

    def costs(self, model: HFModel) -> CostModel | None:
        """Return what reading and computing cost now: what was measured, corrected by the times of
        real answers.

        Where nothing was measured it has no tiers, and computing goes by the last prefills; None
        before the first.
        """
        with self._lock:
            known = self._of(model)
            return known.observed.applied(known.measured, model.n_layers)

    def learn(self, costs: CostModel) -> None:
        """Use these timings from now on, here and in other processes on this store.

        Raises:
            StoreError: They cannot be written to the catalog.
        """
        name = self.name(costs.model, costs.device, costs.threads)
        with self._lock:
            self._known[name] = _Known(costs)
        self._catalog.strict.put(name, costs)

    @at_work()
    def measure(self, model: HFModel, store: KVStore, tenant: str, progress: Progress) -> CostModel:
        """Time a model and the tiers of a store on this machine, and use the timings from now on.

        Args:
            model: The loaded model.
            store: The store whose tiers are timed.
            tenant: The digest of model and tenant in keys, whose codecs are timed.
            progress: Called with what is being timed, and the share that is done (0 to 1).

        Raises:
            StoreError: The timings cannot be written to the catalog.
        """
        codecs = partial(store.levels.codec, model=tenant)
        costs = measure(model, store.tiers, progress, codecs=codecs)
        self.learn(costs)
        return costs

    def note(
        self, model: HFModel, plan: LoadPlan, load_s: float | None, compute_s: float | None
    ) -> None:
        """Note how long a plan took: loading its entries, and computing; None where that tells
        nothing.
        """
        with self._lock:
            known = self._of(model)
            if load_s is not None and plan.forecast is not None and known.measured is not None:
                known.observed = known.observed.loaded(known.measured, plan, load_s)
            if compute_s is not None:
                known.observed = known.observed.computed(plan, model.n_layers, compute_s)

    def name(self, fingerprint: str, device: str, threads: int) -> str:
        """Return the catalog name of timings.

        It covers the machine, the library versions and the tiers, so that timings are not used
        after a change of these.
        """
        gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
        environment = digest(platform.node(), gpu, *self._environment)
        return f"machine-{fingerprint}-{device}-{threads}-{COST_VERSION}-{environment[:12]}"

    def _of(self, model: HFModel) -> _Known:
        """Return the timings of a model on this machine; call it with the lock held."""
        name = self.name(model.fingerprint, str(model.device), torch.get_num_threads())
        known, found = self._known.get(name), self._catalog.get(name, CostModel)
        if known is None or found not in (None, known.measured):
            known = self._known[name] = _Known(found)
        return known
