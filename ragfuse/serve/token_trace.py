"""What became of each token of a prompt: reused, recomputed, fresh, or part of a known beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.engine.request import PreparedPrompt
from ragfuse.types.answer import Trace
from ragfuse.types.plan import LoadPlan

MAX_TRACED_TOKENS = 16_384
"""Most tokens of a prompt that are shown; of a longer one, the first."""
_FRESH, _PREFIX, _REUSED, _RECOMPUTED = "f", "p", "r", "c"
"""Letters for what became of a token: computed; reused exactly as part of a beginning, a module or earlier turns;
reused from a chunk; of a chunk, and recomputed in the layers after the check layer."""


class TokenRecorder:
    """Takes a prefilled prompt before its answer is generated, and says afterwards what became of its tokens.

    It keeps the plan and the recomputed rows only, not the KV.
    """

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None
        self._recomputed: tuple[int, ...] = ()
        self._n_before = 0

    def put(self, prepared: PreparedPrompt) -> None:
        """Take the prefilled prompt."""
        self._plan, self._recomputed = prepared.plan, tuple(prepared.prefill.chosen.tolist())
        self._n_before = prepared.prefill.n_before

    def as_dict(self, engine: Engine, trace: Trace) -> dict[str, Any] | None:
        """Return the tokens' texts, a letter for each, and the segments; None where no prompt was prefilled here.

        In `segments`, `at` is the index of the segment in the trace's segments; None for fresh text.
        """
        if self._plan is None:
            return None
        prompt, tokenizer = self._plan.prompt, engine.model.tokenizer
        ids = prompt.token_ids[:MAX_TRACED_TOKENS]
        return {
            "tokens": len(prompt),
            "texts": [str(tokenizer.decode([id], skip_special_tokens=False)) for id in ids],
            "fates": self._fates(self._plan)[: len(ids)],
            "segments": list(self._segments(self._plan, trace, len(ids))),
        }

    def _fates(self, plan: LoadPlan) -> str:
        hits = {fetch.segment for fetch in plan.fetches} if not plan.fallback_reason else set()
        fates = list[str]()
        for index, (segment, (lo, hi)) in enumerate(zip(plan.prompt.segments, plan.prompt.spans, strict=True)):
            reused = _REUSED if segment.kind == "chunk" else _PREFIX
            fates += [reused if index in hits else _FRESH] * (hi - lo)
        for row in self._recomputed:
            if fates[row] == _REUSED:
                fates[row] = _RECOMPUTED
        fates[: self._n_before] = [_PREFIX] * self._n_before
        return "".join(fates)

    def _segments(self, plan: LoadPlan, trace: Trace, n_shown: int) -> Iterator[dict[str, Any]]:
        """Yield the segments with their rows, and where the trace tells of each."""
        known = {(each.start, each.kind): at for at, each in enumerate(trace.segments)}
        if self._n_before:
            yield {"from": 0, "to": min(self._n_before, n_shown), "kind": "prefix", "at": known.get((0, "prefix"))}
        for segment, (lo, hi) in zip(plan.prompt.segments, plan.prompt.spans, strict=True):
            lo, hi = max(lo, self._n_before), min(hi, n_shown)
            at = known.get((segment.start, segment.kind))
            if lo < hi:
                yield {"from": lo, "to": hi, "kind": "fresh" if at is None else segment.kind, "at": at}
