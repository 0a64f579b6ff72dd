"""Sections of `docs/results.md` on several processes under Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import table

Result = Mapping[str, Any]


def ray(run: Result) -> Iterator[str]:
    """Yield what was simulated, encoded in bulk and served in this run."""
    if "simulation" in run:
        yield from _simulation(run["simulation"])
    if "bulk" in run:
        yield from _bulk(run["bulk"])
    if "serving" in run:
        yield from _serving(run["serving"])


def _simulation(found: Result) -> Iterator[str]:
    """Yield a row for each policy by which a simulated router chooses replicas."""
    trace, corpus = found["trace"], found["corpus"]
    yield f"The router simulated, over {trace['source']}, and over a corpus of {corpus['chunks']:,} chunks."
    yield ""
    shares = [(trace["replicas"], row) for row in trace["rows"]] + [(corpus["replicas"], corpus)]
    yield from table(
        ("replicas, memory of each", "chosen by", "chunk bytes found in memory", "requests / mean", "work / mean"),
        [
            [
                f"{replicas}, {row['memory_share']:.0%} of all chunks",
                policy["policy"],
                f"{policy['hit_share']:.1%}",
                f"{policy['requests_over_mean']:.2f}",
                f"{policy['work_over_mean']:.2f}",
            ]
            for replicas, row in shares
            for policy in row["policies"]
        ],
    )
    yield ""
    decisions = [
        f"{each['us']['p50']:.0f} us with {each['replicas']} replicas and {each['known']:,} chunks known"
        for each in found["decisions"]
    ]
    yield f"A decision by chunks takes {', '.join(decisions)} (medians)."


def _bulk(found: Result) -> Iterator[str]:
    """Yield a row for each way in which the same chunks were encoded."""
    one = found["one_process"]
    n = len(found["ray"]["workers"])
    yield (
        f"{found['chunks']} chunks ({one['tokens']:,} tokens, {one['nbytes'] / 1e9:.2f} GB) encoded three times, "
        "each into a store of its own. Seconds with the start of processes and models."
    )
    yield ""
    rows = [["one process", f"{one['seconds'] + one['load_s']:.1f}", "1.00", ""]]
    for name, way in ((f"{n} workers", "ray"), (f"{n} workers, one killed in the middle", "killed")):
        each = found[way]
        same = "yes" if each["same_keys"] and each["same_bytes"] else "NO"
        rows.append([name, f"{each['seconds']:.1f}", f"{each['over_one_process']:.2f}", same])
    yield from table(("encoded by", "s", "of one process's time", "the same keys and bytes"), rows)
    yield ""
    yield f"Run again over what was stored: {found['again']['encoded']} encoded, {found['again']['seconds']:.1f} s."


def _serving(found: Result) -> Iterator[str]:
    """Yield a row for each router of a real server with several replicas."""
    yield (
        f"{found['requests']} requests of {found['conversations']} conversations drawn from {found['source']}, memory "
        f"for {found['memory_share']:.0%} of all blocks in each replica, a pause of {found['pause_s']:.0f} s behind "
        f"each answer. One memory as large as all together would find {found['one_memory_share']:.1%}."
    )
    yield ""
    yield from table(
        ("replicas chosen by", "chunk bytes found in memory", "busiest / mean"),
        [[row["router"], f"{row['held_share']:.1%}", f"{row['requests_over_mean']:.2f}"] for row in found["rows"]],
    )
