"""What became of each token of a prompt: reused, recomputed, fresh, or part of a known
beginning.
"""

from __future__ import annotations

from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.engine.request import PreparedPrompt

MAX_TRACED_TOKENS = 16_384
"""Most tokens of a prompt that are shown; of a longer one, the first."""


class TokenRecorder:
    """Takes a prefilled prompt before its answer is generated, and says afterwards what became of
    its tokens.

    It keeps their ids and a letter for each, not the KV: "f" for a token that was computed; "p" for
    one that was reused exactly as part of a beginning, a module or earlier turns; "r" for one that
    was reused from a chunk; "c" for one of a chunk that was recomputed in the layers after the
    check layer.
    """

    def __init__(self) -> None:
        self._ids, self._fates = list[int](), ""

    def put(self, prepared: PreparedPrompt) -> None:
        """Take the prefilled prompt."""
        plan, prefill, fates = prepared.plan, prepared.prefill, list[str]()
        hits = {fetch.segment for fetch in plan.fetches} if not plan.fallback_reason else set()
        for at, segment in enumerate(plan.prompt.segments):
            lo, hi = plan.prompt.spans[at]
            reused = "r" if segment.kind == "chunk" else "p"
            fates += [reused if at in hits else "f"] * (hi - lo)
        for row in prefill.chosen.tolist():
            fates[row] = "c" if fates[row] == "r" else fates[row]
        fates[: prefill.n_before] = ["p"] * prefill.n_before
        self._ids, self._fates = list(plan.prompt.token_ids), "".join(fates)

    def as_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the texts of the tokens, with a letter for each."""
        shown = self._ids[:MAX_TRACED_TOKENS]
        texts = [engine.model.tokenizer.decode([id], skip_special_tokens=False) for id in shown]
        return {"tokens": len(self._ids), "texts": texts, "fates": self._fates[: len(shown)]}
