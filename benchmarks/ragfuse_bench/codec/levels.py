"""Size against quality: every level on the same contexts and questions, beside uniform
quantisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse_bench.codec.coded import INT8, Coded, coded, fp16_nbytes
from ragfuse_bench.codec.contexts import Context
from ragfuse_bench.codec.fidelity import Loss, Told, mean_loss

from ragfuse.codec import Codec
from ragfuse.hf.model import HFModel


@dataclass(frozen=True)
class Found:
    """One way of coding one context: its loss, its bytes and those of fp16."""

    loss: Loss
    nbytes: int
    fp16: int

    @classmethod
    def of(cls, loss: Loss, done: Coded) -> Found:
        """Of what came out."""
        return cls(loss, done.nbytes, fp16_nbytes(done.kv))


def fidelities(
    model: HFModel, contexts: Iterable[Context], codecs: Mapping[str, Codec]
) -> dict[str, list[Found]]:
    """Each context by each codec, in order."""
    found = defaultdict[str, list[Found]](list)
    for context in contexts:
        kv = model.encode(context.token_ids)
        told = Told.of(model, kv, context.follow)
        for name, codec in codecs.items():
            done = coded(codec, kv)
            found[name].append(Found.of(told.loss(model, done.kv), done))
    return dict(found)


def rows_of(found: Mapping[str, Sequence[Found]]) -> list[dict[str, Any]]:
    """A row for each codec: bytes over fp16 and how many times smaller than 8 bits, KL, top-1."""
    by_name = {name: _row(name, mine) for name, mine in found.items()}
    for row in by_name.values():
        row["x_vs_int8"] = by_name[INT8]["bytes_over_fp16"] / row["bytes_over_fp16"]
    return list(by_name.values())


def _row(name: str, mine: Sequence[Found]) -> dict[str, Any]:
    loss = mean_loss([each.loss for each in mine])
    return {
        "name": name,
        "bytes_over_fp16": sum(each.nbytes for each in mine) / sum(each.fp16 for each in mine),
        "kl": loss.kl,
        "top1": loss.top1,
        "contexts": len(mine),
        "tokens": loss.n,
    }
