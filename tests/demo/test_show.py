"""What the demo prints, and that the README's sample is just that."""

import re

from docs.sample import README, sample, shown
from ragfuse.demo.picture import draw, strip_of
from ragfuse.demo.show import BAR_CHARS, summary_text

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


def test_a_slower_answer_is_called_so_and_no_time_is_divided_by():
    assert "First token 0.5 times as fast." in sample(answered(ttft_fused_s=2.0, speedup=0.5))
    assert "0.00 s" in sample(answered(ttft_full_s=0.0, ttft_fused_s=0.0, speedup=0.5))


def test_the_summary_is_a_table_of_both_kinds_of_prompts():
    report = {
        "questions": [answered(), answered(answer_fused="Nobody", ttft_fused_s=0.35)],
        "long": answered(ttft_full_s=4.0),
        "right_full": 2,
        "right_fused": 1,
    }
    _, on_average, long, said = summary_text(report).splitlines()
    assert on_average.split()[-3:] == ["1.00", "0.30", "3.3x"]
    assert long.split()[-3:] == ["4.00", "0.25", "16.0x"]
    assert "Right answers of 2: full prefill 2, ragfuse 1." in said
    assert "both say the same to 1 of them" in said


def test_the_picture_shows_what_became_of_every_token(tmp_path):
    kinds = strip_of(TRACE).tolist()
    assert [kinds.count(kind) / len(kinds) for kind in range(3)] == [0.54, 0.06, 0.4]
    report = {
        "questions": [answered()],
        "long": answered(),
        "mean_speedup": 4.0,
        "long_speedup": 4.0,
        "right_full": 1,
        "right_fused": 0,
    }
    draw(report, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


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
