"""Time to the first token: full prefill, fused, plain reuse and prefix caching of one prompt, side
by side.

Random tokens, since speed does not depend on words. The clock runs from the prompt being known (its
tokens and keys) until the logits of the first token exist: looking up, planning, loading, placing,
choosing and computing are all in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragfuse_bench.ideal import FORMULA, PREFIX_AWARE, Work
from ragfuse_bench.options import HEADLINE_CHUNKS, TtftOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.rounds import Runner, Times, speedup, thread_count
from ragfuse_bench.workload import Workload
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.runner import circumstances
from ragfuse.engine.engine import Ask, Engine
from ragfuse.errors import ModelError
from ragfuse.fuse.fusor import CachedRun
from ragfuse.fuse.select import Policy, policy_named
from ragfuse.hf.model import KVSource
from ragfuse.plan.evict import lru
from ragfuse.settings import Settings
from ragfuse.store import DiskTier, KVStore, MemoryTier, Tier
from ragfuse.types.prompt import Prompt
from ragfuse.types.sizes import UNLIMITED

RATIO_WORDS = (
    "r counts context rows that are not exact prefix: the first chunk stands where it was encoded"
    " and is never recomputed. mean_ratio is their share that was recomputed, as measured, over the"
    " layers from the check layer on."
)
PREFIX_WORDS = (
    "only the first chunk is reused, through ragfuse's own attention and with free loading; where"
    " that was slower than full prefill, full prefill is what is reported (prefix_measured_x has it"
    " as it was)"
)


def run_ttft(options: TtftOptions, console: Console) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the tables."""
    with thread_count(options.threads):
        model = fusable_model(options.model, options.dtype, options.device, options.home)
        with _store(options) as store, Engine(Settings(), model, store) as engine:
            bench = _Bench(options, engine, Runner(options.rounds, model.device, console))
            rows = [bench.figures(count) for count in options.chunks]
    result = _result(options, rows, circumstances(model.device, options.threads))
    show_ttft(result, console)
    return result


@contextmanager
def _store(options: TtftOptions) -> Iterator[KVStore]:
    """A store of one tier at the wanted place; its files are gone afterwards."""
    if options.kv != "disk":
        pinned, device = options.kv == "pinned", options.device if options.kv == "gpu" else "cpu"
        with KVStore([MemoryTier(UNLIMITED, lru, device=device, pin_memory=pinned)]) as store:
            yield store
        return
    options.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="bench-", dir=options.home, ignore_cleanup_errors=True
    ) as folder:
        tiers: list[Tier] = [DiskTier(folder, UNLIMITED, lru)]
        with KVStore(tiers) as store:
            yield store


class _Bench:
    """The chunks of the longest prompt, encoded alone and stored, and the prompts made of the first
    few of them.
    """

    def __init__(self, options: TtftOptions, engine: Engine, runner: Runner) -> None:
        self.options, self.engine, self.runner = options, engine, runner
        self.work = Workload(
            engine.model, max(options.chunks), options.chunk_tokens, options.question_tokens
        )
        self.first = self.work.encode([engine], runner.console)

    def figures(self, count: int) -> dict[str, Any]:
        """Everything measured on the prompt of `count` chunks."""
        prompt, options = self.work.prompt(self.engine, count), self.options
        fused = Ask(policy=options.policy_name, ratio=options.ratio)
        ready = self.engine.prepare(prompt, fused)
        if ready.plan.fallback_reason or ready.plan.misses:
            raise ModelError(f"The prompt was not fused: {ready.plan.explain()}.")
        cases: dict[str, Callable[[], object]] = {
            "full": lambda: self.engine.prepare(prompt, Ask(reuse=False)),
            "fused": lambda: self.engine.prepare(prompt, fused),
            "reuse": lambda: self.engine.prepare(prompt, Ask(ratio=0.0)),
            "prefix": lambda: self._prefix(prompt),
        }
        times = self.runner.measure(cases, f"{count} chunks")
        policy = policy_named(options.policy_name)
        return _figures(times, self._work(count, policy), ready.prefill.mean_ratio)

    def _prefix(self, prompt: Prompt) -> object:
        """Prefix caching: the first chunk from memory at no cost, everything after it computed."""
        runs = [CachedRun(0, 0, self.options.chunk_tokens, 0, blend=False)]
        source = KVSource([self.first])
        return self.engine.model.fuse(prompt.token_ids, prompt.positions, runs, source, "none", 0.0)

    def _work(self, count: int, policy: Policy) -> Work:
        options = self.options
        return Work(
            layers=self.engine.model.n_layers,
            chunks=count,
            chunk_tokens=options.chunk_tokens,
            suffix=options.question_tokens,
            ratio=options.nominal_ratio,
            check_layer=policy.check_layer,
            look=policy.wants == "attention",
        )


