"""How well the loading controller foresees: predicted against measured time to the first token, and
its ratio.

Many plans of random sizes from tiers of several speeds, each done and timed; then, at each speed, a
sweep over the ratio for the largest one that adds no delay, beside the one that is chosen
(CacheBlend 5.1).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from ragfuse_bench.options import ControllerOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.rig import Rig, foreseen
from ragfuse_bench.rounds import Runner, thread_count
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.engine.engine import Ask, Engine
from ragfuse.hf.model import HFModel
from ragfuse.plan.controller import settle
from ragfuse.telemetry.progress import progress
from ragfuse.types.prompt import Prompt

SIZES = (128, 256, 384, 512)
"""Tokens of a chunk; a prompt's chunks are alike."""
MOST = 8
"""Chunks of the longest prompt."""
ASKED = (("auto", None), ("auto", None), ("lexical", 0.1), ("query", 0.1), ("hkvd", 0.3))
"""Policies and ratios of plans, in turn: what is left to the controller, and what was asked for."""
SWEEP = 6, 512
"""Chunks and tokens of each, of the prompt whose ratio is swept."""
STEP, TIE = 0.02, 1.02
BEYOND, PATIENCE = 1.15, 3
"""A sweep ends when so many ratios in a row take so much longer than the least."""


def run_controller(options: ControllerOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the tables."""
    options.home.mkdir(parents=True, exist_ok=True)
    with thread_count(options.threads), ExitStack() as held:
        model = fusable_model(options.model, options.dtype, options.device, options.home)
        found = _Bench(options, model, console, held)
        plans, sweeps = found.plans(), found.sweeps()
    errors = sorted(abs(plan["predicted_s"] / plan["measured_s"] - 1) for plan in plans)
    result = {
        "median_abs_err": median(errors),
        "p90_abs_err": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "ratio_gap_max": max(
            (sweep["gap"] for sweep in sweeps if sweep["gap"] is not None), default=None
        ),
        "plans": len(plans),
        "by_plan": plans,
        "by_mbps": sweeps,
        "clock": "wall",
        **{name: getattr(options, name) for name in ("model", "dtype", "device", "rounds")},
        **circumstances(model.device, options.threads),
    }
    _show(result, console)
    return result


class _Bench:
    """The plans and the sweeps, on one rig."""

    def __init__(
        self, options: ControllerOptions, model: HFModel, console: Console, held: ExitStack
    ) -> None:
        self.options, self.console = options, console
        lines = {f"{mbps:g} MB/s": mbps for mbps in options.mbps}
        runner = Runner(options.rounds, model.device, console)
        self.rig = Rig(model, lines, SIZES, MOST, runner, options.home, held)
        self.engines = dict(zip(options.mbps, self.rig.engines.values(), strict=True))

    def plans(self) -> list[dict[str, Any]]:
        """Every plan with its predicted and its measured seconds (the median of the rounds)."""
        drawn, found = random.Random(0), []
        with progress(self.console) as bar:
            for index in bar.track(range(self.options.plans), description="plans"):
                mbps = self.options.mbps[index % len(self.options.mbps)]
                policy, ratio = ASKED[index // len(self.options.mbps) % len(ASKED)]
                size, chunks = drawn.choice(SIZES), drawn.randint(2, MOST)
                engine, ask = self.engines[mbps], Ask(policy=policy, ratio=ratio)
                prompt = self.rig.works[size].prompt(engine, chunks)
                found.append(
                    {
                        "mbps": mbps,
                        "chunks": chunks,
                        "chunk_tokens": size,
                        **self._plan(engine, prompt, ask),
                    }
                )
        return found

    def _plan(self, engine: Engine, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        measured_s, ready = self.rig.seconds(engine, prompt, ask), engine.prepare(prompt, ask)
        forecast = foreseen(ready.plan)
        return {
            "policy": ready.plan.policy,
            "asked": ask.policy,
            "ratio": ready.plan.ratio,
            "bound": forecast.bound,
            "refusal": ready.plan.fallback_reason,
            "unread": len(ready.plan.unread),
            "predicted_s": forecast.ttft_s,
            "measured_s": measured_s,
        }

    def sweeps(self) -> list[dict[str, Any]]:
        """At each speed: the ratio that is chosen, and the best one by trying."""
        return [self._sweep(mbps, engine) for mbps, engine in self.engines.items()]

    def _sweep(self, mbps: float, engine: Engine) -> dict[str, Any]:
        chunks, size = SWEEP
        prompt = self.rig.works[size].prompt(engine, chunks)
        chosen = engine.prepare(prompt, Ask()).plan
        policy, least = chosen.policy, settle(chosen.policy, None)[1]
        points, late = [(least, 1.0)], 0
        while late < PATIENCE and points[-1][0] + STEP <= 1:
            ratio = round(points[-1][0] + STEP, 4)
            asks = (Ask(policy=policy, ratio=each) for each in (least, ratio))
            points.append((ratio, self.rig.slower(engine, prompt, *asks)))
            late = late + 1 if points[-1][1] > BEYOND else 0
        best = best_ratio(points)
        # else it did other things than what is swept
        alike = not chosen.fallback_reason and not chosen.unread
        return {
            "mbps": mbps,
            "policy": policy,
            "least": least,
            "chosen": chosen.ratio,
            "refusal": chosen.fallback_reason,
            "unread": len(chosen.unread),
            "best": best,
            "gap": abs(chosen.ratio - best) if alike else None,
            "sweep": [{"ratio": ratio, "over_least": over} for ratio, over in points],
        }


def best_ratio(points: Sequence[tuple[float, float]]) -> float:
    """The largest ratio of a sweep, (ratio, time) from the least on, that takes no longer than the
    least but a tie.

    A later point that happens to be quick does not count behind one that was late.
    """
    least, base = points[0]
    for ratio, seconds in points:
        if seconds > TIE * base:
            break
        least = ratio
    return least


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="The ratio, by the speed of the tier")
    for name in ("MB/s", "policy", "least", "chosen", "best by trying", "plans", "median error"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in result["by_mbps"]:
        mine = [
            abs(p["predicted_s"] / p["measured_s"] - 1)
            for p in result["by_plan"]
            if p["mbps"] == row["mbps"]
        ]
        error = f"{median(mine):.1%}" if mine else ""
        ratios = (f"{row[name]:.2f}" for name in ("least", "chosen", "best"))
        table.add_row(f"{row['mbps']:g}", row["policy"], *ratios, str(len(mine)), error)
    console.print(table)
    console.print(
        f"Time to the first token of {result['plans']} plans, predicted against measured: off by "
        f"{result['median_abs_err']:.1%} (median), {result['p90_abs_err']:.1%} (90%).",
        highlight=False,
    )
