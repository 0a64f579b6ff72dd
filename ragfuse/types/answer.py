"""Results of an engine: answers, traces, tool calls, ingest totals, and a model's card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from ragfuse.errors import InputError
from ragfuse.types.keys import Encoded, Kind
from ragfuse.types.plan import ENCODING, MISSING


@dataclass(frozen=True)
class PieceTrace:
    """One step of a stream: some segments, loaded at a codec level or recomputed from text.

    Args:
        segments: Indices of the prompt's segments in this piece.
        tokens: Number of tokens in these segments.
        level: The codec level, or "text" for a piece that is recomputed.
        nbytes: Bytes read.
        began_s: Seconds from the start of the stream to the start of this step.
        seconds: Seconds that the step took.
        throughput: Bytes per second of the whole link during the step; None if nothing was read.
        sharing: Streams on that link at the time.
        why: Why the piece did not arrive completely; "" if it did.
    """

    segments: tuple[int, ...]
    tokens: int
    level: str
    nbytes: int = 0
    began_s: float = 0.0
    seconds: float = 0.0
    throughput: float | None = None
    sharing: int = 1
    why: str = ""


@dataclass(frozen=True)
class StreamTrace:
    """The streaming of one prompt's KV from a slow tier under a deadline (CacheGen 5.3).

    Args:
        pieces: All pieces, in decision order.
        prior: Throughput assumed before the first read, in bytes per second; None: unknown.
    """

    pieces: tuple[PieceTrace, ...]
    prior: float | None = None


@dataclass(frozen=True)
class SegmentTrace:
    """The trace of one segment that could have been loaded from the store.

    Args:
        source: Where its text came from, for display only.
        kind: The kind of segment.
        n_tokens: Number of tokens.
        start: Its first position in the prompt.
        hit: True if its KV was loaded.
        tier: The tier that had it; "" for a miss.
        level: Its codec level; "" for a miss.
        nbytes: Bytes read for its tokens; 0 if an earlier segment read the same bytes.
        recomputed: Number of its tokens that were recomputed.
        exact: True if its KV equals that of a full prefill, so that nothing had to be recomputed.
        encoded: What preceded the text while its KV was encoded: nothing ("alone"), the prompt's
            prefix ("prefix") or filler text ("filler"); "" for a miss.
        why: The miss reason; "" for a hit.
        goes_on: True if it belongs to the same chunk or document as the previous segment. A chunk
            is split where the prompt changes or omits words, or where only some passages of it are
            stored.
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
    """The record of what one answer reused, and why. Times in seconds, sizes in bytes, shares 0..1.

    `tokens_reused + tokens_recomputed + tokens_fresh == tokens`.

    Args:
        model: Name of the model.
        policy: The selection policy.
        ratio: The recompute ratio that the plan chose.
        tokens: Tokens of the prompt.
        tokens_reused: Tokens whose KV was loaded and used as it was.
        tokens_recomputed: Tokens of loaded chunks that were recomputed, on average over the layers.
        tokens_fresh: Tokens for which no KV was loaded.
        mean_ratio: The share of candidate tokens (those of chunks that are not exact) that were
            recomputed, averaged over the layers.
        nbytes: Bytes read.
        load_s: Time spent loading.
        compute_s: Time spent computing.
        prefill_s: Time from the prompt to its first logits.
        ttft_s: Time to the first token.
        deadline_s: Deadline for the first token; None: no deadline.
        total_s: Time to the end of the answer.
        fallback_reason: Why nothing was fused; "" if the prompt was fused.
        segments: One `SegmentTrace` per segment that could have come from the store.
        recomputed_rows: Indices in the prompt of the cached chunks' tokens that were recomputed in
            the layers after the check layer.
        predicted_ttft_s: Predicted time to the first logits; None: this machine was not measured.
        predicted_load_s: Predicted time spent loading; None: this machine was not measured.
        stream: The pieces of KV streamed under a deadline; None without streaming.
        session: The conversation that the prompt continues; "" for none.
        truncated: Number of tokens dropped from the start of that conversation.
        schema: The schema of a prompt in PML; "" for none.
        modules: Paths of the schema's modules whose text was reused (".": the schema's own text).
        tokens_prefix: Reused tokens of a prefix shared with earlier prompts.
        tokens_chunks: Reused tokens of chunks.
        unsaved: Data that could not be read from disk or written to it, with the reason; it is lost
            when this process ends.
        tokens_to_encode: Tokens of missed chunks, which are encoded after the answer, each chunk
            once.
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
    deadline_s: float | None = None
    total_s: float = 0.0
    fallback_reason: str = ""
    segments: tuple[SegmentTrace, ...] = ()
    recomputed_rows: tuple[int, ...] = field(default=(), repr=False)
    predicted_ttft_s: float | None = None
    predicted_load_s: float | None = None
    stream: StreamTrace | None = None
    session: str = ""
    truncated: int = 0
    schema: str = ""
    modules: tuple[str, ...] = ()
    tokens_prefix: int = 0
    tokens_chunks: int = 0
    unsaved: tuple[str, ...] = ()
    tokens_to_encode: int = 0

    @property
    def tokens_found(self) -> int:
        """Number of tokens whose KV was loaded, including those then recomputed."""
        return self.tokens_reused + self.tokens_recomputed

    @property
    def is_late(self) -> bool:
        """True if the first token came after the deadline."""
        return self.deadline_s is not None and self.ttft_s > self.deadline_s

    @property
    def summary(self) -> str:
        """One line such as "541 tokens: 474 reused (6 of 6 chunks), 31 recomputed, TTFT 0.14 s"."""
        first = f"TTFT {self.ttft_s:.2f} s"
        first += f" (deadline {self.deadline_s:g} s)" if self.is_late else ""
        if not self.tokens_reused:
            return (
                f"{self.tokens} tokens: none reused"
                f" ({self.fallback_reason or 'nothing was found'}), {first}"
            )
        chunks = [each for each in self.segments if each.kind == "chunk"]
        whole = [each.hit for each in chunks if not each.goes_on]
        reasons = {"" if each.hit else each.why for each in chunks}
        why = reasons.pop() if len(reasons) == 1 else ""
        counts = {
            "prefix": self.tokens_prefix,
            "of earlier turns": self.history_reused,
            # A reason shared by all chunks, unless it has its own count below.
            "chunks" + (f": {why}" if why not in ("", ENCODING, MISSING) else ""): (
                f"{sum(whole)} of {len(whole)}" if whole else ""
            ),
            "still being encoded": sum(each.why == ENCODING for each in self.segments),
            "not stored yet": sum(each.why == MISSING for each in chunks),
        }
        parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        reused = f"{self.tokens_reused} reused" + (f" ({parts})" if parts else "")
        return f"{self.tokens} tokens: {reused}, {self.tokens_recomputed} recomputed, {first}"

    @property
    def history_reused(self) -> int:
        """Number of tokens of earlier turns whose KV came from the store."""
        return sum(
            segment.n_tokens
            for segment in self.segments
            if segment.kind == "history" and segment.hit
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the trace and its summary as JSON types, with lists in place of tuples."""
        plain: dict[str, Any] = to_jsonable_python({**asdict(self), "summary": self.summary})
        return plain


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model makes; the message with its result refers to `id`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    @classmethod
    def from_openai(cls, call: Mapping[str, Any]) -> ToolCall:
        """Read a tool call in OpenAI's form: `{"id", "function": {"name", "arguments"}}`.

        Raises:
            InputError: The arguments are not a JSON object.
        """
        function = call.get("function") or {}
        arguments = cls.read_arguments(function.get("arguments"))
        return cls(str(function.get("name") or ""), arguments, str(call.get("id") or ""))

    def as_openai(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, its arguments as JSON text."""
        function = {
            "name": self.name,
            "arguments": json.dumps(dict(self.arguments), ensure_ascii=False),
        }
        return {"id": self.id, "type": "function", "function": function}

    @staticmethod
    def read_arguments(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Read the arguments of a call, given as a mapping or as the JSON text of an object; {} if
        empty.

        Raises:
            InputError: The arguments are neither.
        """
        found: Any = given or {}
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError):
                found = None
        if not isinstance(found, Mapping):
            raise InputError(
                f"The arguments of a tool call are {given!r:.60}; wanted the JSON text of an"
                " object, {...}."
            )
        return dict(found)


