"""`ragfuse bench matching`: what of known passages is found again in prompts that hold them altered."""

from __future__ import annotations

from ragfuse_bench.options import MatchingOptions

from ragfuse.cli.options import Json, console_for, write_json


def matching(options: MatchingOptions, json: Json = None) -> None:
    """Measure how much of known passages is found after they were numbered, escaped, cut or edited, and how fast."""
    from ragfuse_bench.matching import run_matching

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_matching(options, console), json)
