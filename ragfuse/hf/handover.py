"""Continues a finished prefill with transformers' own `generate`.

`generate` gets the ids of the whole prompt and a cache without the last row. Its first forward
returns the logits that the prefill computed and adds that row back, so nothing is computed twice,
and sampling, stopping criteria and logits processors work as usual. Its other forwards are decoding
steps of `hf/decode.py`. A prompt has one answer: beams and several sequences are refused.

`generate` is called on a shallow copy of the model object with its own forward, so that many can
run at the same time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ragfuse.errors import ModelError, SettingsError
from ragfuse.hf import probe
from ragfuse.hf.cache import CACHE
from ragfuse.hf.decode import Member
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.hf.seed import Seeded

UNUSABLE = (
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "cache",
    "past_key_values",
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "streamer",
    "stopping_criteria",
)
"""Options of `generate` that need another cache than the prefilled one, or are set here; callers
may not pass them.
"""
ONE = ("num_beams", "num_return_sequences")
"""Options of `generate` that may be 1 only."""


def generate(
    model: HFModel,
    prefill: Prefill,
    options: Mapping[str, Any],
    stopping: Sequence[StoppingCriteria] = (),
    seed: int | None = None,
) -> list[int]:
    """Generate an answer to a prefilled prompt; consumes the prefill.

    Requests that run on the model at the same time share decoding steps (`hf/decode.py`).

    Args:
        model: The model.
        prefill: The prompt.
        options: Options of transformers' `generate`. Stop strings do nothing here: `stopping` has
            what ends a text.
        stopping: Further stopping criteria; each is called with all tokens after every new one.
        seed: Of sampling; the result does not depend on what runs at the same time. None: torch's
            global state.

    Returns:
        The new token ids.

    Raises:
        SettingsError: An option would bypass the prefilled cache, or asks for several sequences.
        ModelError: The model computed NaN for the prompt.
    """
    _refuse(options)
    if bool(prefill.logits.isnan().any()):  # its answer would be empty or noise
        advice = (
            "float16 is too narrow for some models: set dtype to bfloat16 or float32."
            if model.dtype == torch.float16
            else "Its weights are damaged: copy them anew from where they came from."
        )
        raise ModelError(
            f"The model {model.name} computed NaN (not a number) for this prompt. {advice}"
        )
    ids = torch.tensor([list(prefill.token_ids)], device=model.device)
    draws = Seeded(seed) if seed is not None else nullcontext()
    with model.batcher.member(prefill.cache, model.shared_wiring) as member, draws:
        if prefill.cache is not None:
            prefill.cache.length -= (
                1  # its last row is computed, and comes back with the first forward
            )
        view = _view(model, prefill, member)
        out: Tensor = view.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=StoppingCriteriaList(stopping),
            **{CACHE: prefill.cache if prefill.state is None else prefill.state},
            **probe.at_positions(model.model, prefill.positions),
            **_adapted_options(model, options),
        )
    new_ids: list[int] = out[0, ids.shape[1] :].tolist()
    return new_ids


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options, or their `generation_config`, that would bypass the
    prefilled cache.
    """
    config = options.get("generation_config")
    given = {**(vars(config) if config is not None else {}), **options}
    wrong = [name for name in UNUSABLE if given.get(name) is not None]
    wrong += [name for name in ONE if (given.get(name) or 1) > 1]
    if wrong:
        raise SettingsError(
            f"generate's option '{wrong[0]}' cannot be used: one answer is written, to a prompt"
            " whose KV is in a cache already. Leave it out."
        )


def resolve_option(name: str, options: Mapping[str, Any], model: HFModel) -> Any:
    """Return an option of `generate`: from `options`, else their `generation_config`, else the
    model's own config.
    """
    configs = (options.get("generation_config"), model.model.generation_config)
    found = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in found if value is not None), None)


def stop_strings_of(options: Mapping[str, Any], model: HFModel) -> tuple[str, ...]:
    """Return the stop strings of the options, else of their generation config, else of the model's
    own.
    """
    found = resolve_option("stop_strings", options, model) or ()
    return (found,) if isinstance(found, str) else tuple(found)


def _adapted_options(model: HFModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options adapted to the prefilled cache.

    Stop strings are left to the caller's stopping criteria, because those of transformers also
    search the end of the prompt and do not work with every tokenizer. Token healing is switched
    off, because it removes the prompt's last token, whose KV is computed already. A missing padding
    id is set.
    """
    full = {
        **options,
        **dict.fromkeys(ONE, 1),
        "use_cache": True,
        "cache_implementation": None,
        "stop_strings": None,
        "token_healing": False,
        "return_dict_in_generate": False,
    }
    config = model.model.generation_config
    if config.pad_token_id is None and "pad_token_id" not in full:
        end = config.eos_token_id
        full["pad_token_id"] = end[0] if isinstance(end, list) else (end if end is not None else 0)
    return full


def _view(model: HFModel, prefill: Prefill, member: Member) -> Any:
    """Return a shallow copy of the model whose forward gives the prefill's logits first, then those
    of decoding steps; modules, weights and configs are shared.
    """
    view, plain, cache = copy.copy(model.model), model.model.forward, prefill.cache
    is_first = cache is not None

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        # e.g. a logits processor calls the model
        if args or kwargs.get(CACHE) is not cache:
            return model.batcher.step(None, functools.partial(plain, *args), kwargs)
        if cache is not None and is_first:
            is_first = False
            cache.length += 1
            return CausalLMOutputWithPast(logits=prefill.logits[None, None], **{CACHE: cache})
        return model.batcher.step(member, plain, kwargs)

    view.__dict__["forward"] = forward
    view.__dict__["_optimize_model_for_decode"] = (
        nullcontext  # it changes shared modules: each decoding step does it
    )
    return view