Ended = Literal["stop", "length", "tool_calls"]
"""Why an answer ended: end token or stop string, `max_tokens`, or a tool call."""


@dataclass(frozen=True)
class Answer:
    """The answer of a model and its trace.

    Args:
        text: The text, without reasoning and tool calls.
        token_ids: Ids of everything generated, reasoning and tool calls included.
        finish_reason: Why the answer ended.
        trace: The record of reuse, and its reasons.
        tool_calls: Tools that the model calls.
        reasoning: The model's reasoning, if the model marks it off from the answer.
        end_ids: The end token that ended the answer; empty if it ended for another reason.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Ended
    trace: Trace
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    end_ids: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Thought:
    """A streamed piece of the reasoning that a model writes before its answer."""

    text: str


@dataclass(frozen=True)
class Ingested:
    """The totals of an ingest.

    Args:
        chunks: Chunks processed.
        encoded: Chunks that this ingest encoded and stored.
        tokens: Tokens of the encoded chunks.
        nbytes: Bytes of the encoded chunks' KV.
        seconds: Time since the start.
        of: Total number of chunks to process; None: unknown.
        short: Chunks that are too short to be stored.
        left_out: Sources of texts longer than the model's context. No other count includes them.
    """

    chunks: int = 0
    encoded: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    of: int | None = None
    short: int = 0
    left_out: tuple[str, ...] = ()

    def plus(self, tokens: int, nbytes: int, seconds: float, is_short: bool = False) -> Ingested:
        """Return the totals after one more chunk; `nbytes` is 0 if the chunk was stored before."""
        new = bool(nbytes)
        found = (
            self.chunks + 1,
            self.encoded + new,
            self.tokens + new * tokens,
            self.nbytes + nbytes,
        )
        return Ingested(*found, seconds, self.of, self.short + is_short, self.left_out)


@dataclass(frozen=True)
class ModelCard:
    """The description of a model for its callers.

    Args:
        name: Its name.
        max_context: Maximum tokens of prompt and answer; None: no limit is known.
        has_chat_template: True if messages are rendered by the model's own chat template.
        max_tokens: Default limit on the tokens of an answer.
        refusal: Why the model's KV is not reused; "" if it is reused.
    """

    name: str
    max_context: int | None
    has_chat_template: bool
    max_tokens: int
    refusal: str = ""
