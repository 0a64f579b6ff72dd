"""Requests to a vLLM server for answers to prefilled prompts, and the pieces of answers in its events.

A prompt is sent as its token ids to `/v1/completions`, whatever the client asked, and tokens come back as ids: chat
templates, reasoning and stop strings are this server's own, so that an answer reads the same whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.engine.decoder import Sampling
from ragfuse.serve.logprobs import ZERO_LOGPROB, TokenLogprob

TOKEN_ID = "token_id:"
"""What vLLM writes before a token's id where it is asked for ids in place of texts."""


@dataclass(frozen=True)
class DecodedPiece:
    """Some tokens of an answer.

    Args:
        ids: Their ids.
        token_logprobs: One for each id, if they were asked for.
        finish_reason: Why the answer ends behind them; "" where it goes on.
    """

    ids: Sequence[int]
    token_logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str = ""


def decode_body(
    model: str, ids: Sequence[int], sampling: Sampling, params: Mapping[str, Any], n_top: int | None
) -> dict[str, Any]:
    """Return the body of a request for a streamed answer.

    Every option is given, as a server's own defaults may come from its model's files.

    Args:
        model: The model's name there.
        ids: The prompt's ids.
        sampling: How to sample, and where to end.
        params: The `kv_transfer_params`.
        n_top: How many of the likeliest tokens to report at each position; None: no log probabilities.
    """
    return {
        "model": model,
        "prompt": list(ids),
        "stream": True,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(id): bias for id, bias in sampling.logit_bias.items()} or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # those of this server's model are among stop_token_ids
        "logprobs": n_top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True if n_top is not None else None,
        "kv_transfer_params": dict(params),
    }


def piece_of(event: Mapping[str, Any], n_most: int, n_ids: int, n_top: int | None) -> DecodedPiece:
    """Return the tokens in an event of a stream.

    Args:
        event: The event, of which nothing is trusted.
        n_most: Most tokens that it may have.
        n_ids: Size of the vocabulary.
        n_top: How many of the likeliest tokens were asked for; None: no log probabilities.

    Raises:
        ValueError: It is not what was asked for; the message says what it has.
    """
    choices = event.get("choices")
    if choices == []:  # usage, which a server may add
        return DecodedPiece(())
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict):
        raise ValueError("an event without one choice")
    ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    if ids is None and not choice.get("text"):
        ids = []
    if not isinstance(ids, list) or any(type(id) is not int or not 0 <= id < n_ids for id in ids):
        raise ValueError("an event without the token ids of its text, or with ids that are none")
    if len(ids) > n_most:
        raise ValueError("more tokens than were asked for")
    if reason is not None and not isinstance(reason, str):
        raise ValueError("a finish_reason that is no text")
    token_logprobs = _logprobs(choice.get("logprobs"), ids, n_ids, n_top) if n_top is not None and ids else ()
    return DecodedPiece(ids, token_logprobs, reason or "")


def _logprobs(given: object, ids: Sequence[int], n_ids: int, n_top: int) -> list[TokenLogprob]:
    fields = given if isinstance(given, dict) else {}
    logprobs, tops = fields.get("token_logprobs"), fields.get("top_logprobs")
    tops = [None] * len(ids) if tops is None and not n_top else tops
    if not isinstance(logprobs, list) or not isinstance(tops, list) or not len(ids) == len(logprobs) == len(tops):
        raise ValueError("tokens without their log probabilities")
    found = []
    for id, logprob, top in zip(ids, logprobs, tops, strict=True):
        if not isinstance(top, dict) and n_top:
            raise ValueError("tokens without the likeliest ones beside them")
        pairs = [(_id(name, n_ids), _number(value)) for name, value in (top or {}).items()]
        best = sorted(pairs, key=lambda pair: -pair[1])[:n_top]
        found.append(TokenLogprob(id, _number(logprob), tuple(best)))
    return found


def _id(name: str, n_ids: int) -> int:
    digits = name.removeprefix(TOKEN_ID)
    if digits == name or not digits.isdecimal() or not digits.isascii() or len(digits) > 9 or int(digits) >= n_ids:
        raise ValueError("log probabilities of tokens without their ids")
    return int(digits)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("log probabilities that are no numbers")
    return max(min(float(value), 0.0), ZERO_LOGPROB)
