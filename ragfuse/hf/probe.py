"""Test on a model's real weights whether and how the model's KV can be reused.

Two short forward passes of the same tokens at different positions show how each layer's keys
encode position. A self-test (`HFModel`) then fuses a prompt at ratio 1 and compares the result with
the model's own prefill. If a model's KV cannot be moved, reuse at other positions is refused with a
reason, but KV may still be reused at the same positions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ragfuse.errors import FixedError, RefusedError
from ragfuse.fuse.rope import shifted
from ragfuse.hf.cache import CACHE
from ragfuse.types.kv import LayerKV, RopeLayout

DELTA = 37
"""Number of positions by which the probe's second forward pass is shifted."""
RUN_TOKENS = 24
"""Number of tokens that the probe encodes."""
MOST_ROUNDING = 0.25
"""Maximum error that rounding can explain. Keys off by one position have a larger error."""
UNMOVABLE_ROPE = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the prompt's length."""
UNFIT = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
"""Exceptions that a model's forward raises if a fused prefill is not supported."""
DYNAMIC = "torch.ao.nn.quantized.dynamic"
"""torch's module with dynamically quantised layers."""
KV_OF_LAYER = ("keys", "values")
UNKNOWN_LAYERS = ("linear_attention", "chunked_attention", "mamba", "conv", "recurrent")
"""Parts of layer type names. The state of these layers is not KV per token."""


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the decoder layers in order.

    Raises:
        RefusedError: The model has no ModuleList with as many layers as the config says.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    lists: list[nn.ModuleList] = [
        m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted
    ]
    if not lists:
        raise RefusedError(
            f"The model's {wanted} decoder layers were not found: no ModuleList has that length."
        )
    sizes = [
        sum(each.numel() for each in (*layers.parameters(), *layers.buffers())) for layers in lists
    ]
    return tuple(lists[sizes.index(max(sizes))])


