"""Output of the demo: questions with two answers each, a table, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

BAR_CHARS = 24
"""Each question has two TTFT bars. The longer bar is this many characters wide."""
ANSWER = 60
"""Maximum printed characters of an answer."""
INDENT = 33 + BAR_CHARS
"""Column at which an answer begins."""


def question_text(answer: Mapping[str, Any]) -> str:
    """Return text: question, known answer, two generated answers, TTFT bars and token counts."""
    # bars show the printed, rounded values
    seconds = {of: round(answer[f"ttft_{of}_s"], 2) for of in ("full", "fused")}
    longest = max(*seconds.values(), 0.01)
    lines = [answer["question"], f"{'  known answer':{INDENT}}{answer['gold']}"]
    for name, of in (("full prefill", "full"), ("ragfuse", "fused")):
        bar = "\u2588" * max(1, round(BAR_CHARS * seconds[of] / longest))
        verdict = "right" if answer[f"right_{of}"] else "wrong"
        lines.append(
            f"  {name:12} {seconds[of]:5.2f} s  {bar:{BAR_CHARS}}  {verdict}"
            f"  {answer[f'answer_{of}'][:ANSWER]}"
        )
    reused, recomputed = answer["tokens_reused"], answer["tokens_recomputed"]
    lines.append(
        f"  First token {answer['speedup']:.1f} times as fast. Of {answer['tokens']:,} tokens"
        f" {reused:,} were reused, {recomputed:,} recomputed,"
        f" {answer['tokens'] - reused - recomputed:,} computed."
    )
    return "\n".join(lines)


def summary_text(report: Mapping[str, Any]) -> str:
    """Return the table of mean TTFT, the long prompt's TTFT, and the number of right answers."""
    questions, long = report["questions"], report["long"]
    means = [mean(each[f"ttft_{of}_s"] for each in questions) for of in ("full", "fused")]
    rows = (
        (f"{len(questions)} questions, on average", *means),
        ("the long prompt", long["ttft_full_s"], long["ttft_fused_s"]),
    )
    lines = [f"{'Seconds to the first token':30}{'full prefill':>14}{'ragfuse':>10}{'faster':>10}"]
    for what, full, fused in rows:
        lines.append(f"{what:30}{full:14.2f}{fused:10.2f}{full / fused:9.1f}x")
    same = sum(question["answer_full"] == question["answer_fused"] for question in questions)
    lines.append(
        f"Right answers of {len(questions)}: full prefill {report['right_full']}, ragfuse"
        f" {report['right_fused']}. The model is small; {same} answers are the same both ways."
    )
    return "\n".join(lines)


TOKEN_COLOURS = (("reused", "#2a9d8f"), ("recomputed", "tab:orange"), ("computed", "#bab0ac"))
COLUMNS = 600
"""Columns of the strip in the picture. The strip shows the kinds of one prompt's tokens."""


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
    """Return the kind of token in each of `COLUMNS` columns, as indices into `TOKEN_COLOURS`."""
    kinds = np.full(trace["tokens"], 2)
    for segment in trace["segments"]:
        if segment["hit"]:
            kinds[segment["start"] : segment["start"] + segment["n_tokens"]] = 0
    kinds[list(trace["recomputed_rows"])] = 1
    return kinds[np.arange(COLUMNS) * len(kinds) // COLUMNS]
