"""What modules are worth, as tables, in words and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragfuse.calibration import palette
from ragfuse.calibration.plots import model_in_title, saved

Result = Mapping[str, Any]


def show_modules(result: Result, console: Console) -> None:
    """The result as tables and in words."""
    console.print(_cases(result))
    console.print(_lengths(result))
    for row in result["cases"]:
        if not row["dataset"]:
            console.print(f"[bold]{row['name']}[/], all computed, then over its modules:", highlight=False)
            for way in ("full", "cached"):
                console.print(Text(f"  {' '.join(row[f'answer_{way}'].split())}"))
    for line in words(result):
        console.print(line, highlight=False)


def _cases(result: Result) -> Table:
    table = Table("prompt", title=f"First token over modules ({_clock(result)}, {result['rounds']} rounds)", box=None)
    for heading in ("tokens", "cached", "full s", "cached s", "faster", "full", "over modules", "same"):
        table.add_column(heading, justify="right")
    for row in (*(row for row in result["cases"] if not row["dataset"]), *result["by_set"]):
        name = row["name"] if "name" in row else f"{row['dataset']} (n = {row['n']})"
        times = ("", "") if "full_s" not in row else (f"{row['full_s']:.3f}", f"{row['cached_s']:.3f}")
        sizes = (f"{row['tokens']:,.0f}", f"{row['cached_share']:.1%}")
        table.add_row(name, *sizes, *times, f"{row['ttft_x']:.1f}x", *_scores(row))
    return table


def _scores(row: Result) -> tuple[str, str, str]:
    """Scores both ways and how often the answers are the same."""
    full, cached = (row.get(f"score_{way}") for way in ("full", "cached"))
    same = row["same"]
    told = "" if full is None or cached is None else f"{full:.3f}", "" if cached is None else f"{cached:.3f}"
    return *told, ("yes" if same else "no") if isinstance(same, bool) else f"{same:.0%}"


def _lengths(result: Result) -> Table:
    table = Table(title="First token against the length, nearly all of it cached", box=None)
    for heading in ("tokens", "cached", "full s", "cached s", "faster"):
        table.add_column(heading, justify="right")
    for row in result["slope"]:
        times = (f"{row['full_s']:.3f}", f"{row['cached_s']:.3f}", f"{row['ttft_x']:.1f}x")
        table.add_row(f"{row['tokens']:,}", f"{row['cached_share']:.1%}", *times)
    return table


def words(result: Result) -> list[str]:
    """What was found, in sentences."""
    lines, mostly, grows = [], result["mostly_cached"], result["growth"]
    if mostly is not None:
        lines.append(
            f"A prompt of {mostly['tokens']:,} tokens, {mostly['cached_share']:.1%} of them cached, begins "
            f"{mostly['ttft_x']:.1f} times faster."
        )
    if grows["full"] is not None:
        lines.append(
            f"Seconds grow with tokens to the power of {grows['full']:.2f} and {grows['cached']:.2f} (cached)."
        )
    lines.append(f"KV takes {result['mb_per_token']:.4f} MB a token.")
    if told := result["memory"]:
        lines += _memory(told)
    return [*lines, f"The paper: {result['paper']}"]


def _memory(told: Result) -> list[str]:
    peak, base, above = (
        {way: f"{told[key][way] / 1e6:,.0f} MB" for way in ("on", "off")}
        for key in ("peak_rss", "loaded_rss", "above_model")
    )
    module = f"{told['module_nbytes'] / 1e6:,.0f} MB of KV"
    lines = [
        f"{told['prompts']} prompts that share a module of {told['tokens']:,} tokens ({module}) take at most "
        f"{peak['on']} with sharing and {peak['off']} without: {told['batch_memory_ratio']:.0%}.",
        f"The loaded process alone has {base['on']} and {base['off']}; above that are {above['on']} and "
        f"{above['off']}: {_share(told['above_model_ratio'])}.",
    ]
    others = [(name, each) for name, each in told["by_allocator"].items() if name != told["allocator"]]
    for name, each in others:
        lines.append(
            f"That is glibc with {told['allocator']} (MALLOC_ARENA_MAX=1); by {name}, where each thread keeps what it "
            f"frees, it is {each['batch_memory_ratio']:.0%}, and {_share(each['above_model_ratio'])} above the process."
        )
    for each in told["by_tokens"]:
        lines.append(
            f"With a module of {each['tokens']:,} tokens ({each['module_nbytes'] / 1e6:,.0f} MB) it is "
            f"{each['batch_memory_ratio']:.0%}, and {_share(each['above_model_ratio'])} above the process."
        )
    return lines


def _share(value: float | None) -> str:
    return "an unknown share" if value is None else f"{value:.0%}"


def draw_modules(result: Result, path: Path) -> None:
    """Draw seconds by length, and how many times faster each prompt's first token comes, as a picture at `path`."""
    with saved(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2)
        draw_slope(left, result["slope"])
        uses = [(row["name"], row["ttft_x"]) for row in result["cases"] if not row["dataset"]]
        bars = [*uses, *((f"{row['dataset']}, n = {row['n']}", row["ttft_x"]) for row in result["by_set"])]
        names, factors = [name for name, _ in bars], [factor for _, factor in bars]
        right.bar_label(right.barh(names, factors, color=palette.RAGFUSE), fmt="%.1f", padding=3, fontsize=8)
        right.set_xlim(0, 1.12 * max(factors, default=1.0))
        right.invert_yaxis()
        right.set_xlabel(f"first token, times faster than full prefill ({_clock(result)})")
        figure.suptitle(
            f"{model_in_title(result['model'])} in {result['dtype']}, threads: {result['threads']}", fontsize=9
        )


def draw_slope(axes: Any, rows: Sequence[Result]) -> None:
    """Seconds against tokens, both ways."""
    for key, label, color in (
        ("full_s", "all computed", palette.FULL_PREFILL),
        ("cached_s", "modules cached", palette.RAGFUSE),
    ):
        axes.plot([row["tokens"] for row in rows], [row[key] for row in rows], "o-", color=color, label=label)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("seconds to the first token")
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)


def _clock(result: Result) -> str:
    return "CPU time" if result["clock"] == "cpu" else "wall time"