def refuse_by_config(config: PreTrainedConfig) -> None:
    """Raise RefusedError if the config alone shows that the model's KV cannot be reused."""
    if config.is_encoder_decoder:
        raise RefusedError("The model is an encoder-decoder model.")
    kinds = [kind for kind in _rope_types(config) if kind in UNMOVABLE_ROPE]
    if kinds:
        raise RefusedError(
            f"The model's rope scaling '{kinds[0]}' depends on the length of the whole prompt."
        )
    unknown = {
        kind for kind in _layer_types(config) if any(word in kind for word in UNKNOWN_LAYERS)
    }
    if unknown:
        raise RefusedError(
            f"The model has {sorted(unknown)[0]} layers, which do not keep KV per token."
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise RefusedError("Some layers of the model use the KV of other layers.")


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model expects input ids, also under accelerate."""
    entry = model.get_input_embeddings()
    hook = getattr(entry, "_hf_hook", None) or getattr(model, "_hf_hook", None)
    found = getattr(hook, "execution_device", None)
    if found is None:
        return torch.device(model.device)
    return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)


def devices_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's devices, including the devices that run offloaded weights."""
    held = {str(weight.device) for weight in model.parameters() if not weight.is_meta}
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    run = {
        getattr(hook, "execution_device", None) for hook in hooks if getattr(hook, "offload", False)
    }
    moved_to = {
        f"cuda:{device}" if isinstance(device, int) else str(device)
        for device in run
        if device is not None
    }
    return tuple(sorted(held | moved_to))


def refuse_by_modules(model: PreTrainedModel) -> None:
    """Raise RefusedError if layers are on several devices or dynamically quantised."""
    devices = devices_of(model)
    if len(devices) > 1:
        raise RefusedError(
            f"The model's layers are spread over {', '.join(devices)}, but KV is reused on one"
            " device only. Load all layers on one device."
        )
    if any(type(module).__module__.startswith(DYNAMIC) for module in model.modules()):
        raise RefusedError(
            "The model's activations are quantised by one scale for all tokens, so each token's"
            " KV depends on the other tokens."
        )


def windows(config: PreTrainedConfig, n_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens; None for full attention."""
    window = getattr(config, "sliding_window", None)
    types = _layer_types(config)
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return (window if getattr(config, "use_sliding_window", True) else None,) * n_layers


def _layer_types(config: PreTrainedConfig) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ()


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for group in [parameters, *nested]:
        yield group.get("rope_type") or group.get("type") or "default"


def forward(
    model: PreTrainedModel, token_ids: Tensor, cache: Any, positions: Tensor | int | None
) -> Any:
    """Run a model's forward over tokens after a cache. The output has the last token's logits.

    Args:
        model: The model.
        token_ids: int64 [1, n].
        cache: The cache of the preceding tokens, modified in place. None means that there are no
            preceding tokens.
        positions: int64 [n], or the first of n consecutive positions. None means the model's
            default.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions, positions + token_ids.shape[1], device=token_ids.device)
    given = {CACHE: cache} if cache is not None else {}
    return model(
        input_ids=token_ids,
        use_cache=True,
        **given,
        **at_positions(model, positions),
        **({"logits_to_keep": 1} if model._supports_logits_to_keep() else {}),
    )


run_forward = torch.no_grad()(forward)
"""`forward` without gradients."""


def plain_kv(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor | int,
    before: Sequence[LayerKV] = (),
    run: Callable[..., object] = run_forward,
) -> tuple[LayerKV, ...]:
    """Return every layer's KV of some tokens, computed by the model's own forward.

    Args:
        model: The model.
        token_ids: int64 [1, n].
        positions: int64 [n], or the first of n consecutive positions.
        before: KV of the preceding tokens. The result begins with this KV.
        run: `forward` (with gradients) or `run_forward`.
    """
    cache = DynamicCache()
    for layer, kv in enumerate(before):
        cache.update(kv.keys[None], kv.values[None], layer)
    run(model, token_ids, cache, positions)
    return tuple(LayerKV(layer.keys[0], layer.values[0]) for layer in cache.layers)


def at_positions(model: PreTrainedModel, positions: Tensor | None) -> dict[str, Any]:
    """Return {"position_ids": int64 [1, n]}; {} if `positions` is None or unsupported."""
    return (
        {"position_ids": positions[None]}
        if positions is not None and takes_positions(model)
        else {}
    )


def is_whole(cache: object, n_layers: int, n_tokens: int) -> bool:
    """Return whether a model's own cache is exactly the KV of every token in every layer."""
    layers = getattr(cache, "layers", ())
    return len(layers) == n_layers and all(
        type(layer) is DynamicLayer and layer.get_seq_length() == n_tokens for layer in layers
    )


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the model's forward accepts `position_ids`."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def find_rope(
    model: PreTrainedModel, token_ids: Tensor, tolerance: float
) -> tuple[RopeLayout | None, ...]:
    """Find how each layer's keys encode position, by encoding tokens at position 0 and at `DELTA`.

    Args:
        model: The model.
        token_ids: int64 [1, n], the tokens to encode.
        tolerance: Maximum relative error that counts as equal.

    Returns:
        The rotation of each layer. None means that the layer's keys carry no position.

    Raises:
        FixedError: KV cannot be moved to other positions, but may be reused at the same positions.
        RefusedError: The forward takes no positions and the model does not use ALiBi.
    """
    near = torch.arange(token_ids.shape[1], device=token_ids.device)
    first = plain_kv(model, token_ids, near)
    if not takes_positions(model):
        if not is_alibi(model.config):
            raise RefusedError(
                "The model's forward does not accept token positions (position_ids)."
            )
        return (None,) * len(first)
    second = plain_kv(model, token_ids, near + DELTA)
    pairs, tables = zip(first, second, strict=True), _tables(model)
    return tuple(
        _layer_rope(layer, near, far, tables, tolerance) for layer, (near, far) in enumerate(pairs)
    )


def is_alibi(config: PreTrainedConfig) -> bool:
    """Return whether a model encodes positions by biases on attention scores (ALiBi)."""
    attention = getattr(config, "attn_config", None)
    return config.model_type == "bloom" or bool(
        getattr(config, "alibi", False) or getattr(attention, "alibi", False)
    )


def _layer_rope(
    layer: int, near: LayerKV, far: LayerKV, tables: Sequence[tuple[float, ...]], tolerance: float
) -> RopeLayout | None:
    """Return the rotation that best explains how a layer's KV differs between two positions.

    None means that the KV does not differ. The candidate with the smallest error is returned, not
    the first candidate within the tolerance, because the first candidate is "no rotation". If a
    constant bias makes up most of a key, a rotation may change the key by less than the tolerance.
    """
    unmoved = {part: typical(getattr(near, part), getattr(far, part)) for part in KV_OF_LAYER}
    found: list[tuple[float, RopeLayout | None]] = [(max(unmoved.values()), None)]
    for part, other in (("keys", "values"), ("values", "keys")):
        before, after = getattr(near, part), getattr(far, part)
        for layout in _candidates(tables, before.shape[-1], part):
            found.append(
                (max(typical(shifted(before, DELTA, layout), after), unmoved[other]), layout)
            )
    error, best = min(found, key=itemgetter(0))
    if error <= tolerance:
        return best
    if min(unmoved.values()) > tolerance:
        raise FixedError(
            "The KV of a chunk cannot be moved to another position: the keys and values of layer"
            f" {layer} depend on the position, because the hidden states do."
        )
    raise FixedError(
        "The KV of a chunk cannot be moved to another position: the"
        f" {max(unmoved, key=unmoved.__getitem__)} of layer {layer} depend on the position in a"
        " way that no single rotation undoes."
    )


