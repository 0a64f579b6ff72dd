"""The demo's picture: time to the first token, and what happened to every token of each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragfuse.calibration import palette

TOKEN_KINDS = ("reused", "recomputed", "fresh")


def draw(report: Mapping[str, Any], target: Path) -> None:
    """Write the picture of a demo report as PNG."""
    from matplotlib.figure import Figure

    answers = [*report["questions"], report["long"]]
    labels = [f"{i + 1}" for i in range(len(report["questions"]))] + ["long"]
    figure = Figure(figsize=(12, 4 + 0.28 * len(answers)), layout="constrained")
    bars, strips = figure.subplots(2, 1, height_ratios=(3.2, 0.28 * len(answers)))
    _draw_bars(bars, answers, labels, report)
    _draw_strips(strips, answers, labels)
    figure.savefig(target, dpi=110)


def _draw_bars(
    axes: Any,
    answers: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    report: Mapping[str, Any],
) -> None:
    x = np.arange(len(answers))
    full = axes.bar(
        x - 0.2,
        [answer["ttft_full_s"] for answer in answers],
        0.4,
        color=palette.FULL_PREFILL,
        label="full prefill",
    )
    axes.bar(
        x + 0.2,
        [answer["ttft_fused_s"] for answer in answers],
        0.4,
        color=palette.RAGFUSE,
        label="ragfuse",
    )
    axes.bar_label(full, [f"{answer['speedup']:.1f}x" for answer in answers], fontsize=8)
    axes.set_xticks(x, labels)
    axes.set_ylabel("seconds to the first token")
    axes.set_xlabel("question")
    axes.set_title(
        f"First token {report['mean_speedup']:.1f}x faster on {len(answers) - 1} questions, "
        f"{report['long_speedup']:.1f}x on the long prompt; right: {report['right_fused']}, "
        f"by full prefill {report['right_full']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _draw_strips(axes: Any, answers: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    width = 600
    rows = np.stack([strip_of(answer["trace"], width) for answer in answers])
    axes.imshow(
        rows,
        aspect="auto",
        cmap=ListedColormap(palette.TOKEN_COLOURS),
        vmin=0,
        vmax=2,
        interpolation="nearest",
    )
    axes.set_yticks(range(len(answers)), labels)
    axes.set_xticks([0, width - 1], ["first token", "last token"])
    axes.set_title("every prompt, token by token")
    axes.set_ylabel("question")
    for line in range(1, len(answers)):
        axes.axhline(line - 0.5, color="white", linewidth=2)
    patches = [
        Patch(color=colour, label=name)
        for colour, name in zip(palette.TOKEN_COLOURS, TOKEN_KINDS, strict=True)
    ]
    axes.legend(
        handles=patches, ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08)
    )


def strip_of(trace: Mapping[str, Any], width: int) -> Any:
    """Return the kind of token in each of `width` columns of a prompt, as indices into
    `TOKEN_KINDS`.
    """
    kinds = np.full(trace["tokens"], 2)
    for segment in trace["segments"]:
        if segment["hit"]:
            kinds[segment["start"] : segment["start"] + segment["n_tokens"]] = 0
    kinds[list(trace["recomputed_rows"])] = 1
    return kinds[np.arange(width) * len(kinds) // width]
