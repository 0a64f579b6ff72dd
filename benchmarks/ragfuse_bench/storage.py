"""The two figures of the CacheBlend paper that are about devices: what the controller picks (10), and every method on
memory and on slower devices (17).

Times only, on random chunks: where KV lies does not change what is answered. Quality is `paper.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Any

from ragfuse_bench.rig import Rig, foreseen

from ragfuse.calibration.runner import Runner
from ragfuse.engine.engine import Ask, Engine
from ragfuse.hf.model import HFModel
from ragfuse.plan.tiers import choose_tier, price_of
from ragfuse.settings import Settings
from ragfuse.types.prompt import Prompt

DISK = "disk"
DEVICES: Mapping[str, float] = MappingProxyType(
    {DISK: 0.0, "objects 200 MB/s": 200.0, "objects 100 MB/s": 100.0, "objects 50 MB/s": 50.0}
)
"""Devices beside memory: their speeds in MB/s; 0: the disk as it is. All are read cold."""
SLOWER = ("memory", DISK, "objects 100 MB/s")
POLICY, LEAST = "hkvd", 0.15
RATIOS = (0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
CHUNKS, TOKENS = 6, 512
TAKEN = MappingProxyType({(False, False): "", (True, False): "ratio", (False, True): "device", (True, True): "both"})
"""What the controller takes of a row: its ratio on that device, and the device for new chunks."""


def pick(model: HFModel, settings: Settings, runner: Runner) -> list[dict[str, Any]]:
    """Figure 10: a row for each device and ratio; which ratio the controller takes on it, and which device at 15%."""
    rows, prices = list[dict[str, Any]](), settings.prices.model_dump()
    with ExitStack() as held:
        rig = Rig(model, DEVICES, (TOKENS,), CHUNKS, runner, settings.home, held, memory=True)
        nbytes = next(iter(rig.engines[DISK].store.entries())).nbytes
        home = choose_tier(TOKENS, nbytes, rig.machine, list(rig.engines), prices, LEAST)
        tried = {name: _ratios(engine, rig, runner) for name, engine in rig.engines.items()}
        cases = {f"{name}, {ratio:.0%}": _case(rig, name, POLICY, ratio) for name in tried for ratio in tried[name]}
        times = runner.measure(cases, "devices and ratios", rig.chill)
        for name, engine in rig.engines.items():
            prompt = rig.works[TOKENS].prompt(engine)
            for ratio, is_taken in tried[name].items():
                forecast = foreseen(engine.prepare(prompt, Ask(policy=POLICY, ratio=ratio)).plan)
                is_home = name == home and ratio == LEAST
                rows.append(
                    {
                        "device": name,
                        "price": price_of(name, prices),
                        "ratio": ratio,
                        "load_s": forecast.load_s,
                        "fuse_s": forecast.recompute_s,
                        "predicted_s": forecast.ttft_s,
                        "ttft_s": median(times[f"{name}, {ratio:.0%}"].of("wall")),
                        "taken": TAKEN[is_taken, is_home],
                    }
                )
    return rows


def _ratios(engine: Engine, rig: Rig, runner: Runner) -> dict[float, bool]:
    """The ratios to try, fewer in a single round, and whether each is the one that the controller takes."""
    taken = engine.prepare(rig.works[TOKENS].prompt(engine), Ask(policy=POLICY)).plan.ratio
    every = RATIOS[:: 1 if runner.rounds > 1 else 2]
    return {ratio: ratio == taken for ratio in sorted({*every, taken})}


def by_device(
    model: HFModel, settings: Settings, runner: Runner, methods: Sequence[tuple[str, str, float | None]]
) -> list[dict[str, Any]]:
    """Figure 17: seconds to the first token for each device and each (name, policy, ratio), taking turns."""
    with ExitStack() as held:
        lines = {name: mbps for name, mbps in DEVICES.items() if name in SLOWER}
        rig = Rig(model, lines, (TOKENS,), CHUNKS, runner, settings.home, held, memory=True)
        rows = []
        for device in rig.engines:
            cases = {name: _case(rig, device, policy, ratio) for name, policy, ratio in methods}
            times = runner.measure(cases, device, rig.chill)
            full_s = median(times["full"].of("wall"))
            for name, _, ratio in methods:
                ttft_s = median(times[name].of("wall"))
                rows.append(
                    {"device": device, "method": name, "ratio": ratio, "ttft_s": ttft_s, "ttft_x": full_s / ttft_s}
                )
    return rows


def _case(rig: Rig, device: str, policy: str, ratio: float | None) -> Callable[[], object]:
    """One prefill by a method; prefix caching has the first chunk alone."""
    engine = rig.engines[device]
    prompt = rig.works[TOKENS].prompt(engine)
    if policy == "full":
        return lambda: engine.prepare(prompt, Ask(reuse=False))
    if policy == "prefix":
        first, *others = prompt.segments
        prompt, policy = Prompt((first, *(replace(each, kind="fresh", keys=()) for each in others))), "none"
    return lambda: engine.prepare(prompt, Ask(policy=policy, ratio=ratio))


def draw_pick(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time against ratio, a line for each device; rings where the controller stands."""
    for index, device in enumerate(dict.fromkeys(row["device"] for row in rows)):
        mine = [row for row in rows if row["device"] == device]
        home = ", taken for new chunks" if any(row["taken"] in ("device", "both") for row in mine) else ""
        label, color = f"{device}, ${mine[0]['price']:g} a GB and month{home}", f"C{index}"
        points = [(100 * row["ratio"], row["ttft_s"]) for row in mine]
        axes.plot(*zip(*points, strict=True), ".-", color=color, label=label)
        taken = [point for row, point in zip(mine, points, strict=True) if row["taken"] in ("ratio", "both")]
        axes.plot(*zip(*taken, strict=True), "o", color=color, markersize=10, fillstyle="none")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("recompute ratio (%), ringed: the controller's")
    axes.set_ylabel("seconds to the first token")
    axes.legend(fontsize=7)


def draw_by_device(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Score against time: a color for each method, a mark for each device."""
    devices, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("device", "method"))
    for row in rows:
        mark, color = "osD^v"[devices.index(row["device"]) % 5], f"C{methods.index(row['method'])}"
        label = row["method"] if row["device"] == devices[0] else None
        axes.plot([row["ttft_s"]], [row["score"]], mark, color=color, label=label)
    for index, device in enumerate(devices):
        axes.plot([], [], "osD^v"[index % 5], color="grey", label=device)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("F1 or ROUGE-L")
    axes.legend(fontsize=7)
