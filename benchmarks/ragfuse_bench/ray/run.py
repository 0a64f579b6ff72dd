"""`ragfuse bench ray`: all parts, printed, drawn, and as plain JSON types."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ragfuse_bench.ray.options import RayOptions
from ragfuse_bench.ray.simulate import POLICIES, lookup_us, simulate
from ragfuse_bench.ray.workload import PASSAGE_TOKENS, TimedRequest, conversations, questions
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ragfuse.calibration.plots import require_plotting, saved
from ragfuse.calibration.runner import circumstances
from ragfuse.ray.cluster import require_ray
from ragfuse.telemetry.progress import progress

MEMORY_SHARES = (0.02, 0.05, 0.1, 0.2)
"""Of all chunks of the trace, what the memory of each of two replicas holds."""
CORPUS_SHARE = 0.1
"""Of the corpus, what the memories of all replicas hold together."""
PER_S = 200.0
"""Questions a second over the corpus."""
KNOWN = ((10_000, 2), (10_000, 64), (1_000_000, 64))
"""(chunks that are known, replicas) for which the time of a decision is taken."""
CHUNKS_OF_A_PROMPT, DECISIONS = 6, 2000


def run_ray(options: RayOptions, console: Console) -> dict[str, Any]:
    """Run the parts; the result as plain JSON types."""
    import torch

    options = options.shortened()
    if options.plot is not None:
        require_plotting()
    if set(options.parts) - {"simulation"}:
        require_ray()
    result: dict[str, Any] = {}
    if "simulation" in options.parts:
        result["simulation"] = run_simulations(options, console)
        if options.plot is not None:
            draw(result["simulation"], options.plot)
    if set(options.parts) - {"simulation"}:
        from ragfuse_bench.ray.bulk import run_bulk
        from ragfuse_bench.ray.nodes import two_nodes
        from ragfuse_bench.ray.serving import run_serving

        with tempfile.TemporaryDirectory(prefix="ragfuse-ray-") as folder, two_nodes(Path(folder), console):
            stores = Path(folder) / "stores"  # apart from Ray's own folder, which all users may read
            if "bulk" in options.parts:
                result["bulk"] = run_bulk(options, stores, console)
            if "serving" in options.parts:
                result["serving"] = run_serving(options, stores, console)
    return {**result, "quick": options.quick, "seed": options.seed, **circumstances(torch.device("cpu"), 1)}


def run_simulations(options: RayOptions, console: Console) -> dict[str, Any]:
    """Two replicas over a trace of conversations, by the size of their memory; many over a large corpus."""
    source, trace = conversations(options.data, options.talks, 1.0, options.seed)
    trace = trace[: options.turns]
    distinct: dict[int, int] = {}
    for request in trace:
        distinct.update(request.chunks)
    all_tokens = sum(distinct.values())
    small = []
    for share in MEMORY_SHARES:
        row = _policies(trace, 2, int(share * all_tokens), f"2 replicas, memory {share:.0%}", console)
        small.append({"memory_share": share, "policies": row, "over_round_robin": _over_round_robin(row)})
    asked = questions(options.questions, options.corpus, PER_S, options.seed)
    capacity = int(CORPUS_SHARE * options.corpus * PASSAGE_TOKENS / options.replicas)
    large = _policies(asked, options.replicas, capacity, f"{options.replicas} replicas", console)
    decisions = [
        {"known": known, "replicas": n, "us": lookup_us(known, n, CHUNKS_OF_A_PROMPT, DECISIONS, options.seed)}
        for known, n in KNOWN
    ]
    result = {
        "trace": {"source": source, "requests": len(trace), "chunks": len(distinct), "replicas": 2, "rows": small},
        "corpus": {
            "replicas": options.replicas,
            "chunks": options.corpus,
            "questions": options.questions,
            "memory_share": CORPUS_SHARE,
            "policies": large,
            "over_round_robin": _over_round_robin(large),
        },
        "decisions": decisions,
    }
    _show(result, console)
    return result


def _policies(
    requests: Sequence[TimedRequest], n_replicas: int, capacity: int, what: str, console: Console
) -> list[dict[str, Any]]:
    rows = []
    with progress(console) as bar:
        for policy in POLICIES:
            task = bar.add_task(f"{what}: {policy}", total=len(requests))
            show = partial(_advance, bar, task)
            rows.append(simulate(requests, n_replicas, capacity, policy, show))
            bar.update(task, completed=len(requests))
    return rows


def _advance(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)


def _over_round_robin(rows: Sequence[Mapping[str, Any]]) -> float:
    shares = {row["policy"]: row["hit_share"] for row in rows}
    return float(shares["chunks"] / max(shares["round robin"], 1e-9))


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table("replicas", "memory", "policy", box=None)
    for column in ("found in memory", "requests/mean", "work/mean", "first token", "decision p50", "p99"):
        table.add_column(column, justify="right")
    groups = [(2, row["memory_share"], row["policies"]) for row in result["trace"]["rows"]]
    corpus = result["corpus"]
    for n_replicas, share, rows in [*groups, (corpus["replicas"], corpus["memory_share"], corpus["policies"])]:
        for row in rows:
            us = row["decision_us"]
            times = ("", "") if us is None else (f"{us['p50']:.0f} us", f"{us['p99']:.0f} us")
            over = (f"{row[key]:.2f}" for key in ("requests_over_mean", "work_over_mean"))
            first = f"{row['first_token_s']['p50']:.2f} s"
            found = f"{row['hit_share']:.1%}"
            table.add_row(str(n_replicas), f"{share:.0%}", row["policy"], found, *over, first, *times)
    console.print(table)
    for each in result["decisions"]:
        us = each["us"]
        console.print(
            f"A decision over {each['known']:,} chunks known of {each['replicas']} replicas takes {us['p50']:.0f} us "
            f"(99%: {us['p99']:.0f} us).",
            highlight=False,
        )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw hit shares by memory, hit shares and loads of many replicas, and decision times, at `path`."""
    with saved(path, (12, 4)) as figure:
        trace, corpus, times = figure.subplots(1, 3)
        rows = result["trace"]["rows"]
        for policy in POLICIES:
            found = [next(each for each in row["policies"] if each["policy"] == policy) for row in rows]
            trace.plot([row["memory_share"] for row in rows], [each["hit_share"] for each in found], "o-", label=policy)
        trace.set_xscale("log")
        trace.set_xticks(MEMORY_SHARES, [f"{share:.0%}" for share in MEMORY_SHARES])
        trace.minorticks_off()
        trace.set_xlabel("memory of each of 2 replicas, of all chunks")
        trace.set_ylabel("share of chunk bytes found in memory")
        trace.set_ylim(0, None)
        trace.legend(fontsize=8)
        named = result["corpus"]["policies"]
        labels = [row["policy"].replace(" ", "\n") for row in named]
        at = range(len(named))
        shares = [row["hit_share"] for row in named]
        drawn = corpus.bar([each - 0.2 for each in at], shares, 0.4, label="found in memory")
        corpus.bar_label(drawn, fmt="%.2f", fontsize=8)
        drawn = corpus.bar(
            [each + 0.2 for each in at], [row["work_over_mean"] for row in named], 0.4, label="busiest over mean work"
        )
        corpus.bar_label(drawn, fmt="%.2f", fontsize=8)
        corpus.axhline(1.5, color="black", linewidth=0.8, linestyle=":")
        corpus.set_xticks(at, labels)
        corpus.set_ylim(0, 2)
        corpus.set_title(f"{result['corpus']['replicas']} replicas, {result['corpus']['chunks']:,} chunks", fontsize=9)
        corpus.legend(fontsize=8, loc="upper left")
        decisions = result["decisions"]
        names = [f"{each['known']:,}\n{each['replicas']} replicas" for each in decisions]
        for shift, key in ((-0.2, "p50"), (0.2, "p99")):
            heights = [each["us"][key] for each in decisions]
            drawn = times.bar([each + shift for each in range(len(decisions))], heights, 0.4, label=key)
            times.bar_label(drawn, fmt="%.0f", fontsize=8)
        times.axhline(1000, color="black", linewidth=0.8, linestyle=":")
        times.set_yscale("log")
        times.set_xticks(range(len(decisions)), names)
        times.set_ylabel("microseconds of a decision, 6 chunks")
        times.set_title("chunks known to the router", fontsize=9)
        times.legend(fontsize=8)
