"""Answers for people: the trace as a table, and the prompt as a coloured strip."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragfuse.core import Trace

REUSED, RECOMPUTED, FRESH = "blue", "dark_orange", "grey50"


def show_trace(console: Console, trace: Trace) -> None:
    """What was reused, from where, and why not."""
    table = Table("segment", "tokens", "from", "recomputed", "why", box=None, pad_edge=False, title_justify="left")
    for segment in trace.segments:
        where = f"{segment.tier}, {segment.nbytes / 1e6:.1f} MB" if segment.hit else "computed"
        again = "exact prefix" if segment.exact else f"{segment.recomputed} rows" if segment.hit else "all"
        name = Path(segment.source).name if segment.source else segment.kind
        table.add_row(name, str(segment.n_tokens), where, again if segment.kind == "chunk" else "", segment.why)
    console.print(table)
    console.print(strip(trace, min(console.width, 100)))
    console.print(
        f"{trace.tokens} tokens: [{REUSED}]{trace.tokens_reused} reused[/], [{RECOMPUTED}]{trace.tokens_recomputed} "
        f"recomputed[/] (mean over layers, policy {trace.policy} at {trace.ratio:.0%}), "
        f"[{FRESH}]{trace.tokens_fresh} fresh[/]; first token after {trace.ttft_s:.2f} s"
        + (f"; {trace.refusal}" if trace.refusal else "")
    )


def strip(trace: Trace, width: int) -> Text:
    """The prompt from left to right: blue reused, orange where rows were recomputed, grey computed fresh."""
    recomputed = set(trace.recomputed_rows)
    cached = [s for s in trace.segments if s.hit]
    text = Text()
    for column in range(width):
        lo, hi = (
            column * trace.tokens // width,
            max((column + 1) * trace.tokens // width, column * trace.tokens // width + 1),
        )
        rows = range(lo, hi)
        if not any(s.start <= lo < s.start + s.n_tokens for s in cached):
            style = FRESH
        else:
            style = RECOMPUTED if sum(row in recomputed for row in rows) * 4 >= len(rows) else REUSED
        text.append("█", style)
    return text
