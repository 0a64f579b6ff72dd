"""What the demo prints: each question with both answers, and bars as long as the time to the first
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from rich.console import Console
from rich.text import Text

from ragfuse.demo.answer import DemoAnswer
from ragfuse.demo.picture import strip_of

BAR_CHARS = 24
"""Characters of the longer bar."""
ANSWER = 60
"""Most characters of an answer."""
INDENT = 33 + BAR_CHARS
"""Characters before an answer in its line."""
FULL_STYLE, FUSED_STYLE = "grey50", "blue"
STRIP_STYLES = ("blue", "dark_orange", "grey50")
"""Colours of reused, recomputed and fresh tokens."""


def show_question(console: Console, answer: DemoAnswer) -> None:
    """Print a question with both answers, what was reused, and an empty line."""
    for line in question_lines(answer):
        console.print(line, soft_wrap=True)
    console.print()


def question_lines(answer: DemoAnswer) -> Iterator[Text]:
    """Yield the lines of a question: its text, the known answer, both answers with bars, and what
    was reused.
    """
    yield Text(answer.question, "bold")
    yield Text(f"{'  known answer':{INDENT}}{answer.gold}", "dim")
    # bars show what is printed
    full_s, fused_s = round(answer.ttft_full_s, 2), round(answer.ttft_fused_s, 2)
    slower = max(full_s, fused_s)
    for name, text, right, seconds, style in (
        ("full prefill", answer.answer_full, answer.right_full, full_s, FULL_STYLE),
        ("ragfuse", answer.answer_fused, answer.right_fused, fused_s, FUSED_STYLE),
    ):
        verdict = ("right", "green") if right else ("wrong", "red")
        begins = f"  {name:12} {seconds:5.2f} s  "
        yield Text.assemble(
            begins, bar(seconds, slower, style), "  ", verdict, f"  {text[:ANSWER]}"
        )
    fresh = answer.tokens - answer.tokens_reused - answer.tokens_recomputed
    yield Text(
        f"  {faster(answer.speedup)}. Of {answer.tokens:,} tokens {answer.tokens_reused:,} were"
        f" reused, {answer.tokens_recomputed:,} recomputed, {fresh:,} computed."
    )


def faster(speedup: float) -> str:
    """Return how much sooner or later the first token came, in words."""
    if speedup >= 1:
        return f"First token {speedup:.1f} times as fast"
    return f"First token {1 / speedup:.1f} times as slow"


def bar(seconds: float, longest: float, style: str) -> Text:
    """Return a bar for a time, padded to the length that the longest time has."""
    n = max(1, round(BAR_CHARS * seconds / longest)) if longest > 0 else 1
    return Text("\u2588" * n, style) + Text(" " * (BAR_CHARS - n))


def show_strip(console: Console, answer: DemoAnswer) -> None:
    """Print a prompt token by token: what was reused, what was recomputed, what was computed."""
    width = min(console.width - 2, 100)
    strip = Text("  ")
    for kind in strip_of(answer.trace, width):
        strip.append("\u2588", STRIP_STYLES[kind])
    console.print(strip)
    legend = Text("  ")
    for style, word in zip(STRIP_STYLES, ("reused", "recomputed", "computed"), strict=True):
        legend.append("\u2588 ", style).append(f"{word}   ")
    console.print(legend, "\n")


def show_summary(console: Console, report: Mapping[str, Any]) -> None:
    """Print the picture of all questions: mean times to the first token, of the long prompt too,
    and right answers.
    """
    questions, long = report["questions"], report["long"]
    rows = (
        (
            f"{len(questions)} questions, on average",
            mean(each["ttft_full_s"] for each in questions),
            mean(each["ttft_fused_s"] for each in questions),
        ),
        ("the long prompt", long["ttft_full_s"], long["ttft_fused_s"]),
    )
    longest = max(max(full, fused) for _, full, fused in rows)
    console.print("Time to the first token", style="bold")
    for what, full, fused in rows:
        console.print(f"  {what}", highlight=False)
        for name, seconds, style in (
            ("full prefill", full, FULL_STYLE),
            ("ragfuse", fused, FUSED_STYLE),
        ):
            line = Text.assemble(f"    {name:12} {seconds:5.2f} s  ", bar(seconds, longest, style))
            console.print(line, soft_wrap=True)
        console.print(f"    {faster(full / fused)}.", highlight=False)
    right = f"full prefill {report['right_full']}, ragfuse {report['right_fused']}"
    same = sum(question["answer_full"] == question["answer_fused"] for question in questions)
    for said in (
        (
            f"Right answers of {len(questions)}: {right}. The model is a small one; both say the"
            f" same to {same} of them."
        ),
        (
            f"Distance to full prefill (KL of the next token): {report['kl_over_reuse']:.2f}, where"
            " reusing the passages without recomputing anything is 1."
        ),
    ):
        console.print(said, highlight=False)
