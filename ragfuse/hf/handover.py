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
from ragfuse.hf.cache import RowCache, left_padded
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.hf.probe import takes_positions


class Streamer(Protocol):
    """What transformers hands the tokens to as they come."""

    def put(self, value: Tensor) -> None:
        """The prompt's ids first, then one step's after the other."""
        ...

    def end(self) -> None:
        """No more will come."""
        ...


UNUSABLE = (
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "past_key_values",
)
"""Options of `generate` that bring or need a cache of their own."""
OURS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "streamer", "stopping_criteria")
"""Options of `generate` that the hand-over sets."""


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
    _refuse(options)
    ids, mask = _batch(model, prefills)
    cache = _cache(prefills)
    with model.lock, _seeded(model, seed), _first_answered(model, prefills, cache), torch.no_grad():
        out = model.model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList(list(stopping)),
            **_gapped(model, prefills),
            **_complete(model, options),
        )
    sequences = out if isinstance(out, Tensor) else out.sequences
    rows: list[list[int]] = sequences[:, ids.shape[1] :].tolist()
    return rows


def _refuse(options: Mapping[str, Any]) -> None:
    """SettingsError for what would bypass the prefilled cache, in the options or in their `generation_config`."""
    config = options.get("generation_config")
    given = {**(vars(config) if config is not None else {}), **options}
    for name in UNUSABLE:
        if given.get(name) is not None:
            raise SettingsError(f"generate's option '{name}' needs a cache of its own; leave it out.")
    if given.get("use_cache") is False:
        raise SettingsError("generate's option 'use_cache' is False, but the prompt lies in a cache; leave it out.")
    for name in OURS:
        if options.get(name) is not None:
            raise SettingsError(f"generate's option '{name}' is set by the prompt that was prefilled; leave it out.")


def _cache(prefills: Sequence[Prefill]) -> RowCache | None:
    """One cache that lacks the last row of every prompt; None where a model's state is no KV per token."""
    caches = [prefill.cache for prefill in prefills if prefill.cache is not None]
    if len(caches) < len(prefills):
        return None
    cache = caches[0] if len(caches) == 1 else left_padded(caches)
    cache.length -= 1
    return cache


def _gapped(model: HFModel, prefills: Sequence[Prefill]) -> dict[str, Tensor]:
    """The positions of prompts that leave some free, int64 [B, T]; nothing where `generate` counts right by itself."""
    if all(prefill.positions is None for prefill in prefills) or not takes_positions(model.model):
        return {}
    longest = max(len(prefill.token_ids) for prefill in prefills)
    rows = [torch.arange(len(p.token_ids)) if p.positions is None else p.positions.cpu() for p in prefills]
    padded = [torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows]
    return {"position_ids": torch.stack(padded).to(model.device)}


def _complete(model: HFModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with what `generate` cannot know: the tokenizer behind stop strings, a padding id, our cache."""
    full = {**options, "use_cache": True, "cache_implementation": None}
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
def _first_answered(model: HFModel, prefills: Sequence[Prefill], cache: RowCache | None) -> Iterator[None]:
    """Let the next forward return the prefills' logits and its cache hold the last row; whatever happens, undo it."""
    if cache is None:
        yield
        return
    attributes = model.model.__dict__
    before, forward = attributes.get("forward"), model.model.forward
    logits = torch.stack([prefill.logits for prefill in prefills])

    def undo() -> None:
        attributes.pop("forward", None)
        if before is not None:
            attributes["forward"] = before

    @functools.wraps(forward)
    def answer(*args: Any, **kwargs: Any) -> Any:
        undo()
        repeats = kwargs["input_ids"].shape[0] // len(prefills)
        if repeats > 1:
            cache.batch_repeat_interleave(repeats)
        if kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
            return forward(*args, **kwargs)
        cache.length += 1
        return CausalLMOutputWithPast(logits=logits.repeat_interleave(repeats, 0)[:, None], past_key_values=cache)

    attributes["forward"] = answer
    try:
        yield
    finally:
        undo()


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
