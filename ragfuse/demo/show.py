"""What the demo prints: each question with both answers, and all of them in one table."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

BAR_CHARS = 24
"""Characters of the longer bar."""
ANSWER = 60
"""Most characters of an answer."""
INDENT = 33 + BAR_CHARS
"""Characters before an answer in its line."""


def question_text(answer: Mapping[str, Any]) -> str:
    """Return a question with its known answer, both answers behind bars as long as the time to
    their first token, and what was reused.
    """
    # bars show what is printed
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
    """Return the table of all questions: mean times to the first token, of the long prompt too, and
    right answers.
    """
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
        f" {report['right_fused']}. The model is a small one; both say the same to {same} of them."
    )
    return "\n".join(lines)
