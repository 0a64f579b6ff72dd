"""The demo's picture: time to the first token, and what happened to every token of each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_COLOURS = (("reused", "#2a9d8f"), ("recomputed", "tab:orange"), ("computed", "#bab0ac"))
COLUMNS = 600
"""Columns of a strip."""


def draw(report: Mapping[str, Any], target: Path) -> None:
    """Write the picture of a demo report as PNG."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    answers = [*report["questions"], report["long"]]
    places, labels = np.arange(len(answers)), [*map(str, range(1, len(answers))), "long"]
    figure = Figure(figsize=(12, 4 + 0.28 * len(answers)), layout="constrained")
    bars, strips = figure.subplots(2, 1, height_ratios=(3.2, 0.28 * len(answers)))
    for of, name, shift, colour in (
        ("full", "full prefill", -0.2, "tab:grey"),
        ("fused", "ragfuse", 0.2, "tab:orange"),
    ):
        heights = [answer[f"ttft_{of}_s"] for answer in answers]
        drawn = bars.bar(places + shift, heights, 0.4, color=colour, label=name)
        if of == "full":
            bars.bar_label(drawn, [f"{answer['speedup']:.1f}x" for answer in answers], fontsize=8)
    bars.set_xticks(places, labels)
    bars.set_ylabel("seconds to the first token")
    bars.set_title(
        f"First token {report['mean_speedup']:.1f}x faster on {len(answers) - 1} questions, "
        f"{report['long_speedup']:.1f}x on the long prompt; right: {report['right_fused']}, "
        f"by full prefill {report['right_full']}"
    )
    bars.legend(frameon=False)
    strips.imshow(
        np.stack([strip_of(answer["trace"]) for answer in answers]),
        aspect="auto",
        cmap=ListedColormap([colour for _, colour in TOKEN_COLOURS]),
        vmin=0,
        vmax=2,
        interpolation="nearest",
    )
    strips.set_yticks(places, labels)
    strips.set_xticks([0, COLUMNS - 1], ["first token", "last token"])
    strips.set_ylabel("question")
    strips.hlines(places[1:] - 0.5, 0, COLUMNS - 1, color="white", linewidth=2)
    strips.legend(
        handles=[Patch(color=colour, label=name) for name, colour in TOKEN_COLOURS],
        ncols=3,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
    )
    figure.savefig(target, dpi=110)


def strip_of(trace: Mapping[str, Any]) -> Any:
    """Return the kind of token in each of `COLUMNS` columns of a prompt, as indices into
    `TOKEN_COLOURS`.
    """
    kinds = np.full(trace["tokens"], 2)
    for segment in trace["segments"]:
        if segment["hit"]:
            kinds[segment["start"] : segment["start"] + segment["n_tokens"]] = 0
    kinds[list(trace["recomputed_rows"])] = 1
    return kinds[np.arange(COLUMNS) * len(kinds) // COLUMNS]
