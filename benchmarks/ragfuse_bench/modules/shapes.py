"""What the KV of one token takes, by a model's shape (Prompt Cache 5.5, table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A model as its configuration has it. kv_heads: heads of its keys and values; paper: MB/token in the paper."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    paper: float

    def nbytes_per_token(self, value_bytes: int = 2) -> int:
        """Keys and values of every layer, of the heads that have keys."""
        return self._nbytes(self.kv_heads, value_bytes)

    def nbytes_of_all_heads(self, value_bytes: int = 2) -> int:
        """The same, as if each head of the queries had keys of its own."""
        return self._nbytes(self.heads, value_bytes)

    def _nbytes(self, heads: int, value_bytes: int) -> int:
        return 2 * self.layers * heads * self.head_dim * value_bytes


SHAPES = (
    Shape("BERT", 12, 12, 12, 64, 0.03),
    Shape("Falcon 1B", 24, 32, 32, 64, 0.18),
    Shape("Llama 7B", 32, 32, 32, 128, 0.50),
    Shape("Llama 13B", 40, 40, 40, 128, 0.78),
    Shape("MPT 30B", 48, 64, 64, 112, 1.31),
    Shape("Falcon 40B", 60, 128, 8, 64, 1.87),
    Shape("Llama 70B", 80, 64, 8, 128, 2.5),
    Shape("Falcon 180B", 80, 232, 8, 64, 4.53),
)
"""The paper's models (Falcon 1B: falcon-rw-1b, Llama 70B: Llama 2), by their published configurations."""


def sizes() -> list[dict[str, Any]]:
    """A row for each of `SHAPES`, in two bytes a value: the paper's number, by all heads, and by those with keys.

    mb_per_token counts megabytes as the paper seems to, 2**20 bytes; mb_of_1k: a module of 1,000 tokens.
    """
    return [
        {
            "what": shape.name,
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "paper_mb": shape.paper,
            "all_heads_mb": shape.nbytes_of_all_heads() / MIB,
            "mb_per_token": shape.nbytes_per_token() / MIB,
            "mb_of_1k": 1000 * shape.nbytes_per_token() / MIB,
        }
        for shape in SHAPES
    ]
