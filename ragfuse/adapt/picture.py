"""The picture of a training: the distance to full prefill on held-out documents, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ragfuse.calibration.plots import saved


def draw_training(evaluations: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw the KL on held-out documents by step, with nothing recomputed, as a picture at
    `path`.
    """
    with saved(path, (7, 4)) as figure:
        axes = figure.add_subplot()
        axes.plot(
            [each["step"] for each in evaluations], [each["kl"] for each in evaluations], "o-"
        )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("steps")
        axes.set_ylabel("KL to full prefill (nats a token)")
        axes.set_title("Nothing recomputed, held-out documents (lower is better)", fontsize=10)
        axes.grid(True, alpha=0.3)
