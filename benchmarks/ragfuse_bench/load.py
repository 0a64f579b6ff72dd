"""What reading ahead is worth: time to the first token from a slow tier, with and without a reading
thread.

CacheBlend 5.1: while one layer is fused the next ones are read, so that a slow device costs little.
Wall time, since waiting for a device is what is measured; random weights and tokens do, since
neither changes how long things take.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ragfuse_bench.options import LoadOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.rounds import Runner, Times, speedup, thread_count
from ragfuse_bench.throttle import ThrottledTier
from ragfuse_bench.workload import Workload
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.plots import model_in_title
from ragfuse.calibration.runner import circumstances
from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import ModelError
from ragfuse.hf.model import HFModel
from ragfuse.load.timings import forget_pages
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import DiskTier, KVStore, MemoryTier
from ragfuse.types.sizes import UNLIMITED

HEADLINE_MBPS = 100.0


def run_load(options: LoadOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the table."""
    with thread_count(options.threads):
        model = fusable_model(options.model, options.dtype, options.device, options.home)
        rows, nbytes = _measured(options, model, console)
    result = _result(options, rows, nbytes, circumstances(model.device, options.threads))
    _show(result, console)
    return result


def _measured(
    options: LoadOptions, model: HFModel, console: Console
) -> tuple[list[dict[str, Any]], int]:
    """A row for each speed, and the bytes of KV that a prompt reads."""
    options.home.mkdir(parents=True, exist_ok=True)
    work = Workload(model, options.chunks, options.chunk_tokens, options.question_tokens)
    runner = Runner(options.rounds, model.device, console)
    with ExitStack() as held:
        folder = Path(
            held.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=options.home))
        )
        disk = DiskTier(folder, UNLIMITED, lru)
        held.callback(disk.close)
        ahead, inline = ThrottledTier(disk, 0.0), ThrottledTier(disk, 0.0, slow=False)
        engines = {
            name: held.enter_context(Engine(Settings(), model, held.enter_context(KVStore([tier]))))
            for name, tier in (
                ("ram", MemoryTier(UNLIMITED, lru)),
                ("threaded", ahead),
                ("sync", inline),
            )
        }
        work.encode((engines["ram"], engines["threaded"]), console)
        cases = {name: _case(engine, work, options) for name, engine in engines.items()}
        rows = []
        for mbps in options.mbps:
            ahead.mbps = inline.mbps = mbps
            rows.append(
                {
                    "mbps": mbps,
                    **_figures(
                        runner.measure(cases, f"{mbps:g} MB/s", lambda: forget_pages(folder))
                    ),
                }
            )
        return rows, disk.nbytes


def _case(engine: Engine, work: Workload, options: LoadOptions) -> Callable[[], object]:
    """One prefill; ModelError if it was not fused whole."""
    prompt, ask = work.prompt(engine), Ask(policy=options.policy, ratio=options.ratio)

    def case() -> object:
        ready = engine.prepare(prompt, ask)
        if ready.plan.fallback_reason or ready.plan.misses:
            raise ModelError(f"The prompt was not fused: {ready.plan.explain()}.")
        return ready

    return case


def _figures(times: Mapping[str, Times]) -> dict[str, Any]:
    """Medians by the wall, and each way over memory, paired round by round."""
    ram = times["ram"].of("wall")
    medians = {f"{name}_s": each.as_dict()["wall_s"]["median"] for name, each in times.items()}
    over = {
        f"{name}_over_ram": speedup(times[name].of("wall"), ram) for name in ("threaded", "sync")
    }
    return {**medians, **over, "cases": {name: each.as_dict() for name, each in times.items()}}


def _result(
    options: LoadOptions, rows: list[dict[str, Any]], nbytes: int, around: Mapping[str, Any]
) -> dict[str, Any]:
    """The headline's figures on top, every speed below."""
    head = min(rows, key=lambda row: abs(float(row["mbps"]) - HEADLINE_MBPS))
    asked = {
        name: getattr(options, name) for name in ("model", "dtype", "device", "policy", "ratio")
    }
    sizes = {
        name: getattr(options, name)
        for name in ("chunks", "chunk_tokens", "question_tokens", "rounds")
    }
    figures = {name: head[name] for name in ("threaded_over_ram", "sync_over_ram", "mbps")}
    return {
        **figures,
        "nbytes": nbytes,
        "by_mbps": rows,
        "clock": "wall",
        **asked,
        **sizes,
        **around,
    }


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title=(
            f"Time to the first token while {result['nbytes'] / 1e6:.1f} MB of KV are read (wall"
            " time)"
        )
    )
    for name in (
        "MB/s",
        "from memory s",
        "read ahead s",
        "over memory",
        "read when used s",
        "over memory",
    ):
        table.add_column(name, justify="right")
    for row in result["by_mbps"]:
        threaded, sync = f"{row['threaded_over_ram']:.2f}x", f"{row['sync_over_ram']:.2f}x"
        seconds = [f"{row[name]:.3f}" for name in ("ram_s", "threaded_s", "sync_s")]
        table.add_row(f"{row['mbps']:g}", seconds[0], seconds[1], threaded, seconds[2], sync)
    console.print(table)
    model = model_in_title(result["model"])
    console.print(
        f"{model}, {result['chunks']} chunks of {result['chunk_tokens']} tokens, {result['policy']}"
        f" at {result['ratio']:.0%}, {result['rounds']} rounds; files cold before each,"
        " checksums on.",
        highlight=False,
    )