def _tables(model: PreTrainedModel) -> list[tuple[float, ...]]:
    """Return the rotation frequencies in a model's buffers, in radians per position."""
    found = {
        tuple(b.cpu().double().tolist())
        for name, b in model.named_buffers()
        if name.endswith("inv_freq")
    }
    return sorted(found)


def _candidates(tables: Sequence[tuple[float, ...]], dim: int, part: str) -> Iterator[RopeLayout]:
    """Yield every layout that rotates by one of the `tables` and fits into `dim` dims."""
    for table, pairing in product(tables, ("half", "interleaved")):
        spare = dim - 2 * len(table)
        for lo in sorted({0, spare}) if spare >= 0 else ():
            yield RopeLayout(table, lo, pairing, part)  # type: ignore[arg-type]


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error: L2 norm of the difference / L2 norm of `wanted`, in float32."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12))


def typical(found: Tensor, wanted: Tensor) -> float:
    """Return the median error of n rows [H, n, D], relative to the RMS of the rows' norms."""
    change = (found.float() - wanted.float()).square().sum((0, 2)).sqrt()
    size = wanted.float().square().sum((0, 2)).mean().sqrt()
    return float(change.median() / size.clamp_min(1e-12)) if len(change) else 0.0


def is_routed(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Return whether rounding may send a token to another expert. Errors then have no bound."""
    experts = [
        v
        for k, v in config.to_dict().items()
        if "experts" in k and isinstance(v, int) and "tok" not in k
    ]
    return dtype != torch.float32 and max(experts, default=0) > 1


def bound_of(dtype: torch.dtype, n_layers: int, n_tokens: int) -> float:
    """Return the relative error that rounding explains for keys, values and logits of `n_tokens`
    tokens.

    Two ways of computing the same numbers differ by roundings of random sign, which add up like a
    random walk. In 16 bits, sums are kept in float32 and about a dozen results per layer are
    rounded once each, by at most half an epsilon. The bound is 6 half epsilons times the square
    root of the number of layers. The factor measured with 30 layers is 2, not 6. In float32, sums
    of hundreds to thousands of terms are rounded too, so the factor is 256, not 6. Rotation adds to
    the bound, because the fastest pair turns by a radian per position. So the float32 angle at
    position p is off by up to p half epsilons.

    Real mistakes exceed the bound. Keys off by one position give an error of a quarter or more. A
    row that misses a key or sees an extra key gives an error of a tenth or more.
    """
    steps = 256 if dtype == torch.float32 else 6
    rounding = steps * torch.finfo(dtype).eps / 2 * n_layers**0.5
    return float(rounding + n_tokens * torch.finfo(torch.float32).eps / 2)


def tolerance_of(dtype: torch.dtype, n_layers: int) -> float:
    """Return the relative error of keys, values and logits that rounding explains in a short
    prompt.

    The result is `bound_of`, but at most `MOST_ROUNDING`, and at least 1e-2 in float32, 1e-1 in
    bfloat16 and 3e-2 in float16.
    """
    least = {torch.float32: 1e-2, torch.bfloat16: 1e-1}.get(dtype, 3e-2)
    return max(least, min(MOST_ROUNDING, bound_of(dtype, n_layers, RUN_TOKENS)))


def logits_error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of logits [V], after each tensor's mean is subtracted."""
    wanted = wanted.float() - wanted.float().mean()
    return relative(found.float() - found.float().mean(), wanted)


def probe_tokens(vocab_size: int, count: int, device: torch.device) -> Tensor:
    """Return `count` ids, int64 [1, count], scattered over the vocabulary; deterministic."""
    steps = torch.arange(count, dtype=torch.float64) * math.sqrt(2)
    return ((steps % 1) * (vocab_size * 0.8) + vocab_size * 0.1).long()[None].to(device)
