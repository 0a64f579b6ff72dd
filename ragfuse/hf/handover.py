"""From a finished prefill to `generate`, with everything transformers offers there.

`generate` gets the whole prompt's ids and a cache that lacks only the last row; its first forward is answered with the
logits that the prefill already computed, and reveals that row. So nothing is computed twice, and sampling, stop
strings, streamers, beams and logits processors work as ever, for one prompt or a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.errors import SettingsError
from ragfuse.hf.cache import left_padded
from ragfuse.hf.model import HFModel, Prefill


class Streamer(Protocol):
    """What transformers hands the tokens to as they come."""

    def put(self, value: Tensor) -> None:
        """The prompt's ids first, then one step's after the other."""
        ...

    def end(self) -> None:
        """No more will come."""
        ...


UNUSABLE = ("assistant_model", "prompt_lookup_num_tokens", "cache_implementation", "inputs_embeds", "past_key_values")
"""Options of `generate` that bring or need a cache of their own."""


def generate(
    model: HFModel,
    prefills: Sequence[Prefill],
    options: Mapping[str, Any],
    streamer: Streamer | None = None,
    stopping: Sequence[StoppingCriteria] = (),
    seed: int | None = None,
) -> list[list[int]]:
    """New token ids per returned sequence. options: those of transformers' `generate`; the prefills are used up.

    With beams or `num_return_sequences` the sequences of one prompt stand together.
    """
    unusable = [name for name in UNUSABLE if options.get(name) is not None]
    if unusable:
        raise SettingsError(f"generate's option '{unusable[0]}' needs a cache of its own; leave it out.")
    ids, mask = _batch(model, prefills)
    cache = prefills[0].cache if len(prefills) == 1 else left_padded([prefill.cache for prefill in prefills])
    cache.length -= 1
    logits = torch.stack([prefill.logits for prefill in prefills])
    with model.lock, _seeded(model, seed), _first_answered(model, logits), torch.no_grad():
        out = model.model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList(list(stopping)),
            **_complete(model, options),
        )
    sequences = out if isinstance(out, Tensor) else out.sequences
    rows: list[list[int]] = sequences[:, ids.shape[1] :].tolist()
    return rows


def _complete(model: HFModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with what `generate` cannot know: the tokenizer behind stop strings, and a padding id."""
    full = dict(options)
    if full.get("stop_strings"):
        full["tokenizer"] = model.tokenizer
    config = model.model.generation_config
    if config.pad_token_id is None and "pad_token_id" not in full:
        end = config.eos_token_id
        full["pad_token_id"] = end[0] if isinstance(end, list) else (end if end is not None else 0)
    return full


def _batch(model: HFModel, prefills: Sequence[Prefill]) -> tuple[Tensor, Tensor]:
    """Ids and mask int64 [B, T], shorter prompts padded on the left."""
    longest = max(len(prefill.token_ids) for prefill in prefills)
    pad = model.model.generation_config.pad_token_id or 0
    ids = [[pad] * (longest - len(p.token_ids)) + list(p.token_ids) for p in prefills]
    mask = [[0] * (longest - len(p.token_ids)) + [1] * len(p.token_ids) for p in prefills]
    return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)


@contextmanager
def _first_answered(model: HFModel, logits: Tensor) -> Iterator[None]:
    """Let the next forward return `logits` [B, V] and its cache hold the last row; whatever happens, undo it."""
    hf = model.model
    forward = hf.forward

    @functools.wraps(forward)
    def answer(*args: Any, **kwargs: Any) -> Any:
        hf.__dict__.pop("forward", None)
        cache, ids = kwargs["past_key_values"], kwargs["input_ids"]
        if kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
            return forward(*args, **kwargs)
        repeats = ids.shape[0] // cache.layers[0].keys.shape[0]
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
        cache.length += 1
        return CausalLMOutputWithPast(logits=logits.repeat_interleave(repeats, 0)[:, None], past_key_values=cache)

    hf.__dict__["forward"] = answer
    try:
        yield
    finally:
        hf.__dict__.pop("forward", None)


@contextmanager
def _seeded(model: HFModel, seed: int | None) -> Iterator[None]:
    """Sampling from `seed`, without touching anybody else's random numbers; None: torch's own state."""
    if seed is None:
        yield
        return
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
