"""A prompt as segments of tokens: fresh segments, and segments whose KV may be stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from ragfuse.types.keys import ChunkKey, Kind

if TYPE_CHECKING:
    from torch import Tensor


MAX_TITLE_CHARS = 256
"""Maximum characters of a document's title, which is stored with the document's chunk."""
MAX_RETRIEVED = 256
"""Maximum retrieved documents of a question. Retrievers return the best documents first."""
OVERLONG = "context_length_exceeded"
"""Error code of a prompt that is too long. Clients check for this code of OpenAI's API."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a prompt. Their KV is computed (fresh) or loaded under one key.

    Args:
        tokens: Token ids.
        start: Position of the segment's first token.
        kind: "fresh" (only computed), "chunk", "prefix" (shared with earlier prompts), "module" (of
            a schema) or "history" (earlier turns).
        keys: Keys under which the KV may be stored, best first. Empty only for a fresh segment.
        source: Where the text of a chunk came from, or `plan.CODE` for source code.
        text: The text of a chunk.
        rows: The segment uses rows lo:hi of the stored run of tokens. None means all rows.
        origin: Position of row 0 of the stored run. If None, the position follows from `start` and
            `rows`.
        stored: Token ids of the whole stored run. Empty if the segment uses the whole run.
        document: Index of the retrieved document that contains the segment. -1 for none.
    """

    tokens: tuple[int, ...]
    start: int
    kind: Kind = "fresh"
    keys: tuple[ChunkKey, ...] = ()
    source: str = ""
    text: str = field(default="", repr=False, compare=False)
    rows: tuple[int, int] | None = None
    origin: int | None = None
    stored: tuple[int, ...] = field(default=(), repr=False, compare=False)
    document: int = field(default=-1, repr=False, compare=False)

    @property
    def shift(self) -> int:
        """Number of positions by which the stored run's keys are rotated."""
        return self.origin if self.origin is not None else self.start - self.row

    @property
    def row(self) -> int:
        """Index of the segment's first token in the stored run of tokens."""
        return self.rows[0] if self.rows is not None else 0

    @property
    def run(self) -> tuple[int, ...]:
        """Token ids of the whole stored run of tokens."""
        return self.stored or self.tokens

    @property
    def stop(self) -> int:
        """Position after the segment's last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Prompt:
    """A prompt as consecutive segments. Positions strictly increase and may have gaps.

    The final segment is fresh, so at least one token is computed. The prompt's final row gives the
    first logits. A row is the index of a token in the prompt.

    Args:
        segments: The segments, in order.
        truncated: Number of the conversation's tokens that were dropped to fit the context.
        conversation: The conversation that the prompt continues
            (`sessions.session.PendingTurn`). None without a conversation.
        schema_use: The parts of a schema that the prompt reuses (`schemas.bind.SchemaUse`). None
            without a schema.
        last_user_rows: Rows lo:hi of the last message's text if the user wrote the message, else
            (0, 0). If the prompt was built from one text or from ids, the rows of that text or ids.
        altered: True if documents were retrieved for the prompt, but no document occurs verbatim
            and no chunk was found.
        first_chunk: The row at which the first chunk begins. -1 without chunks.
    """

    segments: tuple[Segment, ...]
    truncated: int = 0
    conversation: Any = field(default=None, repr=False, compare=False)
    schema_use: object = field(default=None, repr=False, compare=False)
    last_user_rows: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    altered: bool = field(default=False, repr=False, compare=False)
    first_chunk: int = field(default=-1, repr=False, compare=False)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of all T tokens."""
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments))

    @cached_property
    def positions(self) -> Tensor:
        """The position of every token, int64 `[T]`."""
        import torch

        return torch.cat([torch.arange(s.start, s.stop) for s in self.segments])

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The rows lo:hi of every segment, as indices into the T tokens."""
        return tuple(pairwise((0, *accumulate(len(segment.tokens) for segment in self.segments))))

    @cached_property
    def question_rows(self) -> tuple[Tensor, ...]:
        """Two int64 tensors of rows that may be the question. The first tensor is the best guess.

        The first tensor has the rows after the last chunk. In a conversation, earlier questions
        and answers may be among these rows. The second tensor has all rows outside chunks.
        """
        import torch

        placed = list(zip(self.segments, self.spans, strict=True))
        outside = torch.cat(
            [torch.arange(lo, hi) for segment, (lo, hi) in placed if segment.kind != "chunk"]
        )
        behind = max((hi for segment, (_, hi) in placed if segment.kind == "chunk"), default=0)
        return outside[outside >= behind], outside

    def __len__(self) -> int:
        return self.spans[-1][1]
