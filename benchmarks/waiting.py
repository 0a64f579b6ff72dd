"""What people wait for, as sections of the page of results: streams over lines, conversations, a server under load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import number, table

Result = Mapping[str, Any]
WAYS = {"full": "full recompute", "prefix": "prefix caching", "ragfuse": "ragfuse"}


def streams(run: Result) -> Iterator[str]:
    """What `ragfuse bench stream` found."""
    kinds = " and ".join(f"{count} {kind}" for kind, count in run["kinds"].items())
    yield (
        f"{run['pieces']} pieces of {run['tokens'][0]:,} tokens over {run['traces']} lines ({kinds} ones). "
        f"At the equivalent of 3 Gbit/s {run['fixed']} gives the first token "
        f"{number(run['ttft_x_vs_text'], '.1f')} times faster than text and "
        f"{number(run['ttft_x_vs_int8'], '.1f')} times faster than 8 bits. {run['scale']['derived']}"
    )
    yield ""
    yield "".join(_lateness(each["paper_s"], each["violations"]) for each in run["deadlines"])
    yield ""
    rows = [
        [
            f"{each['paper_s']:g} s ({each['deadline_s']:.1f} s here)",
            f"{method} ({run['fixed']})" if method == "fixed" else method,
            f"{late:.0%}",
            f"{each['ttft_s'][method]:.2f} s",
            *(number(each[key][method]) for key in ("kl", "top1", "f1")),
        ]
        for each in run["deadlines"]
        for method, late in each["violations"].items()
    ]
    yield from table(("deadline", "method", "late", "first token", "KL", "top-1", "F1"), rows)


def _lateness(paper_s: float, late: Mapping[str, float]) -> str:
    """How often the adaptive stream is late, as a share of how often 8 bits are; a tenth is wanted."""
    if not late["int8"]:
        return f"With {paper_s:g} s nobody waits for 8 bits too long. "
    share = late["adaptive"] / late["int8"]
    reached = "as was wanted" if share <= 0.1 else "where at most 0.1 was wanted"
    return f"With {paper_s:g} s adaptive streams are late {share:.3f} times as often as 8 bits, {reached}. "


def conversation(run: Result) -> Iterator[str]:
    """What `ragfuse bench conversation` found."""
    ppl = run["perplexity"]
    same = "the same token for token" if run["token_equal_fp32"] else "not all the same"
    yield (
        f"First token of later turns {run['ttft_reduction']:.0%} faster than recomputed, at least "
        f"{run['ttft_reduction_min']:.0%}; answers in float32 are {same}; in bfloat16 {run['top1_bf16']:.1%} of next "
        f"tokens. Perplexity after truncation {ppl['kept']:.3f}, recomputed {ppl['recomputed']:.3f}, with KV at its "
        f"old positions {ppl['naive']:.1f}, with kept KV without the first {ppl['n_sinks']} tokens {ppl['bare']:.3f}."
    )
    yield ""
    rows = [
        [str(turn["turn"]), f"{turn['tokens']:,}", f"{turn['reused']:,}", *(_timed(turn, key) for key in _TIMES)]
        for turn in run["turns"]
    ]
    yield from table(("turn", "tokens", "reused", "recomputed", "from the store", "faster"), rows)


_TIMES = {"full_s": ".2f", "history_s": ".3f", "reduction": ".0%"}


def _timed(turn: Result, key: str) -> str:
    return number(turn[key], _TIMES[key]) + ("" if key == "reduction" else " s") if key in turn else ""


def throughput(run: Result) -> Iterator[str]:
    """What `ragfuse bench throughput` found."""
    growth = run["rss_growth"]
    takes = "takes at least" if run["rates"]["ragfuse"]["at_least"] else "takes"
    yield (
        f"At a mean first token of {run['at_ttft_s']:.2f} s ragfuse {takes} "
        f"{number(run['rate_x_vs_full'], '.2f')} times the requests of full recompute and "
        f"{number(run['rate_x_vs_prefix'], '.2f')} times those of prefix caching. "
        f"Answers together: {run['batch']['together']:.1f} tokens a second, one by one {run['batch']['alone']:.1f} "
        f"({run['batch_x']:.2f} times). Requests lost: {run['lost']}. Growth of the process under load: "
        f"{'too short to tell' if growth is None else f'{growth:+.1%}'}."
    )
    yield ""
    rows = []
    for name, words in WAYS.items():
        told = run["methods"][name]
        rows.append([words, "alone", "", f"{told['alone_s']:.3f} s", "", ""])
        for load in told["loads"]:
            times = (f"{number(load[key])} s" if load[key] is not None else "" for key in ("mean_s", "p95_s"))
            rows.append([words, f"{load['rate']:.2f}", str(load["n"]), *times, str(load["lost"])])
    if busy := run["kept_busy"]:
        times = (f"{number(busy[key])} s" for key in ("mean_s", "p95_s"))
        rows.append(["ragfuse, kept busy", f"{busy['rate']:.2f}", str(busy["n"]), *times, str(busy["lost"])])
    yield from table(("way", "requests a second", "n", "mean first token", "95%", "lost"), rows)
