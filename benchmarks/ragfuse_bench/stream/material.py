"""Long readings with questions on them, cut into pieces that are exact behind one another, and what
KV is worth.

A context is prefilled once and its KV cut: the key of a piece says what stands before it, so that
in its prompt nothing of it is recomputed, and whatever is lost was lost by a codec or on the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from ragfuse_bench.codec.answers import Row
from ragfuse_bench.codec.contexts import Reading, held_out, reading_of

from ragfuse.errors import InputError
from ragfuse.fuse.rope import part_layout, shifted
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.types.keys import ChunkKey, token_digest
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.prompt import Prompt, Segment


def long_readings(model: HFModel, tokens: int, count: int, questions: int) -> list[Reading]:
    """Neighbouring paragraphs of the articles that come along, about so many tokens each, with some
    questions.
    """
    readings, group, held = list[Reading](), list[Mapping[str, Any]](), 0
    for paragraph in (paragraph for article in held_out() for paragraph in article["paragraphs"]):
        group.append(paragraph)
        held += len(model.tokens(paragraph["context"].strip() + "\n\n"))
        if held >= tokens and len(readings) < count:
            whole = reading_of(model, group)
            few = whole.questions[:: max(1, len(whole.questions) // questions)][:questions]
            readings.append(Reading(whole.token_ids, few))
            group, held = [], 0
    if not readings:
        raise InputError(f"No text of {tokens} tokens comes along. Take fewer tokens.")
    return readings


@dataclass(frozen=True)
class Cut:
    """A context in pieces: their ids and their keys, for a model and tenant."""

    token_ids: tuple[int, ...]
    bounds: tuple[int, ...]
    keys: tuple[ChunkKey, ...]

    @classmethod
    def of(cls, digest: str, token_ids: Sequence[int], piece_tokens: int) -> Cut:
        """About so many tokens a piece, all alike."""
        n = max(1, round(len(token_ids) / piece_tokens))
        bounds = tuple(len(token_ids) * at // n for at in range(n + 1))
        spans, ids = pairwise(bounds), tuple(token_ids)
        keys = tuple(
            ChunkKey(digest, token_digest(ids[lo:hi]), token_digest(ids[:lo]) if lo else "")
            for lo, hi in spans
        )
        return cls(ids, bounds, keys)

    def prompt(self, question: Sequence[int]) -> Prompt:
        """The pieces and a question."""
        spans = list(pairwise(self.bounds))
        pieces = [
            Segment(self.token_ids[lo:hi], lo, "chunk", (key,), f"piece {number}")
            for number, ((lo, hi), key) in enumerate(zip(spans, self.keys, strict=True))
        ]
        return Prompt((*pieces, Segment(tuple(question), self.bounds[-1])))

    def pieces(self, kv: ChunkKV, model: HFModel) -> Iterator[tuple[ChunkKey, ChunkKV]]:
        """The KV of each, its keys turned to its own positions."""
        for key, lo, hi in zip(self.keys, self.bounds, self.bounds[1:], strict=False):
            yield (
                key,
                ChunkKV(
                    tuple(_moved(layer, lo, hi, model, at) for at, layer in enumerate(kv.layers))
                ),
            )


def _moved(layer: LayerKV, lo: int, hi: int, model: HFModel, at: int) -> LayerKV:
    """Rows lo:hi of a layer, turned back by `lo` positions."""
    layout = model.profile.rope[at] if model.profile.rope else None
    keys, values = (
        shifted(part[:, lo:hi], -lo, part_layout(layout, name))
        for part, name in ((layer.keys, "keys"), (layer.values, "values"))
    )
    return LayerKV(keys, values)


def context_kv(prefill: Prefill, n_tokens: int) -> ChunkKV:
    """The first rows of what a prompt was prefilled to, as a stream left them; its prefill is used
    up by others.
    """
    layers = []
    for each in prefill.cache.layers if prefill.cache is not None else ():
        keys, values = each.keys[0, :, :n_tokens].clone(), each.values[0, :, :n_tokens].clone()
        layers.append(LayerKV(keys, values))
    return ChunkKV(tuple(layers))


@dataclass(frozen=True)
class Worth:
    """What KV of a context is worth, over some questions: F1, and KL and top-1 along raw KV's own
    answers.
    """

    f1: float
    kl: float
    top1: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Worth:
        """The means of a judge's rows."""
        return cls(*(mean(getattr(row, name) for row in rows) for name in ("f1", "kl", "top1")))
