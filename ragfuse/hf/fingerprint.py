"""What a model is called in keys: a digest of all that decides its KV."""

from __future__ import annotations

import json

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragfuse.core import FORMAT_VERSION, ChunkKV, digest
from ragfuse.hf.probe import is_alibi


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, drift: ChunkKV | None = None) -> str:
    """Digest of what decides a model's KV: config, samples of all weights, dtype, tokenizer, format version, drift."""
    config = model.config.to_diff_dict()
    kept = sorted((k, str(v)) for k, v in config.items() if k not in ("_name_or_path", "transformers_version", "dtype"))
    hasher = [str(FORMAT_VERSION), str(model.dtype), repr(kept)]
    if is_alibi(model.config):
        hasher.append("biases count positions")  # they counted keys once, over gaps
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)][:256].float().cpu().numpy().tobytes()
        hasher.append(digest(name, str(tuple(weight.shape)), sample))
    for layer in drift.layers if drift is not None else ():
        hasher.append(digest(*(part.float().cpu().numpy().tobytes() for part in (layer.keys, layer.values))))
    return digest(*hasher, _tokenizer_digest(tokenizer))


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Digest of what a tokenizer makes of text, without how it was last asked to pad or to cut."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest(type(tokenizer).__name__)
    parts = json.loads(backend.to_str())
    return digest(json.dumps({**parts, "padding": None, "truncation": None}, sort_keys=True))
