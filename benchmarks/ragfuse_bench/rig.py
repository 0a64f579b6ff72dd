"""One folder of chunks behind lines of several speeds, an engine for each line, all with this
machine's timings.

For benchmarks that plan and measure the same prompt from devices of several speeds. What they ask
is their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from ragfuse_bench.rounds import Runner
from ragfuse_bench.throttle import ThrottledTier
from ragfuse_bench.workload import Workload
from rich.console import Console

from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel
from ragfuse.load.timings import forget_pages, measure
from ragfuse.plan.cost import CostModel
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import DiskTier, KVStore, MemoryTier, Tier
from ragfuse.telemetry.progress import progress
from ragfuse.types.plan import Forecast, LoadPlan
from ragfuse.types.prompt import Prompt
from ragfuse.types.sizes import UNLIMITED

QUESTION = 32
"""Tokens of a prompt's question."""


class Rig:
    """lines: megabytes a second by the line's name, 0: as fast as the disk is. memory: an engine of
    that name too.

    sizes: tokens of a chunk, for each of which `most` chunks lie on every line. `works` has them by
        size.
    """

    def __init__(
        self,
        model: HFModel,
        lines: Mapping[str, float],
        sizes: Sequence[int],
        most: int,
        runner: Runner,
        home: Path,
        held: ExitStack,
        *,
        memory: bool = False,
    ) -> None:
        self.model, self._runner, self._console = model, runner, runner.console
        home.mkdir(parents=True, exist_ok=True)
        self._folder = Path(
            held.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=home))
        )
        disk = DiskTier(self._folder, UNLIMITED, lru)
        held.callback(disk.close)
        tiers: list[Tier] = [MemoryTier(UNLIMITED, lru)] if memory else []
        tiers += [ThrottledTier(disk, mbps, name=name) for name, mbps in lines.items()]
        self.machine = _measured(
            model, tiers, most * max(sizes) + QUESTION, self.chill, self._console
        )
        self.engines: dict[str, Engine] = {}
        for tier in tiers:
            store = held.enter_context(KVStore([tier]))
            self.engines[tier.name] = held.enter_context(
                Engine(Settings(home=home, model=model.name), model, store)
            )
            self.engines[tier.name].timings.learn(self.machine)
        self.works = {size: Workload(model, most, size, QUESTION) for size in sizes}
        for work in self.works.values():
            work.encode([self.engines[tier.name] for tier in tiers[: 1 + memory]], self._console)

    def chill(self) -> None:
        """The next read of anything is a cold one."""
        forget_pages(self._folder)

    def seconds(self, engine: Engine, prompt: Prompt, ask: Ask) -> float:
        """Cold, the median of the rounds."""
        return median(self._once(engine, prompt, ask) for _ in range(self._runner.rounds))

    def slower(self, engine: Engine, prompt: Prompt, one: Ask, other: Ask) -> float:
        """How many times as long the other takes, in the same rounds."""
        return median(
            1 / self._once(engine, prompt, one) * self._once(engine, prompt, other)
            for _ in range(self._runner.rounds)
        )

    def _once(self, engine: Engine, prompt: Prompt, ask: Ask) -> float:
        self.chill()
        return self._runner.once(partial(engine.prepare, prompt, ask)).wall_s


def _measured(
    model: HFModel,
    tiers: Sequence[Tier],
    longest: int,
    chill: Callable[[], object],
    console: Console,
) -> CostModel:
    with progress(console) as bar:
        task = bar.add_task("timing this machine", total=100)

        def show(what: str, done: float) -> None:
            bar.update(task, description=what, completed=round(100 * done))

        return measure(model, tiers, show, longest=longest, cool=chill)


def foreseen(plan: LoadPlan) -> Forecast:
    """What a plan says of its times; ModelError where it says nothing, which a rig's plans always
    do.
    """
    if plan.forecast is None:
        raise ModelError(
            "The plan foresees nothing, although this machine was timed; please report this."
        )
    return plan.forecast