def _figures(times: Mapping[str, Times], work: Work, mean_ratio: float) -> dict[str, Any]:
    full, fused, prefix = times["full"], times["fused"], times["prefix"]
    better = [min(pair) for pair in zip(full.seconds, prefix.seconds, strict=True)]
    gain = speedup(full.seconds, fused.seconds)
    return {
        "chunks": work.chunks,
        "tokens": work.tokens,
        "speedup": gain,
        "efficiency": gain / work.ideal_speedup,
        "ideal_speedup": work.ideal_speedup,
        "ideal_prefix_aware": work.ideal_prefix_aware,
        "full_s": full.median_s,
        "fused_s": fused.median_s,
        "reuse_x": speedup(full.seconds, times["reuse"].seconds),
        "prefix_x": speedup(full.seconds, better),
        "prefix_measured_x": speedup(full.seconds, prefix.seconds),
        "speedup_wall": speedup(full.of("wall"), fused.of("wall")),
        "mean_ratio": mean_ratio,
        "cases": {name: each.as_dict() for name, each in times.items()},
    }


def _result(
    options: TtftOptions, rows: list[dict[str, Any]], around: Mapping[str, Any]
) -> dict[str, Any]:
    """The headline's figures on top, all prompts' below, and how they came about."""
    head = next((row for row in rows if row["chunks"] == HEADLINE_CHUNKS), rows[0])
    asked = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
    }
    del asked["home"]
    return {
        **head,
        "by_chunks": rows,
        "policy": options.policy_name,
        "clock": "wall" if options.device.startswith("cuda") else "cpu",
        "ratio_counts": RATIO_WORDS,
        "ideal_is": FORMULA,
        "ideal_prefix_aware_is": PREFIX_AWARE,
        "prefix_is": PREFIX_WORDS,
        "options": asked,
        "rounds": options.rounds,
        **around,
    }


CASES = (
    ("full", "full prefill", "none"),
    ("prefix", "prefix caching", "the first"),
    ("fused", "ragfuse", "all, some rows new"),
    ("reuse", "plain reuse", "all, nothing new"),
)


def show_ttft(result: Mapping[str, Any], console: Console) -> None:
    """The result as tables that need no manual."""
    clock = "CPU time" if result["clock"] == "cpu" else "wall time"
    options, head = result["options"], result
    table = Table(
        title=(
            f"Time to the first token, {head['tokens']} prompt tokens ({clock}, {result['rounds']}"
            " rounds)"
        )
    )
    for name in ("way", "median s", "min-max s", "wall s", "faster", "chunks reused"):
        table.add_column(name, justify="left" if name in ("way", "chunks reused") else "right")
    gains = {
        "full": 1.0,
        "prefix": head["prefix_x"],
        "fused": head["speedup"],
        "reuse": head["reuse_x"],
    }
    for case, name, what in CASES:
        spread, wall = (
            head["cases"][case][f"{result['clock']}_s"],
            head["cases"][case]["wall_s"]["median"],
        )
        times = (
            f"{spread['median']:.3f}",
            f"{spread['min']:.3f}-{spread['max']:.3f}",
            f"{wall:.3f}",
        )
        table.add_row(name, *times, f"{gains[case]:.2f}x", what)
    console.print(table)
    console.print(
        f"{head['chunks']} chunks of {options['chunk_tokens']} tokens and a question of"
        f" {options['question_tokens']}; policy {result['policy']}, {head['mean_ratio']:.1%} of the"
        " rows recomputed (of chunks that are no exact prefix). At best"
        f" {head['ideal_speedup']:.2f}x, reached {head['efficiency']:.0%} of it; at best"
        f" {head['ideal_prefix_aware']:.2f}x when the first chunk is never computed.",
        highlight=False,
    )
    if len(result["by_chunks"]) > 1:
        console.print(_by_chunks(result))


def _by_chunks(result: Mapping[str, Any]) -> Table:
    table = Table(title="Growth with the context")
    columns = (
        "chunks",
        "tokens",
        "full s",
        "ragfuse s",
        "ragfuse",
        "at best",
        "plain reuse",
        "prefix caching",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in result["by_chunks"]:
        seconds = (f"{row['full_s']:.3f}", f"{row['fused_s']:.3f}")
        factors = (row["speedup"], row["ideal_speedup"], row["reuse_x"], row["prefix_x"])
        table.add_row(
            str(row["chunks"]),
            str(row["tokens"]),
            *seconds,
            *(f"{factor:.2f}x" for factor in factors),
        )
    return table
