"""Measure how close a fused prompt stays to full prefill: KL of the next-token distribution along
its answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragfuse.engine.engine import Ask, Engine
from ragfuse.fuse.fusor import CachedRun
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.hf.rounding_error import kl
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.prompt import Prompt


@dataclass(frozen=True)
class Fidelity:
    """Mean KL to full prefill, in nats per token of its answer: of the engine's fused prompt, and
    of plain reuse.
    """

    fused: float
    reuse: float


def fidelity(
    engine: Engine, prompt: Prompt, answer: Sequence[int], ask: Ask | None = None
) -> Fidelity:
    """Measure a prompt's distance to full prefill, teacher-forced along `answer`, the token ids of
    its answer.
    """
    model = engine.model
    full = model.score_continuation(model.full_prefill(prompt.token_ids), answer)
    fused = model.score_continuation(engine.prepare(prompt, ask).prefill, answer)
    reuse = model.score_continuation(plain_reuse(model, prompt), answer)
    return Fidelity(kl(full, fused), kl(full, reuse))


def plain_reuse(model: HFModel, prompt: Prompt) -> Prefill:
    """Prefill by full KV reuse: each module and chunk encoded alone, moved to its position, nothing
    recomputed.
    """
    cached = [index for index, segment in enumerate(prompt.segments) if segment.kind != "fresh"]
    source = _Encoded({index: model.encode(prompt.segments[index].tokens) for index in cached})
    runs = [
        CachedRun(index, *prompt.spans[index], prompt.segments[index].start, blend=True)
        for index in cached
    ]
    return model.fuse(prompt.token_ids, prompt.positions, runs, source, "none", 0.0)


@dataclass(frozen=True)
class _Encoded:
    """A KV source in memory, by segment index."""

    chunks: Mapping[int, ChunkKV]

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        return {index: chunk.layers[layer] for index, chunk in self.chunks.items()}

    def ready(self) -> int:
        return sys.maxsize
