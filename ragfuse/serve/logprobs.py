"""How likely an answer's tokens were: noted while they are drawn, as a logits processor that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ZERO_LOGPROB = -9999.0
"""What stands for a probability of zero, as OpenAI has it."""

Spell = Callable[[int], str]


@dataclass(frozen=True)
class Likely:
    """One token: its id, the logarithm of its probability before any sampling, and the likeliest beside it.

    logprob: None for a prompt's first token, which nothing predicts.
    """

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Noted:
    """Takes note of one sequence. `generate` calls it before each token; what was drawn it sees at the next call.

    Written by the answer's thread; `take` may be called by another.
    """

    def __init__(self, n_top: int) -> None:
        self._n_top, self._row, self._noted, self._taken = n_top, None, list[Likely](), 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The same scores [1, V]."""
        if self._row is not None:
            self._note(int(input_ids[0, -1]))
        self._row = scores[0].detach().float().log_softmax(-1)
        return scores

    def end(self, ids: Sequence[int]) -> None:
        """The whole answer is known: what was drawn last is its last token, what ends it is none of it."""
        if self._row is not None and len(self._noted) < len(ids):
            self._note(ids[-1])
        self._row = None
        del self._noted[len(ids) :]

    def take(self) -> list[Likely]:
        """Those that came since it was called last."""
        new = self._noted[self._taken :]
        self._taken += len(new)
        return new

    def _note(self, token: int) -> None:
        row: Any = self._row
        n = min(self._n_top, len(row))
        best = row.topk(n) if n else None
        top = () if best is None else tuple(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
        self._noted.append(Likely(token, _finite(float(row[token])), top))


def of_prompt(scores: Iterable[tuple[int, tuple[float, Sequence[tuple[int, float]]] | None]]) -> list[Likely]:
    """How likely a prompt's own tokens are, by an engine's scores."""
    return [
        Likely(id, None)
        if score is None
        else Likely(id, _finite(score[0]), tuple((other, _finite(p)) for other, p in score[1]))
        for id, score in scores
    ]


def as_chat(likely: Sequence[Likely], spell: Spell) -> list[dict[str, Any]]:
    """As chat completions have it."""
    return [
        {**_token(each.id, each.logprob, spell), "top_logprobs": [_token(id, p, spell) for id, p in each.top]}
        for each in likely
    ]


def as_text(likely: Sequence[Likely], spell: Spell, offset: int = 0) -> dict[str, Any]:
    """As completions of a text have it; offset: characters of the answer before these."""
    tokens = [spell(each.id) for each in likely]
    starts = [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in likely],
        "top_logprobs": [
            None if each.logprob is None else {spell(id): p for id, p in reversed(each.top)} for each in likely
        ],
        "text_offset": starts,
    }


def _token(id: int, logprob: float | None, spell: Spell) -> dict[str, Any]:
    text = spell(id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def _finite(value: float) -> float:
    return max(value, ZERO_LOGPROB)
