"""A prompt as segments of tokens, each fresh or with the keys of its KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from ragfuse.types.keys import ChunkKey

Kind = Literal["fresh", "chunk", "prefix", "module", "history"]


@dataclass(frozen=True)
class Segment:
    """A run of tokens of a prompt that is handled as one: placed at `start`, fresh or taken from the store.

    `keys` are the places to look for its KV, best first; it is empty iff the segment is fresh. `source` says where the
    text came from, for people; `text` is a chunk's own text. `rows` lo:hi of the stored run are meant (None: all of
    it), whose own position 0 stands at `origin` (None: its rows stand as one, so that lo stands at `start`). `stored`:
    ids of that whole run, where only some of its rows stand here.
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

    def __post_init__(self) -> None:
        if bool(self.keys) == (self.kind == "fresh"):
            raise ValueError(f"A {self.kind} segment has {len(self.keys)} keys; only a fresh one has none.")
        lo, hi = self.rows or (0, len(self.tokens))
        if not self.tokens or not 0 <= lo == hi - len(self.tokens):
            raise ValueError(f"A segment holds at least one token, as many as rows: {len(self.tokens)}, {self.rows}.")

    @property
    def shift(self) -> int:
        """Positions by which the keys of its stored run are rotated."""
        return self.origin if self.origin is not None else self.start - (self.rows or (0, 0))[0]

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)


class ConversationRef(Protocol):
    """A conversation under way, as far as a prompt knows of it."""

    @property
    def id(self) -> str:
        """Its name."""
        ...


@dataclass(frozen=True)
class Prompt:
    """Segments in order. Positions strictly increase, gaps allowed; the last segment is fresh.

    So there is always a token to compute, and its row yields the first logits. dropped: sources of chunks that were
    left out, so that it fits. talk: the conversation that it goes on with, for who keeps that; truncated: tokens of the
    conversation that it lacks, so that it fits. taken: what it takes from a schema (`text.bind.Taken`). said: rows
    lo:hi of what a user said last, (0, 0) where nobody did. altered: how documents that were retrieved for it were
    changed on their way into it, so that they are not found ("" where they are, or do not stand in it). first_chunk:
    the row where its first chunk begins, -1 where there is none.
    """

    segments: tuple[Segment, ...]
    dropped: tuple[str, ...] = ()
    truncated: int = 0
    talk: ConversationRef | None = field(default=None, repr=False, compare=False)
    taken: object = field(default=None, repr=False, compare=False)
    said: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    altered: str = field(default="", repr=False, compare=False)
    first_chunk: int = field(default=-1, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.segments or self.segments[-1].kind != "fresh":
            raise ValueError("A prompt ends with a fresh segment: something must be computed to answer.")
        for before, after in pairwise(self.segments):
            if after.start < before.stop:
                raise ValueError(f"Positions must increase: {after.start} follows {before.stop - 1}.")

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All T ids."""
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments))

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]: the position of every token."""
        return torch.cat([torch.arange(s.start, s.stop) for s in self.segments])

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Rows lo:hi of every segment, as indices into the T tokens."""
        return tuple(pairwise((0, *accumulate(len(segment.tokens) for segment in self.segments))))

    @cached_property
    def asked(self) -> tuple[Tensor, ...]:
        """Where its question may stand, likeliest first: rows int64 behind the last chunk; rows in no chunk at all.

        Behind the last chunk of a conversation are earlier questions and answers, too.
        """
        placed = list(zip(self.segments, self.spans, strict=True))
        outside = torch.cat([torch.arange(lo, hi) for segment, (lo, hi) in placed if segment.kind != "chunk"])
        behind = max((hi for segment, (_, hi) in placed if segment.kind == "chunk"), default=0)
        return outside[outside >= behind], outside

    def __len__(self) -> int:
        return self.spans[-1][1]
