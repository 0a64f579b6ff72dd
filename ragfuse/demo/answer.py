"""One question of the demo, answered both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DemoAnswer:
    """One question answered by full prefill and by ragfuse.

    Times are seconds to the first token; `kl_fused` and `kl_reuse` are the KL to full prefill, in
    nats per token.
    """

    question: str
    gold: str
    answer_full: str
    answer_fused: str
    right_full: bool
    right_fused: bool
    ttft_full_s: float
    ttft_fused_s: float
    speedup: float
    tokens: int
    tokens_reused: int
    tokens_recomputed: int
    kl_fused: float
    kl_reuse: float
    trace: dict[str, Any]
