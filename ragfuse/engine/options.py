"""What the options of an answer (`engine.ask.Ask`) mean for transformers' `generate`: lengths,
ends, sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ragfuse.engine.ask import Ask
from ragfuse.engine.overflow import asked_length
from ragfuse.errors import InputError
from ragfuse.hf.handover import resolve_option
from ragfuse.hf.model import HFModel
from ragfuse.settings import Settings


def options_of(ask: Ask, settings: Settings, room: int | None = None) -> dict[str, Any]:
    """Return the options for transformers' `generate`: greedy by default, at most `room` new
    tokens.

    Stop strings and penalties are not handled here (see `constraints.py`).

    Raises:
        InputError: `min_new_tokens` exceeds the room for the answer.
    """
    options = dict(ask.options)
    config = options.get("generation_config")
    if config is None:
        options.setdefault("do_sample", False)
    if not options.get("do_sample", getattr(config, "do_sample", False)):
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    if options.get("max_length") is None:
        limit = (
            asked_length(ask, room)
            or getattr(config, "max_new_tokens", None)
            or settings.max_tokens
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
    return options


def is_sampled(options: Mapping[str, Any], model: HFModel) -> bool:
    """Return whether tokens are sampled rather than chosen greedily."""
    return bool(resolve_option("do_sample", options, model))


def ends_of(model: HFModel, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
    """Return the ids that end an answer: the model's end tokens and those in `stop_token_ids`."""
    ends = resolve_option("eos_token_id", options, model)
    own = tuple(ends) if isinstance(ends, Sequence) else () if ends is None else (ends,)
    return tuple(dict.fromkeys((*own, *(options.get("stop_token_ids") or ()))))
