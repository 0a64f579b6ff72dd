"""What the demo prints, and that the README's sample is just that."""

import io
import re

import pytest
from rich.console import Console

from docs.sample import README, sample, shown
from ragfuse.demo.answer import DemoAnswer
from ragfuse.demo.show import BAR_CHARS, show_strip, show_summary

TRACE = {
    "tokens": 100,
    "segments": [
        {"hit": True, "start": 10, "n_tokens": 60},
        {"hit": False, "start": 70, "n_tokens": 20},
    ],
    "recomputed_rows": [10, 11, 12, 13, 14, 15],
}


def answered(**changes):
    found = {
        "question": "Who [built] it?",
        "gold": "Nobody",
        "answer_full": "Nobody",
        "answer_fused": "Somebody",
        "right_full": True,
        "right_fused": False,
        "ttft_full_s": 1.0,
        "ttft_fused_s": 0.25,
        "speedup": 4.0,
        "tokens": 100,
        "tokens_reused": 54,
        "tokens_recomputed": 6,
        "kl_fused": 0.1,
        "kl_reuse": 0.4,
        "trace": TRACE,
    }
    return {**found, **changes}


def test_bars_are_as_long_as_the_times_and_answers_stand_below_each_other():
    first, known, full, fused, last = sample(answered()).splitlines()
    assert first == "Who [built] it?"
    assert full.count("\u2588") == BAR_CHARS
    assert fused.count("\u2588") == BAR_CHARS / 4
    assert known.index("Nobody") == full.index("Nobody") == fused.index("Somebody")
    assert ("right" in full, "wrong" in fused) == (True, True)
    assert last.startswith("  First token 4.0 times as fast. Of 100 tokens 54 were reused, ")
    assert last.endswith(" 6 recomputed, 40 computed.")


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_a_slower_answer_is_called_so_and_no_time_is_divided_by(seconds):
    said = sample(answered(ttft_full_s=seconds, ttft_fused_s=2 * seconds, speedup=0.5))
    assert "First token 2.0 times as slow." in said


def test_the_strip_has_every_kind_of_token_and_a_legend():
    console = Console(file=io.StringIO(), width=102, force_terminal=True, color_system="truecolor")
    show_strip(console, DemoAnswer(**answered()))
    strip, legend = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()[:2]
    assert strip.count("\u2588") == 100
    assert [word in legend for word in ("reused", "recomputed", "computed")] == [True] * 3


def test_the_summary_is_a_picture_of_both_kinds_of_prompts():
    console = Console(file=io.StringIO(), width=200)
    report = {
        "questions": [answered(), answered(answer_fused="Nobody")],
        "long": answered(ttft_full_s=4.0),
    }
    show_summary(console, {**report, "right_full": 2, "right_fused": 1, "kl_over_reuse": 0.25})
    lines = console.file.getvalue().splitlines()
    bars = [line.count("\u2588") for line in lines if "\u2588" in line]
    assert bars == [6, 2, 24, 2]
    said = " ".join(lines)
    assert "Right answers of 2: full prefill 2, ragfuse 1." in said
    assert "both say the same to 1 of them" in said


def test_the_readme_s_sample_is_what_the_demo_prints():
    """The numbers are read back from the sample; printed again they give every character of it."""
    text = shown(README.read_text(encoding="utf-8"))
    question, known, full, fused, last = text.splitlines()
    pattern = r"  (?:full prefill|ragfuse) +([\d.]+) s  [\u2588 ]+ (right|wrong)  (.*)"
    of_full, of_fused = re.fullmatch(pattern, full), re.fullmatch(pattern, fused)
    tokens, reused, recomputed, fresh = (
        int(number.replace(",", ""))
        for number in re.findall(r"(?<![\d.])[\d,]*\d(?![\d.])", last.partition("Of ")[2])
    )
    assert tokens == reused + recomputed + fresh
    seconds = float(of_full[1]), float(of_fused[1])
    again = answered(
        question=question,
        gold=known.split("known answer")[1].strip(),
        ttft_full_s=seconds[0],
        ttft_fused_s=seconds[1],
        speedup=float(re.search(r"First token ([\d.]+) times", last)[1]),
        right_full=of_full[2] == "right",
        right_fused=of_fused[2] == "right",
        answer_full=of_full[3],
        answer_fused=of_fused[3],
        tokens=tokens,
        tokens_reused=reused,
        tokens_recomputed=recomputed,
    )
    assert sample(again) == text
