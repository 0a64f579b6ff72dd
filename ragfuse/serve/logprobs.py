"""Log probabilities of generated tokens, recorded by a logits processor that leaves the logits
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ZERO_LOGPROB = -9999.0
"""The log probability that OpenAI's API gives for a probability of zero."""

DecodeToken = Callable[[int], str]


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its log probability before any sampling options apply.

    Args:
        id: The token id.
        logprob: Its log probability.
        top: The most likely tokens at this position, as (id, log probability), best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class LogprobRecorder:
    """A logits processor that records the log probabilities of one sequence.

    `generate` calls it before it draws a token, so which token was drawn shows only at the next
    call. The generating thread calls it; `take` may be called from another thread.

    Args:
        n_top: Most likely tokens to record for each position.
    """

    def __init__(self, n_top: int) -> None:
        self.n_top, self._log_probabilities, self._recorded, self._n_taken = (
            n_top,
            None,
            list[TokenLogprob](),
            0,
        )

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Record the scores `[1, vocabulary]`, and return them unchanged."""
        if self._log_probabilities is not None:
            self._record(int(input_ids[0, -1]))
        self._log_probabilities = scores[0].detach().float().log_softmax(-1)
        return scores

    def end(self, ids: Sequence[int]) -> None:
        """Record the last token of the finished answer `ids`, its end token included, and drop what
        follows.
        """
        if self._log_probabilities is not None and len(self._recorded) < len(ids):
            self._record(ids[-1])
        self._log_probabilities = None
        del self._recorded[len(ids) :]

    def take(self) -> list[TokenLogprob]:
        """Return the tokens recorded since the last call."""
        new = self._recorded[self._n_taken :]
        self._n_taken += len(new)
        return new

    def _record(self, token: int) -> None:
        row: Any = self._log_probabilities
        n = min(self.n_top, len(row))
        best = row.topk(n) if n else None
        top = (
            ()
            if best is None
            else tuple(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
        )
        self._recorded.append(TokenLogprob(token, _finite(float(row[token])), top))


def as_chat(token_logprobs: Sequence[TokenLogprob], decode: DecodeToken) -> dict[str, Any]:
    """Return `logprobs` of a chat completion."""
    content = [
        {
            **_token(each.id, each.logprob, decode),
            "top_logprobs": [_token(id, p, decode) for id, p in each.top],
        }
        for each in token_logprobs
    ]
    return {"content": content, "refusal": None}


def as_text(token_logprobs: Sequence[TokenLogprob], decode: DecodeToken) -> dict[str, Any]:
    """Return `logprobs` of a text completion, without `text_offset`."""
    tops = [{decode(id): p for id, p in reversed(each.top)} for each in token_logprobs]
    return {
        "tokens": [decode(each.id) for each in token_logprobs],
        "token_logprobs": [each.logprob for each in token_logprobs],
        "top_logprobs": tops,
    }


def _token(id: int, logprob: float, decode: DecodeToken) -> dict[str, Any]:
    text = decode(id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def _finite(value: float) -> float:
    return max(value, ZERO_LOGPROB)
