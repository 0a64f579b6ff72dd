"""The demo's picture: time to the first token, and what happened to every token of each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_COLOURS = ("#4c78a8", "#f58518", "#bab0ac")
TOKEN_KINDS = ("reused", "recomputed", "fresh")
FULL_COLOUR, FUSED = "#bab0ac", "#4c78a8"


def draw(report: Mapping[str, Any], target: Path) -> None:
    """Write the picture of a demo report as PNG."""
    from matplotlib.figure import Figure

    asked = [*report["questions"], report["long"]]
    labels = [f"{i + 1}" for i in range(len(report["questions"]))] + ["long"]
    figure = Figure(figsize=(12, 4 + 0.28 * len(asked)), layout="constrained")
    bars, strips = figure.subplots(2, 1, height_ratios=(3.2, 0.28 * len(asked)))
    _bars(bars, asked, labels, report)
    _strips(strips, asked, labels)
    figure.savefig(target, dpi=110)


def _bars(axes: Any, asked: Sequence[Mapping[str, Any]], labels: Sequence[str], report: Mapping[str, Any]) -> None:
    at = np.arange(len(asked))
    full = axes.bar(at - 0.2, [a["ttft_full_s"] for a in asked], 0.4, color=FULL_COLOUR, label="full prefill")
    axes.bar(at + 0.2, [a["ttft_fused_s"] for a in asked], 0.4, color=FUSED, label="ragfuse")
    axes.bar_label(full, [f"{a['speedup']:.1f}x" for a in asked], fontsize=8)
    axes.set_xticks(at, labels)
    axes.set_ylabel("seconds to the first token")
    axes.set_xlabel("question")
    axes.set_title(
        f"First token {report['mean_speedup']:.1f}x faster on {len(asked) - 1} questions, "
        f"{report['long_speedup']:.1f}x on the long prompt; right: {report['right_fused']}, "
        f"by full prefill {report['right_full']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _strips(axes: Any, asked: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    width = 600
    rows = np.stack([_strip(a["trace"], width) for a in asked])
    axes.imshow(rows, aspect="auto", cmap=ListedColormap(TOKEN_COLOURS), vmin=0, vmax=2, interpolation="nearest")
    axes.set_yticks(range(len(asked)), labels)
    axes.set_xticks([0, width - 1], ["first token", "last token"])
    axes.set_title("every prompt, token by token")
    axes.set_ylabel("question")
    for line in range(1, len(asked)):
        axes.axhline(line - 0.5, color="white", linewidth=2)
    patches = [Patch(color=colour, label=name) for colour, name in zip(TOKEN_COLOURS, TOKEN_KINDS, strict=True)]
    axes.legend(handles=patches, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _strip(trace: Mapping[str, Any], width: int) -> Any:
    """0 reused, 1 recomputed, 2 fresh for every one of `width` columns of a prompt."""
    kinds = np.full(trace["tokens"], 2)
    for segment in trace["segments"]:
        if segment["hit"]:
            kinds[segment["start"] : segment["start"] + segment["n_tokens"]] = 0
    kinds[list(trace["recomputed_rows"])] = 1
    return kinds[np.arange(width) * len(kinds) // width]
