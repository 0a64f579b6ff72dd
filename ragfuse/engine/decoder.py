"""Decoding in another engine, which goes on from the KV of a prompt that was prefilled here.

How that engine is reached is its `Decoder`'s matter. Here is what an answer's options mean for one, and what becomes of
an answer that it does not write to its end: this engine goes on behind the tokens that have come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from ragfuse.engine.constraints import OutputConstraints
from ragfuse.engine.options import ends_of, is_sampled
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.hf.handover import resolve_option

log = logging.getLogger("ragfuse.engine")

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("num_beams", "num_return_sequences", "encoder_repetition_penalty", "typical_p"), (1,)),
        **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), (0,)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
        **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
        **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
        **dict.fromkeys(("guidance_scale",), (1,)),
        **dict.fromkeys(("watermarking_config", "top_h", "max_time"), ()),
        **dict.fromkeys(("remove_invalid_values",), (False,)),
    }
)
"""Options of `generate` that other engines do not have, with the values besides None at which they change nothing."""
LEAST_TEMPERATURE = 0.01
"""Temperatures below this are raised by vLLM."""


class DecoderError(Exception):
    """The reason why another engine does not write an answer, or not to its end."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is sampled and where it ends, in the words of OpenAI's and vLLM's APIs.

    Args:
        max_tokens: Most tokens of the answer.
        temperature: 0 for the likeliest tokens.
        top_p: Share of probability to sample from.
        top_k: Likeliest tokens to sample from; 0 for all.
        min_p: Least probability of a token, as a share of the likeliest one's.
        presence_penalty: Subtracted from the logits of tokens that the answer has.
        frequency_penalty: Subtracted once for each time that the answer has them.
        repetition_penalty: Divides the logits of tokens of prompt and answer.
        logit_bias: Added to logits, by token id.
        seed: The seed; None for any.
        stop: Stop strings that the other engine may look for in all of the answer's text.
        stop_token_ids: All ids that end the answer, the model's own included.
        min_tokens: Tokens before which none of them does.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class Decoder(Protocol):
    """Another engine for one answer."""

    @property
    def processors(self) -> Sequence[object]:
        """The logits processors among the answer's options whose work that engine does."""
        ...

    def decode(self, prepared: PreparedPrompt, sampling: Sampling) -> Generator[Sequence[int], None, None]:
        """Yield the answer's ids as they come, up to `sampling.max_tokens`.

        An empty piece means that nothing has come for a moment. The iterator is closed when the answer is over, or is
        not wanted any more.

        Raises:
            DecoderError: That engine does not write the answer, or has stopped before its end.
        """
        ...

    def resume(self, n_ids: int) -> None:
        """Note that this engine goes on, and that its logits processors see the first `n_ids` ids again."""
        ...

    def decline(self, why: str) -> None:
        """Note that that engine is not asked, as it could not do what is asked for."""
        ...


def sampling_of(options: Mapping[str, Any], constraints: OutputConstraints, done: Sequence[object] = ()) -> Sampling:
    """Return what an answer's options mean for another engine.

    Args:
        options: The options for `generate`, as `options_of` returns them.
        constraints: The answer's constraints.
        done: Logits processors whose work the other engine does: they record log probabilities.

    Raises:
        DecoderError: Another engine would not choose the same tokens with equal probability.
    """
    model, given = constraints.model, {name: resolve_option(name, options, constraints.model) for name in NEUTRAL}
    if constraints.grammar is not None:
        raise DecoderError("tools or a grammar steer the answer")
    if any(all(each is not other for other in done) for each in options.get("logits_processor") or ()):
        raise DecoderError("a logits processor steers the answer")
    strange = next((name for name, value in given.items() if value is not None and value not in NEUTRAL[name]), None)
    if strange is not None or "max_new_tokens" not in options:
        raise DecoderError(f"{strange or 'max_length'} is set")
    drawn = {name: resolve_option(name, options, model) for name in ("temperature", "top_p", "top_k", "min_p")}
    drawn = drawn if is_sampled(options, model) else dict.fromkeys(drawn, None) | {"temperature": 0.0}
    sampling = Sampling(
        max_tokens=options["max_new_tokens"],
        temperature=_number(drawn["temperature"], 1.0),
        top_p=_number(drawn["top_p"], 1.0),
        top_k=int(drawn["top_k"] or 0),
        min_p=_number(drawn["min_p"], 0.0),
        presence_penalty=_number(options.get("presence_penalty"), 0.0),
        frequency_penalty=_number(options.get("frequency_penalty"), 0.0),
        repetition_penalty=_number(resolve_option("repetition_penalty", options, model), 1.0),
        logit_bias={int(id): float(bias) for id, bias in (options.get("logit_bias") or {}).items()},
        seed=constraints.ask.seed,
        stop=constraints.stops(options) if constraints.thoughts is None else (),  # else those in thoughts would count
        stop_token_ids=ends_of(model, options),
        min_tokens=int(resolve_option("min_new_tokens", options, model) or 0),
    )
    _check_order(sampling, bool(done))
    return sampling


def _check_order(sampling: Sampling, has_logprobs: bool) -> None:
    """Raise DecoderError for options that engines apply in another order than transformers does."""
    repeats = sampling.repetition_penalty != 1.0
    pairs = {
        "a temperature near 0": 0 < sampling.temperature < LEAST_TEMPERATURE,
        "min_p with top_p": sampling.min_p > 0 and sampling.top_p < 1,
        "repetition_penalty with logit_bias": repeats and bool(sampling.logit_bias),
        "log probabilities with repetition_penalty": has_logprobs and repeats,
        "log probabilities with min_tokens": has_logprobs and sampling.min_tokens > 0,
    }
    found = next((name for name, is_so in pairs.items() if is_so), None)
    if found is not None:
        raise DecoderError(f"{found} means something else in other engines")


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


def decode_elsewhere(
    decoder: Decoder,
    prepared: PreparedPrompt,
    options: Mapping[str, Any],
    constraints: OutputConstraints,
    put: Callable[[Tensor], object],
    ends: Sequence[threading.Event],
) -> tuple[list[int], bool]:
    """Have another engine write an answer.

    Args:
        decoder: The other engine.
        prepared: The prefilled prompt, whose KV stays as it is.
        options: The options for `generate`.
        constraints: The answer's constraints, for this prompt.
        put: Called with each id, int64 [1].
        ends: Events that end the answer.

    Returns:
        The ids, and whether the answer is over. If it is not, this engine goes on behind them.
    """
    ids, draft = list[int](), constraints.draft(options)
    try:
        sampling = sampling_of(options, constraints, decoder.processors)
    except DecoderError as error:
        decoder.decline(str(error))
        return ids, False
    try:
        with closing(decoder.decode(prepared, sampling)) as pieces:
            for piece in pieces:
                for id in piece:
                    ids.append(id)
                    draft.add([id])
                    put(torch.tensor([id]))
                    if draft.over or len(ids) >= sampling.max_tokens:
                        return ids, True
                if any(end.is_set() for end in ends):
                    return ids, bool(ids)
    except DecoderError as error:
        log.debug("Another engine stopped after %d tokens of an answer: %s", len(ids), error)
    return ids, False
