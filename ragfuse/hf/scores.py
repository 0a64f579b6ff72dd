"""Log probabilities of the tokens of a text, by the model's own forward: nothing is reused and
nothing generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ragfuse.hf.model import HFModel
from ragfuse.process.exit import at_work

Score = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a token, and (id, log probability) of the most likely ids at its place,
best first.
"""


@at_work()
def scored(
    model: HFModel,
    token_ids: Sequence[int],
    n_top: int = 0,
    check: Callable[[], object] = lambda: None,
) -> list[Score]:
    """Return the scores of all tokens but the first, which nothing predicts.

    Args:
        model: The model.
        token_ids: The text.
        n_top: Number of most likely ids to report for each token.
        check: Called between forwards; it may raise to cancel.
    """
    ids, found = list(token_ids), list[Score]()
    if len(ids) < 2:
        return found
    for logits in model.logits_along(model.full_prefill(ids[:1]), ids[1:], check):
        predicted = ids[len(found) + 1 :][: len(logits)]
        rows = logits.float().log_softmax(-1)
        log_probs = rows.gather(1, torch.tensor([predicted], device=rows.device).T)[:, 0].tolist()
        best = rows.topk(min(n_top, rows.shape[1]), -1)
        tops = (
            tuple(zip(*each, strict=True))
            for each in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        found += zip(log_probs, tops, strict=True)
    return found
