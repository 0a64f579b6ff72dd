"""A model's codec tables, profiled on the sample texts of the package (CacheGen 5.2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ragfuse.codec import Codec, CodecTables, LayerMeta, codec_for, profile_tables
from ragfuse.hf.model import HFModel
from ragfuse.hf.rounding_error import query_sizes, rounding_costs
from ragfuse.settings import Settings
from ragfuse.store.codec_registry import CodecRegistry, wants_tables
from ragfuse.text import sample
from ragfuse.types.kv import ChunkKV, LayerKV

log = logging.getLogger("ragfuse.engine")

SAMPLE_TOKENS = 240
"""Most tokens of one sample text that tables are made from; two of them fit the context of any
model.
"""


COST_LEVEL = "cg3"
"""The codec level at which the cost of rounding errors in each layer is measured."""


CONTEXT_TOKENS = 768
"""Most tokens of sample text whose KV is rounded for that measurement."""


CONTINUATION_TOKENS = 256
"""Most tokens of the text that follows, whose predictions show the cost of those errors."""


def ensure_tables(registry: CodecRegistry, digest: str, model: HFModel, settings: Settings) -> None:
    """Set a model's codec tables if a tier needs them: the known ones, or ones that are made now.

    Args:
        registry: The codecs of the store, which keeps tables.
        digest: The digest of model and tenant in keys.
        model: The loaded model; its profile receives the tables.
        settings: The levels at which the tiers are written.
    """
    if model.profile.refusal or not wants_tables(settings):
        return
    found = CodecTables.from_dict(model.profile.codec) or registry.tables(digest)
    found = found or made_tables(model)
    registry.learn(digest, found)
    model.profile = replace(model.profile, codec=found.as_dict())


def made_tables(model: HFModel) -> CodecTables:
    """Return a model's codec tables, profiled on the sample texts of the package.

    Bins depend on the cost of errors in each layer, which is measured with tables made without it.
    """
    began, chunks = time.perf_counter(), [*_chunks(model)]
    known = model.profile.rope, _queries(model)
    tables = profile_tables(chunks, *known)
    if found := rounding_costs(
        model, *_split_sample(model), _rounded(codec_for(COST_LEVEL, tables))
    ):
        tables = profile_tables(chunks, *known, found)
    seconds = time.perf_counter() - began
    log.info(
        "Prepared the compression of KV for %s in %.1f s (codec tables %s)",
        model.name,
        seconds,
        tables.digest,
    )
    return tables


def _rounded(codec: Codec) -> Callable[[ChunkKV], ChunkKV]:
    """Return a function that encodes and decodes KV with a codec."""

    def rounded(layer: LayerKV, at: int) -> LayerKV:
        blob = codec.encode(layer, at)
        return codec.decode(blob, LayerMeta.of(layer, blob))

    return lambda kv: ChunkKV(tuple(rounded(layer, at) for at, layer in enumerate(kv.layers)))


def _split_sample(model: HFModel) -> tuple[list[int], list[int]]:
    """Return two thirds of the texts as one run, and the rest as the run after it, cut to fit the
    model's context.
    """
    runs = _runs(model)
    before, follow = (
        [token for run in some for token in run] for some in (runs[::3] + runs[1::3], runs[2::3])
    )
    max_tokens = model.max_context or 2 * SAMPLE_TOKENS
    n_follow = min(CONTINUATION_TOKENS, max_tokens // 4)
    return before[: min(CONTEXT_TOKENS, max_tokens - n_follow)], follow[:n_follow]


def _chunks(model: HFModel) -> Iterator[ChunkKV]:
    """Yield the KV of every text, encoded after the text before it as filler, like stored
    chunks.
    """
    before: Sequence[int] = ()
    for ids in _runs(model):
        yield model.encode_with_filler(ids, before)
        before = ids


def _runs(model: HFModel) -> list[list[int]]:
    """Return the token ids of the sample texts, each cut so that two fit the context of any
    model.
    """
    return [model.tokens(text)[:SAMPLE_TOKENS] for text in sample()]


def _queries(model: HFModel) -> tuple[Tensor, ...]:
    """Return, layer by layer, how large the queries of each key channel are: `[kv_heads,
    head_dim]`.

    Empty for a model whose cached keys have another shape.
    """
    runs = _runs(model)
    sizes, layers = query_sizes(model, runs), model.encode(runs[0][:2]).layers
    shapes = [tuple(size.shape) for size in sizes]
    return (
        sizes if shapes == [(layer.keys.shape[0], layer.keys.shape[2]) for layer in layers] else ()
    )
