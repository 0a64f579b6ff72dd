"""The table of model families: `python -m docs.matrix` builds a tiny random model of each and
writes `docs/matrix.md`.

Each is probed and verified as `ragfuse verify` does it, in float32 and in bfloat16. Random weights
show what a family's code does with positions and masks; they say nothing of answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from ragfuse.hf.model import HFModel
from ragfuse.hf.verify import verify
from ragfuse.types.kv import RopeLayout
from tests.kits import hf as kit
from tests.kits.families import FAMILIES, HYBRIDS, REFUSED

PAGE = Path(__file__).resolve().parent / "matrix.md"
HEAD = """\
# Model families

Written by `python -m docs.matrix`: of each family a model of a few layers with random weights is built, its rope layout
is found by the probe, and every promise of a fused prefill is measured as `ragfuse verify` measures it. *Exact* means
that all checks passed: ratio 1 equals full prefill, ratio 0 equals reuse placed by hand, misses in any pattern, no
later token changes an earlier row, and what stands there besides ([verify](../ragfuse/hf/verify.py)). In bfloat16 it
means so within what rounding explains.

A family that is not listed may well work: what decides is the probe on the real weights, not the name. Ask it with
`ragfuse verify MODEL`. Whether *answers* stay close is another question, which `ragfuse calibrate` asks
([guide](guides/calibrate.md)). What is refused is answered by its own full prefill, with the reason in the trace; the
last column says what of a prompt's beginning is reused all the same, exactly, from an earlier prompt.

"""
COLUMNS = (
    "| family | type | how keys carry position | windows | float32 | bfloat16 |\n| --- | --- | ---"
    " | --- | --- | --- |"
)
REASONS = "| family | type | reason | beginnings |\n| --- | --- | --- | --- |"
BEGINNINGS = MappingProxyType(
    {
        "": "computed",
        "run": "reused from the third prompt that shares it, the same prompt from the second",
        "whole": "computed",
    }
)
"""What is reused of a model that is refused, by what it goes on with behind a kept state."""


def page() -> str:
    """The whole page."""
    fused = "\n".join(map(_told_row, FAMILIES))
    refused = "\n".join(map(_told_row, {**REFUSED, **HYBRIDS}))
    return f"{HEAD}## Fused\n\n{COLUMNS}\n{fused}\n\n## Refused\n\n{REASONS}\n{refused}\n"


def row(name: str) -> str:
    """One family's line: of the first table where it is fused, of the second where it is
    refused.
    """
    kind = (FAMILIES.get(name) or REFUSED.get(name) or HYBRIDS[name])[0]
    model = kit.family(name)
    profile = model.profile
    if profile.refusal:
        beginnings = "reused" if profile.fixed else BEGINNINGS[profile.state]
        return f"| {name} | `{kind}` | {profile.refusal} | {beginnings} |"
    ropes, spans = "; ".join(_ropes(profile.rope, _head_dims(model))), _windows(profile.windows)
    found = [_verdict(model), _verdict(kit.family(name, torch.bfloat16))]
    return f"| {name} | `{kind}` | {ropes} | {spans} | {found[0]} | {found[1]} |"


def _told_row(name: str) -> str:
    """The line, with a sign of life: all of them take minutes."""
    line = row(name)
    print(line, file=sys.stderr, flush=True)
    return line


def _verdict(model: HFModel) -> str:
    if model.profile.refusal:
        return f"refused: {model.profile.refusal}"
    verdict = verify(model)
    wrong = [check.name for check in verdict.checks if not check.passed]
    return "exact" if verdict.passed else f"not exact: {', '.join(wrong)}"


def _head_dims(model: HFModel) -> tuple[tuple[int, int], ...]:
    layers = model.encode([5, 6, 7]).layers
    return tuple((kv.keys.shape[2], kv.values.shape[2]) for kv in layers)


def _ropes(layouts: Sequence[RopeLayout | None], dims: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Each way once, with how many layers have it where there are several."""
    told = [_rope(layout, pair) for layout, pair in zip(layouts, dims, strict=True)]
    kinds = list(
        dict.fromkeys(
            (text, layout.inv_freq if layout else ())
            for text, layout in zip(told, layouts, strict=True)
        )
    )
    for text, table in kinds:
        count = sum(
            words == text and (layout.inv_freq if layout else ()) == table
            for words, layout in zip(told, layouts, strict=True)
        )
        yield text if len(kinds) == 1 else f"{text} ({count} of {len(told)} layers)"


def _rope(layout: RopeLayout | None, dims: tuple[int, int]) -> str:
    if layout is None:
        return "not at all"
    turned, of = 2 * len(layout.inv_freq), dims[layout.part == "values"]
    where = "all dims" if turned == of else f"{turned} of {of} dims"
    latent = ", in the second cached tensor" if layout.part == "values" else ""
    return (
        f"{where} rotated, pairs"
        f" {'by halves' if layout.pairing == 'half' else 'of neighbours'}{latent}"
    )


def _windows(found: Sequence[int | None]) -> str:
    count = sum(window is not None for window in found)
    return (
        ""
        if not count
        else "all layers"
        if count == len(found)
        else f"{count} of {len(found)} layers"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
