"""The sections of docs/results.md on what is reused of prefixes and of known passages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import number, table

Result = Mapping[str, Any]


def prefix(run: Result) -> Iterator[str]:
    """Prefix caching beside full prefill and transformers' own."""
    yield (
        f"One system prompt of {run['options']['system_tokens']:,} tokens, another question each time. An identical "
        f"prompt: {run['identical_share']:.0%} of all but its last token reused. Answers equal to full prefill's, "
        f"token for token: {run['exact_answers']}. vLLM: {run['vllm']}."
    )
    yield ""
    full = run["times"]["full prefill"]["cpu_s"]["median"]
    rows = []
    for name, each in run["times"].items():
        seconds = each["cpu_s"]["median"]
        rows.append([name, f"{seconds:.3f} s", f"{full / seconds:.1f}x"])
    yield from table(("way", "first token", "times as fast"), rows)


def matching(run: Result) -> Iterator[str]:
    """Known passages in prompts that hold them altered, and the time that looking takes."""
    forms = [[each["form"], number(each["recovered"], ".1%")] for each in run["forms"]]
    yield from table(("form", "recovered"), forms)
    yield ""
    sizes = [[f"{each['known']:,}", f"{each['ms']:.1f}", f"{each['mb']:.1f}"] for each in run["ms_per_8k"]]
    yield from table(("known spans", "ms for 8,192 tokens", "MB"), sizes)
    yield ""
    yield f"Tokens reused whose ids differ: {run['false_reuse']}."
