"""How fast codecs are beside the model: encoding, decoding and prefilling the same chunk, in turns,
per core.

CPU time on a CPU, so that threads do not count as speed; by the wall on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ragfuse_bench.codec.coded import fp16_nbytes
from ragfuse_bench.rounds import Runner
from torch import Tensor

from ragfuse.codec import Codec, LayerMeta
from ragfuse.hf.model import HFModel
from ragfuse.types.kv import ChunkKV

PREFILL = "prefill"


@dataclass(frozen=True)
class Speed:
    """One codec on one chunk: its bytes, and seconds both ways."""

    nbytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Speeds:
    """All codecs on one chunk of some tokens and fp16 bytes, and the model's own prefill of it in
    seconds.
    """

    tokens: int
    fp16: int
    prefill_s: float
    by_name: Mapping[str, Speed]

    def figures(self, name: str) -> dict[str, float]:
        """MB of fp16 KV a second of one core both ways, and decoding's time over prefilling's."""
        mine, mega = self.by_name[name], self.fp16 / 1e6
        return {
            "encode_mbps": mega / max(mine.encode_s, 1e-9),
            "decode_mbps": mega / max(mine.decode_s, 1e-9),
            "decode_over_prefill": mine.decode_s / max(self.prefill_s, 1e-9),
        }


def speeds(
    model: HFModel, token_ids: Sequence[int], codecs: Mapping[str, Codec], runner: Runner
) -> Speeds:
    """Every codec and the prefill, taking turns on one chunk."""
    kv = model.encode(token_ids)
    cases: dict[str, Callable[[], object]] = {PREFILL: lambda: model.full_prefill(token_ids)}
    nbytes = dict[str, int]()
    for name, codec in codecs.items():
        blobs = [codec.encode(layer, at) for at, layer in enumerate(kv.layers)]
        metas = [LayerMeta.of(layer, blob) for layer, blob in zip(kv.layers, blobs, strict=True)]
        nbytes[name] = sum(blob.numel() for blob in blobs)
        cases[f"{name} encode"] = _encoding(codec, kv)
        cases[f"{name} decode"] = _decoding(codec, blobs, metas)
    times = {name: each.median_s for name, each in runner.measure(cases, "speed").items()}
    found = {
        name: Speed(nbytes[name], times[f"{name} encode"], times[f"{name} decode"])
        for name in codecs
    }
    return Speeds(len(token_ids), fp16_nbytes(kv), times[PREFILL], found)


def _encoding(codec: Codec, kv: ChunkKV) -> Callable[[], object]:
    return lambda: [codec.encode(layer, at) for at, layer in enumerate(kv.layers)]


def _decoding(
    codec: Codec, blobs: Sequence[Tensor], metas: Sequence[LayerMeta]
) -> Callable[[], object]:
    return lambda: [codec.decode(blob, meta) for blob, meta in zip(blobs, metas, strict=True)]
