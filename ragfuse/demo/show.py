"""What the demo prints: each question with both answers, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Return the mean times to the first token, and how many answers are right."""
    full, fused = report["mean_ttft_full_s"], report["mean_ttft_fused_s"]
    questions = report["questions"]
    same = sum(question["answer_full"] == question["answer_fused"] for question in questions)
    return (
        f"Of {len(questions)} questions, on average: first token after {full:.2f} s by full"
        f" prefill, {fused:.2f} s by ragfuse, {full / fused:.1f} times as fast. Right answers: full"
        f" prefill {report['right_full']}, ragfuse {report['right_fused']}. The model is a small"
        f" one; both say the same to {same} of them."
    )
