"""The demo's picture, and that the README's sample is what it prints."""

import re

from docs.sample import README, sample, shown
from ragfuse.demo.show import draw, strip_of

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
