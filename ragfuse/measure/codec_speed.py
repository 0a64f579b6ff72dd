"""Time the decoding of each codec level, and measure the size of its packed KV."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from ragfuse.codec import Codec, LayerMeta
from ragfuse.hf.model import HFModel
from ragfuse.types.kv import LayerKV
from ragfuse.types.levels import LEVEL_NAMES

TIMED_CHUNK_TOKENS = 256
"""Tokens of the chunk that is encoded, unless the model's context is shorter."""

Progress = Callable[[str, float], object]


def decoding(
    model: HFModel, codecs: Callable[[str], Codec | None], rounds: int, progress: Progress
) -> tuple[dict[str, float], dict[str, float]]:
    """Time the decoding of each level on this thread and from host memory, which is how entries are decoded.

    Args:
        model: The model whose KV is encoded.
        codecs: Returns the codec of a level, or None.
        rounds: Rounds of each timing, after one to warm up.
        progress: Called as the timings proceed.

    Returns:
        By level, median seconds to decode one token's KV; and by level, encoded bytes over raw bytes. Levels without a
        codec, or that cannot encode this model's KV, are left out.
    """
    available = [(level, codec) for level in LEVEL_NAMES[1:] if (codec := codecs(level)) is not None]
    layers = model.encode(_ids(model)).layers if available else ()
    kv = [LayerKV(layer.keys.cpu(), layer.values.cpu()) for layer in layers]
    seconds, packed = dict[str, float](), dict[str, float]()
    for index, (level, codec) in enumerate(available):
        progress(f"decoding {level}", index / len(available))
        try:
            blobs = [codec.encode(layer, at) for at, layer in enumerate(kv)]
        except ValueError:  # KV that only the raw codec can store
            continue
        timings = [_timed(codec, kv, blobs) for _ in range(rounds + 1)]
        seconds[level] = median(timings[1:]) / kv[0].n_tokens
        packed[level] = sum(blob.numel() for blob in blobs) / sum(layer.nbytes for layer in kv)
    return seconds, packed


def _timed(codec: Codec, kv: list[LayerKV], blobs: list[Tensor]) -> float:
    metas = [LayerMeta.of(layer, blob) for layer, blob in zip(kv, blobs, strict=True)]
    began = time.perf_counter()
    for blob, meta in zip(blobs, metas, strict=True):
        codec.decode(blob, meta)
    return time.perf_counter() - began


def _ids(model: HFModel) -> list[int]:
    """Return random token ids, the same in every run."""
    config, generator = model.model.config.get_text_config(), torch.Generator().manual_seed(1)
    count = min(TIMED_CHUNK_TOKENS, model.max_context or TIMED_CHUNK_TOKENS)
    return [int(token) for token in torch.randint(config.vocab_size, (count,), generator=generator)]
