"""`ragfuse bench ray`: the router of replicas, simulated, as tables and as plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from ragfuse_bench.options import RayOptions
from ragfuse_bench.ray.simulate import POLICIES, lookup_us, simulate
from ragfuse_bench.ray.workload import PASSAGE_TOKENS, TimedRequest, conversations, questions
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ragfuse.calibration.runner import circumstances
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
    """Two replicas over conversations, by the size of their memory; many over a large corpus."""
    options = options.shortened()
    trace = conversations(options.talks, 1.0, options.seed)[: options.turns]
    distinct: dict[int, int] = {}
    for request in trace:
        distinct.update(request.chunks)
    all_tokens = sum(distinct.values())
    small = []
    for share in MEMORY_SHARES:
        row = _policies(
            trace, 2, int(share * all_tokens), f"2 replicas, memory {share:.0%}", console
        )
        small.append(
            {"memory_share": share, "policies": row, "over_round_robin": _over_round_robin(row)}
        )
    asked = questions(options.questions, options.corpus, PER_S, options.seed)
    capacity = int(CORPUS_SHARE * options.corpus * PASSAGE_TOKENS / options.replicas)
    large = _policies(asked, options.replicas, capacity, f"{options.replicas} replicas", console)
    decisions = [
        {
            "known": known,
            "replicas": n,
            "us": lookup_us(known, n, CHUNKS_OF_A_PROMPT, DECISIONS, options.seed),
        }
        for known, n in KNOWN
    ]
    result = {
        "trace": {
            "talks": options.talks,
            "requests": len(trace),
            "chunks": len(distinct),
            "replicas": 2,
            "rows": small,
        },
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
    return {
        **result,
        "quick": options.quick,
        "seed": options.seed,
        **circumstances(torch.device("cpu"), 1),
    }


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
    for column in (
        "found in memory",
        "requests/mean",
        "work/mean",
        "first token",
        "decision p50",
        "p99",
    ):
        table.add_column(column, justify="right")
    groups = [(2, row["memory_share"], row["policies"]) for row in result["trace"]["rows"]]
    corpus = result["corpus"]
    for n_replicas, share, rows in [
        *groups,
        (corpus["replicas"], corpus["memory_share"], corpus["policies"]),
    ]:
        for row in rows:
            us = row["decision_us"]
            times = ("", "") if us is None else (f"{us['p50']:.0f} us", f"{us['p99']:.0f} us")
            over = (f"{row[key]:.2f}" for key in ("requests_over_mean", "work_over_mean"))
            first = f"{row['first_token_s']['p50']:.2f} s"
            found = f"{row['hit_share']:.1%}"
            table.add_row(
                str(n_replicas), f"{share:.0%}", row["policy"], found, *over, first, *times
            )
    console.print(table)
    for each in result["decisions"]:
        us = each["us"]
        console.print(
            f"A decision over {each['known']:,} chunks known of {each['replicas']} replicas takes"
            f" {us['p50']:.0f} us (99%: {us['p99']:.0f} us).",
            highlight=False,
        )
