"""The servers of the AttentionStore paper as figures: bytes of KV and seconds of prefilling and
decoding by token.

Prefilling is linear in tokens. Its rate is what the paper gives for LLaMA-65B (section 2.4: 2K
tokens in 360 ms on four A100); the other models' follow by parameters and GPUs. A decoding step
reads the weights and the KV of a whole batch once, at `MEMORY_SHARE` of what the GPUs' memory
gives: the paper has such times in pictures only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GB = 10**9
PREFILL_65B_S = 0.36 / 2048
GPU_MEMORY_BPS = 2.0e12
MEMORY_SHARE = 0.35
PCIE_BPS = 26e9
"""From host memory to GPUs (section 2.4)."""
DISK_BPS = 5e9
"""Read from disks ("less than 5GB/s", section 2.4)."""


@dataclass(frozen=True)
class Server:
    """A model on some GPUs: parameters in billions, KV bytes of a token, its context window,
    requests at once.
    """

    name: str
    billions: float
    token_bytes: float
    window: int | None
    gpus: int
    batch: int = 24
    usual_tokens: int = 1500

    @property
    def prefill_s(self) -> float:
        """Of a token."""
        return PREFILL_65B_S * (self.billions / 65) * (4 / self.gpus)

    @property
    def step_s(self) -> float:
        """Of one decoding step of a full batch."""
        nbytes = 2e9 * self.billions + self.batch * self.usual_tokens * self.token_bytes
        return nbytes / (self.gpus * GPU_MEMORY_BPS * MEMORY_SHARE)


SERVERS: Mapping[str, Server] = MappingProxyType(
    {server.name: server for server in (Server("LLaMA-13B", 13, 0.78e6, 4096, 2),)}
)
"""Sections 4.1 and 4.2; Falcon's and LLaMA-1's windows are their own 2K, LLaMA-2's 4K."""
