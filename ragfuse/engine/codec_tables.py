"""A model's codec tables, measured on sample texts that come with the package (CacheGen 5.2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ragfuse.codec import Codec, CodecTables, LayerMeta, codec_for, profile_tables
from ragfuse.hf.model import HFModel
from ragfuse.hf.queries import query_sizes
from ragfuse.hf.rounding_error import rounding_costs
from ragfuse.settings import Settings
from ragfuse.store.codec_registry import CodecRegistry, wants_tables
from ragfuse.text import sample
from ragfuse.types.kv import ChunkKV, LayerKV

log = logging.getLogger("ragfuse.engine")

SAMPLE_TOKENS = 240
"""Tokens of one sample text that tables are made from; some models take no more than twice as many."""


COST_LEVEL = "cg3"
"""The level at which it is measured what errors cost in each layer."""


CONTEXT_TOKENS = 768
"""Tokens of sample text whose KV is encoded with errors."""


CONTINUATION_TOKENS = 256
"""Tokens of the text that follows, whose loss says what those errors cost."""


def ensure_tables(registry: CodecRegistry, digest: str, model: HFModel, settings: Settings) -> None:
    """Give a model's KV its tables where a tier needs any: those that are known, or ones that are measured now.

    Args:
        registry: Where tables are kept.
        digest: The digest of model and tenant in keys.
        model: The loaded model, whose profile takes the tables.
        settings: Which levels the tiers are written at.
    """
    if model.profile.refusal or not wants_tables(settings):
        return
    found = CodecTables.from_dict(model.profile.codec) or registry.tables(digest)
    if found is None or registry.tables(digest) != found:
        registry.learn(digest, found := found or made_tables(model))
    model.profile = replace(model.profile, codec=found.as_dict())
    registry.share(found)


def made_tables(model: HFModel, *, rope: bool = True, queries: bool = True, costs: bool = True) -> CodecTables:
    """A model's tables, from text that comes along.

    rope: keys are turned back to position 0. queries: bins follow how large the queries are that meet a key's channel.
    costs: they follow what errors cost in each layer, which is measured with tables that do not know it yet.
    """
    began, chunks = time.perf_counter(), [*_chunks(model)]
    known = model.profile.rope if rope else (), _queries(model) if queries else ()
    tables = profile_tables(chunks, *known)
    found = rounding_costs(model, *_parted(model), _rounded(codec_for(COST_LEVEL, tables))) if costs else ()
    if found:
        tables = profile_tables(chunks, *known, found)
    told = model.name, time.perf_counter() - began, tables.digest
    log.info("How %s's KV is spread was seen on text that comes along, in %.1f s: tables %s", *told)
    return tables


def _rounded(codec: Codec) -> Callable[[ChunkKV], ChunkKV]:
    """Gives KV as it comes back from a codec."""

    def back(layer: LayerKV, at: int) -> LayerKV:
        blob = codec.encode(layer, at)
        return codec.decode(blob, LayerMeta.of(layer, blob))

    return lambda kv: ChunkKV(tuple(back(layer, at) for at, layer in enumerate(kv.layers)))


def _parted(model: HFModel) -> tuple[list[int], list[int]]:
    """Two thirds of the texts as one run, and of the rest what follows: so much as a model takes."""
    runs = _runs(model)
    before, follow = ([token for run in some for token in run] for some in (runs[::3] + runs[1::3], runs[2::3]))
    most = model.max_context or 2 * SAMPLE_TOKENS
    behind = min(CONTINUATION_TOKENS, most // 4)
    return before[: min(CONTEXT_TOKENS, most - behind)], follow[:behind]


def _chunks(model: HFModel) -> Iterator[ChunkKV]:
    """KV of every text, as it is kept: behind another text."""
    before: Sequence[int] = ()
    for ids in _runs(model):
        yield model.encode_with_filler(ids, before)
        before = ids


def _runs(model: HFModel) -> list[list[int]]:
    """Texts that come along, each short enough to stand behind another in any model's window."""
    return [model.tokens(text)[:SAMPLE_TOKENS] for text in sample()]


def _queries(model: HFModel) -> tuple[Tensor, ...]:
    """How large the queries are that meet each key's channel; nothing where keys are kept in another form."""
    runs = _runs(model)
    sizes, kept = query_sizes(model, runs), model.encode(runs[0][:2]).layers
    shapes = [tuple(size.shape) for size in sizes]
    return sizes if shapes == [(layer.keys.shape[0], layer.keys.shape[2]) for layer in kept] else ()
