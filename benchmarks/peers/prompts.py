"""Prompts over recurring chunks: the same few chunks in every prompt, drawn and ordered anew."""

from __future__ import annotations

import random
from dataclasses import replace

from ragfuse_bench.quality.cases import Packing, pack, read_cases

from ragfuse.calibration.case import Case
from ragfuse.hf.model import HFModel

DRAWN = 6
"""Chunks of a prompt."""


def recurring(model: HFModel, chunk_tokens: int, pool: int, rounds: int, seed: int = 0) -> list[Case]:
    """`rounds` cases, each over six of the same `pool` chunks of up to `chunk_tokens`, with a question of the set."""
    packing = Packing(lambda text: len(model.tokens(text)), chunk_tokens)
    cases, drawn = read_cases("held-out", replace(packing, chunk_tokens=0)), random.Random(seed)
    paragraphs = list(dict.fromkeys(chunk for case in cases for chunk in case.chunks))
    chunks = [chunk for chunk in pack(paragraphs, packing) if 2 * packing.count(chunk) >= chunk_tokens]
    kept = drawn.sample(chunks, min(pool, len(chunks)))
    found = []
    for index in range(rounds):
        chosen = drawn.sample(kept, min(DRAWN, len(kept)))
        question = drawn.choice(cases).question
        found.append(Case("peers", str(index), question, ("",), tuple(chosen)))
    return found
