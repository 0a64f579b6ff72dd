"""What a change of a context's KV does to what the model says next: KL and top-1 along the text
that follows.

The same tokens are read over raw KV and over the changed one; the model's next-token distributions
are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragfuse_bench.codec.kv import Continued
from torch import Tensor

from ragfuse.hf.model import HFModel
from ragfuse.hf.rounding_error import kl
from ragfuse.types.kv import ChunkKV


@dataclass(frozen=True)
class Loss:
    """What changed KV costs, over n tokens: mean KL in nats, and share of equal first choices."""

    kl: float
    top1: float
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
        return Loss(max(0.0, kl(self.logits, found)), float(same), len(found))


def mean_loss(losses: Sequence[Loss]) -> Loss:
    """The mean over contexts, each counted by its tokens."""
    n = sum(loss.n for loss in losses)

    def of(name: str) -> float:
        return float(sum(getattr(each, name) * each.n for each in losses) / n)

    return Loss(of("kl"), of("top1"), n)
