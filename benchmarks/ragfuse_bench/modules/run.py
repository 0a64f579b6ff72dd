"""`ragfuse bench modules`: uses, documents and lengths on one model, as one report.

What a case is, is told by `cases`; how one is asked, by `asked`; how it is shown, by `report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ragfuse_bench.modules.asked import engine_over, mean_of, measured
from ragfuse_bench.modules.cases import documents, uses
from ragfuse_bench.modules.lengths import slope
from ragfuse_bench.modules.report import show_modules
from ragfuse_bench.options import ModuleOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.quality.cases import Packing, set_name
from ragfuse_bench.rounds import Runner, thread_count
from rich.console import Console

from ragfuse.calibration.runner import circumstances
from ragfuse.engine.engine import Engine
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress


def run_modules(settings: Settings, options: ModuleOptions, console: Console) -> dict[str, Any]:
    """Measure it, show it, draw it; all of it in plain JSON types."""
    with thread_count(options.threads):
        with console.status("loading the model"):
            model = fusable_model(
                settings.model, settings.dtype, settings.device, settings.home, reads=True
            )
        with engine_over(settings, model) as engine:
            runner = Runner(options.rounds, model.device, console)
            found = _rows(engine, runner, options)
            lengths = slope(engine, runner, options.lengths)
            per_token = model.nbytes_per_token
        where = circumstances(model.device, options.threads)
    result = {
        "slope": lengths,
        "cases": found,
        "by_set": by_set(found),
        "mb_per_token": per_token / 1e6,
        "clock": runner.clock,
        "rounds": options.rounds,
        "model": settings.model,
        "dtype": settings.dtype,
        "options": {**asdict(options), "sets": [set_name(name) for name in options.sets]},
        **where,
    }
    show_modules(result, console)
    return result


def _rows(engine: Engine, runner: Runner, options: ModuleOptions) -> list[dict[str, Any]]:
    packing = Packing(lambda text: len(engine.tokens(text)), context_tokens=options.context_tokens)
    cases = [*uses(options.uses), *documents(options.sets, options.limit, packing)]
    with progress(runner.console) as bar:
        quiet = Runner(runner.rounds, runner.device, Console(quiet=True))
        return [
            measured(engine, case, quiet)
            for case in bar.track(cases, description="prompts over modules")
        ]


def by_set(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each data set: questions, mean times and scores both ways, how often the answers are the
    same.
    """
    found = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows if row["dataset"]):
        mine = [row for row in rows if row["dataset"] == dataset]
        full, cached = (sum(row[f"{way}_s"] for row in mine) for way in ("full", "cached"))
        means = {
            key: mean_of(mine, key)
            for key in ("tokens", "cached_share", "score_full", "score_cached", "same")
        }
        found.append({"dataset": dataset, "n": len(mine), "ttft_x": full / cached, **means})
    return found
