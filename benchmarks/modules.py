"""Prompts over modules, as a section of the page of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import number, table

Result = Mapping[str, Any]


def modules(run: Result) -> Iterator[str]:
    """What `ragfuse bench modules` found."""
    grows, mostly = run["growth"], run["mostly_cached"]
    powers = [number(grows[way], ".2f") for way in ("full", "cached")]
    if mostly is not None:
        share = f"{mostly['tokens']:,} tokens, {mostly['cached_share']:.1%} of them cached"
        yield f"{mostly['ttft_x']:.1f} times faster at {share}."
    yield (
        f"Seconds grow with tokens to the power of {powers[0]}, of the cached prompt {powers[1]}. "
        f"KV takes {run['mb_per_token']:.4f} MB a token."
    )
    yield ""
    columns = ("prompt", "tokens", "cached", "faster", "score, full", "score, cached", "same answer")
    uses = [{**row, "same": float(row["same"])} for row in run["cases"] if not row["dataset"]]
    sets = [{**row, "name": f"{row['dataset']}, n = {row['n']}"} for row in run["by_set"]]
    yield from table(columns, [_module_row(row) for row in (*uses, *sets)])
    yield ""
    rows = [[f"{row['tokens']:,}", *(number(row[f"{way}_s"]) for way in ("full", "cached"))] for row in run["slope"]]
    yield from table(("tokens", "full s", "cached s"), rows)
    yield ""
    yield from _batch_memory(run["memory"])
    yield f"The paper: {run['paper']}"
    for row in run["cases"]:
        if not row["dataset"]:
            yield ""
            said = (" ".join(row[f"answer_{way}"].split()).replace("`", "'") for way in ("full", "cached"))
            yield f"{row['name']}, all computed and over its modules: " + " / ".join(f"`{text}`" for text in said)


def _module_row(row: Result) -> list[str]:
    scores = [number(row.get(f"score_{way}")) for way in ("full", "cached")]
    return [
        row["name"],
        f"{row['tokens']:,.0f}",
        f"{row['cached_share']:.1%}",
        f"{row['ttft_x']:.1f}x",
        *scores,
        f"{row['same']:.0%}",
    ]


def _batch_memory(told: Result) -> Iterator[str]:
    if not told:
        return
    yield f"{told['prompts']} prompts that share a module, each batch in a process of its own:"
    yield ""
    first = [(told["tokens"], name, each) for name, each in told["by_allocator"].items()]
    longer = [(each["tokens"], told["allocator"], each) for each in told["by_tokens"]]
    rows = [
        [
            f"{tokens:,} ({each['module_nbytes'] / 1e6:,.0f} MB)",
            f"{name}, sharing {way}",
            *(f"{each[key][way] / 1e6:,.0f} MB" for key in ("loaded_rss", "peak_rss", "above_model")),
            f"{each['batch_memory_ratio']:.0%}" if way == "on" else "",
            number(each["above_model_ratio"], ".0%") if way == "on" else "",
        ]
        for tokens, name, each in (*first, *longer)
        for way in ("on", "off")
    ]
    columns = ("tokens", "allocator", "loaded", "peak", "above loaded", "peak on / off", "above on / off")
    yield from table(columns, rows)
    yield ""
