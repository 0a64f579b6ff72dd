"""The fingerprint of a model: a digest of everything that determines the model's KV.

The fingerprint is part of every KV key. Every byte of all weights, buffers, adapters and
quantisation states is hashed, so any change gives different keys. A loader may cache
the results of `weights_digest` and `tokenizer_digest` for unchanged files, and pass the results in.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragfuse.errors import ModelError
from ragfuse.hf.tokens import fast_backend
from ragfuse.types.keys import FORMAT_VERSION, digest
from ragfuse.types.kv import ChunkKV

HASH_NBYTES = 64 << 20
"""Number of bytes that are copied from a GPU and hashed at a time."""
UNNAMED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Config entries that are not hashed; the dtype is hashed separately."""
REMOTE = "transformers_modules"
"""The package in which transformers puts code that was downloaded with weights."""


def fingerprint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    drift: ChunkKV | None = None,
    weights: str | None = None,
    chunk_adapter: str = "",
    words: str | None = None,
) -> str:
    """Return the digest of everything that determines a model's KV: config, weights, dtype, remote
    code, tokenizer, drift, chunk adapter, and format version.

    Args:
        model: The model.
        tokenizer: The model's tokenizer, or None.
        drift: The KV offset that is added to chunks encoded after filler text, or None.
        weights: The result of `weights_digest` for the model. If None, the digest is computed.
        chunk_adapter: Digest of the adapter that encodes chunks. "" means no adapter.
        words: The result of `tokenizer_digest` for the tokenizer. If None, the digest is computed.
    """
    config = json.loads(
        model.config.to_json_string(),
        object_hook=lambda part: {name: part[name] for name in part if name not in UNNAMED},
    )
    hasher = [str(FORMAT_VERSION), str(model.dtype), json.dumps(config, sort_keys=True)]
    hasher.append(weights or weights_digest(model))
    # code downloaded with the weights
    kinds = {type(module) for module in model.modules()}
    files = {inspect.getfile(kind) for kind in kinds if kind.__module__.startswith(f"{REMOTE}.")}
    hasher += [digest(Path(file).read_bytes()) for file in sorted(files)]
    for layer in drift.layers if drift is not None else ():
        hasher.append(
            digest(*(part.float().cpu().numpy().tobytes() for part in (layer.keys, layer.values)))
        )
    if chunk_adapter:
        hasher.append(f"chunk adapter {chunk_adapter}")
    return digest(*hasher, words or tokenizer_digest(tokenizer))


def weights_digest(model: nn.Module) -> str:
    """Return the digest of all weights, buffers, adapters and quantisation states: 32 hex digits.

    Weights are read wherever they are: on a GPU, on disk (offloaded by accelerate), in this
    package's packed layers, or in a quantisation library's tensors. A weight's device does not
    change the digest.

    Raises:
        ModelError: A weight has no data (it is on torch's meta device).
    """
    parts, known = [], dict[int, str]()
    for name, value in _entries(model):
        # tied weights are hashed once
        found = known.get(id(value)) if isinstance(value, nn.Parameter) else None
        if found is None:
            hasher = blake3(max_threads=max(1, torch.get_num_threads()))
            _feed(hasher, name, value)
            found = hasher.hexdigest(length=16)
        if isinstance(value, nn.Parameter):
            known[id(value)] = found
        parts.append((name, found))
    return digest(*(part for pair in sorted(parts) for part in pair))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the digest of a tokenizer, without its current padding and truncation settings."""
    parts = json.loads(fast_backend(tokenizer).to_str()) if tokenizer is not None else {}
    return digest(json.dumps({**parts, "padding": None, "truncation": None}, sort_keys=True))


def _entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (full name, value) of every weight, buffer and PEFT setting of a model."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, value in {**model.state_dict(keep_vars=True), **buffers}.items():
        if isinstance(value, Tensor) and value.is_meta:
            inside, _, own = name.rpartition(".")
            value = _offloaded(model.get_submodule(inside), own, value)
        yield name, value
    for name, module in model.named_modules():
        # PEFT's scalings, and the names of active and merged adapters
        if type(module).__module__.partition(".")[0] == "peft":
            yield (
                f"{name}.peft",
                {key: each for key, each in vars(module).items() if _is_plain(each)},
            )


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.dumps(value))
    except (TypeError, ValueError):
        return False


def _offloaded(module: nn.Module, name: str, value: Tensor) -> Tensor:
    """Return the data of a weight that accelerate offloaded; `value` for any other weight."""
    hook = getattr(module, "_hf_hook", None)
    maps = (getattr(each, "weights_map", None) for each in getattr(hook, "hooks", (hook,)))
    return next((each[name] for each in maps if each is not None), value)


def _feed(hasher: Any, name: str, value: Any) -> None:
    """Hash the kind, size and content of a value and all nested parts, but no memory addresses."""
    if isinstance(value, Tensor):
        _feed_tensor(hasher, name, value.detach())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed_text(hasher, f"{key}:")
            _feed(hasher, f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        _feed_text(hasher, f"{len(value)} in order")
        for index, each in enumerate(value):
            _feed(hasher, f"{name}.{index}", each)
    elif named := getattr(value, "__qualname__", ""):  # a class or function
        _feed_text(hasher, f"{value.__module__}.{named}")
    elif hasattr(value, "__dict__") and not isinstance(value, Enum):
        _feed_text(hasher, type(value).__qualname__)
        _feed(hasher, name, vars(value))
    else:
        _feed_text(hasher, f"{type(value).__name__} {value}")


def _feed_tensor(hasher: Any, name: str, tensor: Tensor) -> None:
    kind = type(tensor).__name__ if type(tensor) is not nn.Parameter else "Tensor"
    _feed_text(hasher, f"{kind} {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.is_meta:
        raise ModelError(
            f"The weight '{name}' has no data (torch's meta device). Load the model's weights."
        )
    # a quantisation library's tensor: several tensors and their layout
    if hasattr(tensor, "__tensor_flatten__"):
        inner, context = tensor.__tensor_flatten__()
        _feed(hasher, name, {"context": context, **{part: getattr(tensor, part) for part in inner}})
    else:
        plain = tensor.dequantize() if tensor.is_quantized else tensor
        flat = plain.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        for piece in torch.split(flat, HASH_NBYTES):
            hasher.update(piece.cpu().numpy().data)
    if (state := getattr(tensor, "quant_state", None)) is not None:  # bitsandbytes' 4 bits
        _feed(hasher, name, state.as_dict())


def _feed_text(hasher: Any, text: str) -> None:
    """Hash a text's length, then the text, so that different sequences of texts differ in bytes."""
    data = text.encode()
    hasher.update(len(data).to_bytes(8, "little"))
    hasher.update(data)
