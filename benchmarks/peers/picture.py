"""The picture of the comparison: seconds to the first token by tokens of the prompt, a line a peer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragfuse.calibration import palette
from ragfuse.calibration.plots import model_in_title, saved

STYLES = MappingProxyType(
    {
        "hf": ("black", "o-"),
        "hf-prefix": (palette.FULL_PREFILL, "o:"),
        "llama.cpp": ("tab:green", "s-"),
        "llama.cpp-bf16": ("tab:olive", "s--"),
        "llama.cpp-reuse": ("tab:olive", "s:"),
        "vllm": (palette.PREFIX_CACHING, "^-"),
        "ragfuse": (palette.RAGFUSE, "D-"),
        "ragfuse-disk": ("tab:red", "D:"),
    }
)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result as a picture at `path`."""
    from matplotlib.ticker import FuncFormatter

    with saved(path, (7, 5)) as figure:
        axes = figure.add_subplot()
        for name in dict.fromkeys(row["peer"] for row in result["results"]):
            rows = sorted(
                (row for row in result["results"] if row["peer"] == name), key=lambda row: float(row["tokens"])
            )
            color, style = STYLES.get(name, ("tab:purple", "x-"))
            axes.plot([row["tokens"] for row in rows], [row["wall_s"] for row in rows], style, color=color, label=name)
        tokens = sorted({row["tokens"] for row in result["results"]})
        plain = FuncFormatter(lambda value, position: f"{value:g}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
        axes.tick_params(axis="y", which="minor", labelsize=8)
        axes.set_xticks(tokens, [f"{each:,.0f}" for each in tokens])
        axes.set_ylim(bottom=0.7 * min(row["wall_s"] for row in result["results"]))
        axes.set_xlabel("prompt tokens (recurring chunks in changing order, and a question)")
        axes.set_ylabel("seconds until the first token, by the wall")
        threads = result["threads"]
        axes.set_title(f"{model_in_title(result['model'])}, {threads} thread{'s' * (threads > 1)}")
        axes.grid(True, alpha=0.3)
        figure.legend(fontsize=8, loc="outside lower center", ncols=4)
