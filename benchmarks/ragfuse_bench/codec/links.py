"""Time to the first token over links of any speed, from what was measured here: bytes, decoding, prefilling.

Nothing is sent: a link is bytes over bandwidth. What streams really take is `ragfuse bench stream`'s. Bandwidths are
scaled by one factor for all methods, so that loading 8-bit KV takes the same share of prefilling the text as in the
paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PIECE_TOKENS = 1500
PAPER_GBPS = 3.0
PAPER_MB, PAPER_TOKENS = 622.0, 9400
"""8-bit KV of Mistral-7B on LongChat (the paper's table 1), and the context's median length."""
PAPER_LOAD_OVER_TEXT = 0.456
"""T_load(8 bit) / T_prefill(text) at 3 Gbit/s: CacheGen is 1.67-1.81x faster than 8 bits and 3.1-4.7x faster than text
(section 7.2), so 8 bits take 1.67/4.7 = .36 to 1.81/3.1 = .58 of text's time; .456 is the geometric mean."""
TEXT_BYTES = 4.5
"""Bytes of text a token."""


@dataclass(frozen=True)
class Costs:
    """What was measured: seconds to prefill by length (in order), and to read a question behind the longest context.

    nbytes, decode_s, encode_s: of a token at each level. fp16: bytes of a token.
    """

    lengths: tuple[int, ...]
    prefill_s: tuple[float, ...]
    question_s: float
    nbytes: Mapping[str, float]
    decode_s: Mapping[str, float]
    encode_s: Mapping[str, float]
    fp16: float

    def text_s(self, tokens: int) -> float:
        """Seconds to prefill so many tokens: a quadratic through what was measured."""
        terms = min(2, len(self.lengths) - 1)
        fitted = np.polynomial.Polynomial.fit(self.lengths, self.prefill_s, terms)
        inside = np.interp(tokens, self.lengths, self.prefill_s)
        return float(inside if self.lengths[0] <= tokens <= self.lengths[-1] else max(fitted(tokens), 0.0))

    def factor(self) -> float:
        """Bits a second here for each bit a second in the paper."""
        tokens = min(PAPER_TOKENS, self.lengths[-1])
        here = 8 * self.nbytes["int8"] * tokens / (PAPER_LOAD_OVER_TEXT * self.text_s(tokens))
        return here / (PAPER_GBPS * 1e9)


@dataclass(frozen=True)
class Ttft:
    """Seconds to the first token, and of what: on the link, decoding (what the link does not hide), computing."""

    link_s: float
    decode_s: float
    compute_s: float

    @property
    def all_s(self) -> float:
        """The sum."""
        return self.link_s + self.decode_s + self.compute_s


def ttft(costs: Costs, method: str, tokens: int, gbps: float, requests: int = 1) -> Ttft:
    """Of a context of so many tokens by `text` or a level, at the paper's Gbit/s, with 1/requests of the compute."""
    bandwidth = gbps * 1e9 * costs.factor() / 8
    question_s = costs.question_s * requests
    if method == "text":
        return Ttft(TEXT_BYTES * tokens / bandwidth, 0.0, costs.text_s(tokens) * requests + question_s)
    arrived = decoded = 0.0
    for start in range(0, tokens, PIECE_TOKENS):
        piece = min(PIECE_TOKENS, tokens - start)
        arrived += piece * costs.nbytes[method] / bandwidth
        decoded = max(decoded, arrived) + piece * costs.decode_s[method] * requests
    return Ttft(arrived, decoded - arrived, question_s)


def row(costs: Costs, methods: Mapping[str, str], tokens: int, gbps: float, requests: int = 1) -> dict[str, Any]:
    """Seconds by method, given as {name: "text" or a level}, and which is fastest."""
    seconds = {name: ttft(costs, method, tokens, gbps, requests).all_s for name, method in methods.items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    return {
        "tokens": tokens,
        "gbps": gbps,
        "requests": requests,
        **{f"{name}_s": each for name, each in seconds.items()},
        "fastest": methods[fastest],
    }
