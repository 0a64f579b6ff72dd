"""What a change of a context's KV does to what the model says next: KL and top-1 along the text
that follows.

The same tokens are read over raw KV and over the changed one; the model's next-token distributions
are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from ragfuse_bench.codec.kv import Continued
from torch import Tensor

from ragfuse.hf.model import HFModel
from ragfuse.hf.rounding_error import kl
from ragfuse.types.kv import ChunkKV


@dataclass(frozen=True)
class Loss:
    """What changed KV costs, over n tokens: mean KL in nats, share of equal first choices, and both
    perplexities.

    nll, raw_nll: mean nats of the text's own tokens over changed and over raw KV.
    """

    kl: float
    top1: float
    nll: float
    raw_nll: float
    n: int


@dataclass(frozen=True)
class Told:
    """What raw KV says along a text: logits float32 [n, V] behind each id, and the ids that came
    next in the text.
    """

    follow: tuple[int, ...]
    logits: Tensor

    @classmethod
    def of(cls, model: HFModel, kv: ChunkKV, follow: Sequence[int]) -> Told:
        """Along the ids behind a context."""
        return cls(tuple(follow), Continued(model, kv).logits(follow[:-1]))

    def loss(self, model: HFModel, kv: ChunkKV) -> Loss:
        """Of other KV of the same context."""
        found = Continued(model, kv).logits(self.follow[:-1])
        same = (found.argmax(-1) == self.logits.argmax(-1)).float().mean()
        nll, raw_nll = (_nll(logits, self.follow[1:]) for logits in (found, self.logits))
        return Loss(max(0.0, kl(self.logits, found)), float(same), nll, raw_nll, len(found))


def mean_loss(losses: Sequence[Loss]) -> Loss:
    """The mean over contexts, each counted by its tokens."""
    n = sum(loss.n for loss in losses)

    def of(name: str) -> float:
        return float(sum(getattr(each, name) * each.n for each in losses) / n)

    return Loss(of("kl"), of("top1"), of("nll"), of("raw_nll"), n)


def _nll(logits: Tensor, ids: Sequence[int]) -> float:
    logs = torch.log_softmax(logits, -1)
    return -mean(float(logs[row, token]) for row, token in enumerate(ids))
