"""An answer, its trace of what was reused and why, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ragfuse.types.keys import Encoded
from ragfuse.types.prompt import Kind
from ragfuse.types.reasons import ENCODING


@dataclass(frozen=True)
class PieceTrace:
    """Layers of one piece: of which segments, and how they came: at a codec level, or as "text", which is computed.

    layers: the first, and the one behind the last. began_s: seconds since the deadline began to run; seconds: until it
    was there, nbytes of it. throughput: bytes a second of the whole line meanwhile, None where nothing was read;
    sharing: streams on it. why: in words, where not all of it came.
    """

    segments: tuple[int, ...]
    tokens: int
    level: str
    layers: tuple[int, int] = (0, 0)
    nbytes: int = 0
    began_s: float = 0.0
    seconds: float = 0.0
    throughput: float | None = None
    sharing: int = 1
    why: str = ""


@dataclass(frozen=True)
class StreamTrace:
    """All pieces, in the order in which they were decided. held: whether the first token came within the deadline.

    adapt: as in the settings. prior: bytes a second that the line was taken to carry at first, None: nothing was known.
    """

    adapt: str
    deadline_s: float
    held: bool
    pieces: tuple[PieceTrace, ...]
    prior: float | None = None


@dataclass(frozen=True)
class SegmentTrace:
    """What happened to one segment that could have come from the store.

    encoded: its KV was computed alone, right behind the prefix, or behind filler text ("" for a miss). goes_on: it is
    one more piece of the chunk that the segment before it is of, as where a prompt leaves out or changes words in a
    chunk.
    """

    source: str
    kind: Kind
    n_tokens: int
    start: int
    hit: bool
    tier: str = ""
    level: str = ""
    nbytes: int = 0
    recomputed: int = 0
    exact: bool = False
    encoded: Encoded | Literal[""] = ""
    why: str = ""
    goes_on: bool = False


@dataclass(frozen=True)
class Trace:
    """What one answer reused and why. Times in seconds, sizes in bytes, shares 0..1.

    reused + recomputed + fresh = tokens. `recomputed_rows` are the prompt rows of cached chunks that were computed
    again in the layers after the check; `fallback_reason` is why nothing was fused ("" when the prompt was). prefill_s
    is the time from the prompt to its first logits, predicted_ttft_s and predicted_load_s what the plan foresaw (None:
    it was made without timings of this machine); corrections as in its `Forecast`. promoted: chunks that were copied to
    a faster tier in the background since the trace before this one, because they are used often. dropped: sources of
    chunks that were left out of the prompt, so that it and its answer fit. stream: what came over a line under a
    deadline, piece by piece. session: the conversation that it goes on with, "" for none; truncated: tokens of that
    which the prompt lacks, the earliest ones. schema: whose prompt it is, "" for none; modules: paths of its modules
    whose text was reused (".": the schema's own). tokens_prefix, tokens_chunks: of the reused ones, those of a
    beginning that earlier prompts had too, and those of chunks. unsaved: what could not be read or written beside the
    answer, and why, so that this process alone remembers it.
    """

    model: str = ""
    policy: str = ""
    ratio: float = 0.0
    tokens: int = 0
    tokens_reused: int = 0
    tokens_recomputed: int = 0
    tokens_fresh: int = 0
    mean_ratio: float = 0.0
    nbytes: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    fallback_reason: str = ""
    segments: tuple[SegmentTrace, ...] = ()
    recomputed_rows: tuple[int, ...] = field(default=(), repr=False)
    predicted_ttft_s: float | None = None
    predicted_load_s: float | None = None
    corrections: tuple[tuple[str, float], ...] = ()
    promoted: int = 0
    dropped: tuple[str, ...] = ()
    stream: StreamTrace | None = None
    session: str = ""
    truncated: int = 0
    schema: str = ""
    modules: tuple[str, ...] = ()
    tokens_prefix: int = 0
    tokens_chunks: int = 0
    unsaved: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line: "541 tokens: 474 reused (6 of 6 chunks), 31 recomputed, first token 0.14 s"."""
        first = f"first token {self.ttft_s:.2f} s"
        if not self.tokens_reused:
            return f"{self.tokens} tokens: none reused ({self.fallback_reason or 'nothing was found'}), {first}"
        chunks = [each.hit for each in self.segments if each.kind == "chunk" and not each.goes_on]
        parts = [f"{self.tokens_prefix} as beginning"] if self.tokens_prefix else []
        parts += [f"{self.history_reused} of earlier turns"] if self.history_reused else []
        parts += [f"{sum(chunks)} of {len(chunks)} chunks"] if chunks else []
        pending = sum(each.why == ENCODING for each in self.segments)
        parts += [f"{pending} still being encoded"] if pending else []
        told = f" ({', '.join(parts)})" if parts else ""
        return f"{self.tokens} tokens: {self.tokens_reused} reused{told}, {self.tokens_recomputed} recomputed, {first}"

    @property
    def history_reused(self) -> int:
        """Tokens of earlier turns whose KV came from the store."""
        return sum(segment.n_tokens for segment in self.segments if segment.kind == "history" and segment.hit)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the summary."""
        return {**asdict(self), "summary": self.summary}


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool that a model asks for; `id` is what its result refers to."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


Ended = Literal["stop", "length", "tool_calls"]
"""Why an answer ended: by itself or a stop string, at its longest, or to hear what tools say."""


@dataclass(frozen=True)
class Answer:
    """What came out: the text, its token ids, why it stopped, the trace, the tools it calls, and what was thought
    before, where a model writes its thoughts apart. The ids are those of thoughts and calls, too."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Ended
    trace: Trace
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Thought:
    """A piece of what a model thinks before it answers, as it is written."""

    text: str
