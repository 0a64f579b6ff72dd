"""What became of each token of a prompt: reused, recomputed, fresh, or part of a known
beginning.
"""

from __future__ import annotations

from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.engine.request import PreparedPrompt

MAX_TRACED_TOKENS = 16_384
"""Most tokens of a prompt that are shown; of a longer one, the first."""
_FRESH, _PREFIX, _REUSED, _RECOMPUTED = "f", "p", "r", "c"
"""Letters for what became of a token: computed; reused exactly as part of a beginning, a module or
earlier turns; reused from a chunk; of a chunk, and recomputed in the layers after the check layer.
"""


class TokenRecorder:
    """Takes a prefilled prompt before its answer is generated, and says afterwards what became of
    its tokens.

    It keeps their ids and letters only, not the KV.
    """

    def __init__(self) -> None:
        self._ids, self._fates = list[int](), ""

    def put(self, prepared: PreparedPrompt) -> None:
        """Take the prefilled prompt."""
        plan, n_before = prepared.plan, prepared.prefill.n_before
        hits = {fetch.segment for fetch in plan.fetches} if not plan.fallback_reason else set()
        fates = list[str]()
        for index, (segment, (lo, hi)) in enumerate(
            zip(plan.prompt.segments, plan.prompt.spans, strict=True)
        ):
            reused = _REUSED if segment.kind == "chunk" else _PREFIX
            fates += [reused if index in hits else _FRESH] * (hi - lo)
        for row in prepared.prefill.chosen.tolist():
            if fates[row] == _REUSED:
                fates[row] = _RECOMPUTED
        fates[:n_before] = [_PREFIX] * n_before
        self._ids, self._fates = list(plan.prompt.token_ids), "".join(fates)

    def as_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the texts of the tokens, with a letter for each."""
        shown = self._ids[:MAX_TRACED_TOKENS]
        decode = engine.model.tokenizer.decode
        texts = [str(decode([id], skip_special_tokens=False)) for id in shown]
        return {"tokens": len(self._ids), "texts": texts, "fates": self._fates[: len(shown)]}
