"""The page of results says what the committed runs say, and nothing else."""

import json
from pathlib import Path

from benchmarks.results import DOCS, page


def test_the_committed_page_is_what_the_committed_runs_give() -> None:
    assert (DOCS / "results.md").read_text("utf-8") == page(DOCS / "benchmarks"), "Run make results."


def test_every_kind_of_run_has_its_section(tmp_path: Path) -> None:
    quality = {"dataset": "d", "method": "hkvd", "ratio": 0.15, "n": 3, "tokens": 9.0, "f1": 0.5, "f1_ci": [0.4, 0.6]}
    quality |= {"to_full_ci": [-0.1, 0.1], "em": 0.3, "rouge_l": None, "kl": 0.2, "kl_over_reuse": 0.25}
    quality |= {"kl_over_reuse_ci": [0.1, 0.4], "top1": 0.9, "identical": 0.8, "ttft_x": 4.0}
    tried = {"policy": "lego", "ratio": 0.06, "kl_over_reuse": 0.2, "low": 0.1, "high": 0.3, "top1": 0.95}
    peer = {"peer": "hf", "what": "generate", "wall_s": 0.5, "cpu_s": 0.4, "sooner": 1.0, "same_first_token": 1.0}
    ttft = {"chunks": 6, "tokens": 3104, "full_s": 4.0, "fused_s": 1.0, "speedup": 4.0, "reuse_x": 20.0}
    runs = {
        "a": {"results": [quality], "model": "m", "dtype": "bfloat16"},
        "b": {"tried": [{**tried, "ttft_x": 5.0, "is_safe": True}], "advice": "Do.", "questions": 8, "seconds": 60.0},
        "c": {"figure": "fig8", "title": "t", "paper": "p", "rows": [{"layer": 1, "correlation": 0.9, "n": 4}]},
        "d": {"results": [peer], "n": 2, "tokens": 90.0, "pool": 8, "absent": ["vllm is left out."]},
        "e": {**ttft, "prefix_x": 1.1, "efficiency": 0.9, "policy": "hkvd", "options": {"ratio": 0.15, "model": "q05"}},
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    made = page(tmp_path)
    said = "hkvd 15% | 0.500 | 0.400..0.600", "| lego | 6% | 0.200", "**fig8**", "500 ms", "vllm is left", "4.00x"
    for wanted in said:
        assert wanted in made
    assert made.count("](benchmarks/") == len(runs)
