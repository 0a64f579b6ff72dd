"""A prompt as segments of tokens, fresh ones and those whose KV may be stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from ragfuse.types.keys import ChunkKey, Kind

if TYPE_CHECKING:
    from torch import Tensor


MAX_TITLE_CHARS = 256
"""Most characters of a document's title, which is stored with its chunk."""
MAX_RETRIEVED = 256
"""Most documents of one question that are searched for in it; retrievers give the best first."""
OVERLONG = "context_length_exceeded"
"""The code of the error about a prompt that is too long, as at OpenAI: clients know it by this."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens of a prompt whose KV is computed (fresh) or loaded as one piece.

    Args:
        tokens: Token ids.
        start: Position of the first token.
        kind: "fresh" (only computed), "chunk", "prefix" (shared with earlier prompts), "module" (of
            a schema) or "history" (earlier turns).
        keys: Keys under which its KV may be stored, best first; empty only for a fresh segment.
        source: Where the text of a chunk came from, for people.
        text: The text of a chunk.
        rows: Rows lo:hi of the stored run that this segment uses; None: all of them.
        origin: Position of the stored run's row 0; None: as implied by `start` and `rows`.
        stored: Token ids of the whole stored run, where the segment uses only some of its rows.
        document: The number of the document in its prompt that the segment is a part of; -1 for
            none.
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
        """Positions by which the keys of the stored run are rotated."""
        return self.origin if self.origin is not None else self.start - self.row

    @property
    def row(self) -> int:
        """The row of the stored run that holds the first token."""
        return self.rows[0] if self.rows is not None else 0

    @property
    def run(self) -> tuple[int, ...]:
        """Token ids of the whole stored run."""
        return self.stored or self.tokens

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Prompt:
    """The segments of a prompt, in order. Positions strictly increase; gaps are allowed.

    The last segment is fresh, so at least one token is computed; the row of the last one gives the
    first logits. A row is the index of a token in the prompt.

    Args:
        segments: The segments.
        truncated: Tokens of the conversation that were left out so that the prompt fits.
        conversation: The conversation that the prompt continues
            (`sessions.session.PendingTurn`); None for none.
        schema_use: What it reuses of a schema (`schemas.bind.SchemaUse`); None where it uses no
            schema.
        last_user_rows: Rows lo:hi of the text of the last message, if it is a user's; else (0, 0).
        altered: Documents were retrieved for the prompt, and none of them is recognised in it.
        first_chunk: The row at which the first chunk begins; -1 for none.
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
        """Rows (int64) where the question may be, most likely first: those after the last chunk;
        those in no chunk.

        In a conversation, the rows after the last chunk may include earlier questions and answers.
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
