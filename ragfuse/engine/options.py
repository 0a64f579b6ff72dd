"""What the options of an answer (`engine.ask.Ask`) mean for transformers' `generate`: lengths,
ends, sampling, penalties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ragfuse.engine.request import Request
from ragfuse.errors import InputError
from ragfuse.hf.grammar import GrammarProcessor, Penalties
from ragfuse.hf.handover import resolve_option
from ragfuse.hf.model import HFModel

RAGFUSE_OPTIONS = ("presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids")
"""Options that transformers' `generate` does not have."""


def generate_options(
    request: Request, n_prompt: int, rules: Sequence[GrammarProcessor] = ()
) -> dict[str, Any]:
    """Return the options for transformers' `generate`: greedy by default, and no longer than the
    model's context allows.

    Stop strings are not handled here (see `draft.py`).

    Args:
        request: The request.
        n_prompt: The positions that the prompt takes.
        rules: What else changes the logits.

    Raises:
        InputError: `min_new_tokens` exceeds the room for the answer, or an option names ids that
            are not tokens.
    """
    ask, model, options = request.ask, request.model, dict(request.ask.options)
    config = options.get("generation_config")
    if config is None:
        options.setdefault("do_sample", False)
    if not options.get("do_sample", getattr(config, "do_sample", False)):
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    if options.get("max_length") is None:
        room = model.max_context and model.max_context - n_prompt + 1
        limit = (
            request.max_tokens(room)
            or getattr(config, "max_new_tokens", None)
            or request.runtime.settings.max_tokens
        )
        options["max_new_tokens"] = limit if room is None else min(limit, room)
        min_tokens = options.get("min_new_tokens") or 0
        if min_tokens > options["max_new_tokens"]:
            raise InputError(
                f"min_new_tokens is {min_tokens}, but the answer can have at most"
                f" {options['max_new_tokens']} tokens. Lower it, raise max_tokens, or shorten the"
                " prompt.",
                "min_new_tokens",
            )
    presence, frequency, bias, stops = (options.pop(name, None) for name in RAGFUSE_OPTIONS)
    processors = [*(options.get("logits_processor") or ())]
    if presence or frequency:
        processors.append(Penalties(float(presence or 0), float(frequency or 0)))
    if bias:
        _check_ids("logit_bias", bias, model)
        options["sequence_bias"] = {(int(id),): float(value) for id, value in bias.items()}
    if stops:
        _check_ids("stop_token_ids", stops, model)
        options["eos_token_id"] = list(ends_of(model, ask.options))
    if processors := [*processors, *rules]:
        options["logits_processor"] = processors
    return {**options, "stop_strings": ()}


def ends_of(model: HFModel, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
    """Return the ids that end an answer: the model's end tokens and those in `stop_token_ids`."""
    ends = resolve_option("eos_token_id", options, model)
    own = tuple(ends) if isinstance(ends, Sequence) else () if ends is None else (ends,)
    return tuple(dict.fromkeys((*own, *(options.get("stop_token_ids") or ()))))


def n_logits(model: HFModel) -> int:
    """Return the size of the model's logits: how many tokens it can generate."""
    head = model.model.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else len(model.tokenizer)


def _check_ids(name: str, ids: Iterable[Any], model: HFModel) -> None:
    """Raise InputError if the option `name` has an id that is not a token's."""
    n_ids = n_logits(model)
    wrong = next((id for id in ids if not str(id).isdecimal() or int(id) >= n_ids), None)
    if wrong is not None:
        raise InputError(
            f"{name} has {wrong!r:.40}, which is not a token id of {model.name}; wanted 0 to"
            f" {n_ids - 1:,}.",
            name,
        )
