"""Results that an engine returns: answers, traces, tool calls, ingest totals, and model cards."""

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
    """The trace of one step of a KV stream. The step loads segments or leaves them to be computed.

    Args:
        segments: Indices in the prompt of the segments that the step covers.
        tokens: Total number of tokens in the segments.
        level: The codec level that was requested, or "text" if the segments are computed.
        nbytes: Bytes read.
        began_s: Seconds from the start of the stream to the start of this step.
        seconds: Duration of the step in seconds.
        throughput: Bytes per second of the whole link during the step. None if nothing was read.
        sharing: Number of streams on the link at the end of the step.
        why: Why the segments' KV was not read or did not arrive. "" if the KV arrived.
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
    """The trace of streaming one prompt's KV from a slow tier under a deadline (CacheGen 5.3).

    Args:
        pieces: The traces of all steps of the stream, in order.
        prior: Throughput assumed before the first read, in bytes per second. None if unknown.
    """

    pieces: tuple[PieceTrace, ...]
    prior: float | None = None


@dataclass(frozen=True)
class SegmentTrace:
    """The trace of one segment that could have been loaded from the store.

    Args:
        source: Where the segment's text came from, for display only.
        kind: The kind of the segment.
        n_tokens: Number of tokens in the segment.
        start: Position of the segment's first token in the prompt.
        hit: True if the segment's KV was loaded.
        tier: Name of the tier that had the KV. "" for a miss.
        level: Codec level of the loaded KV. "" for a miss.
        nbytes: Bytes read for the segment. 0 if an earlier segment read the same bytes.
        recomputed: Number of the segment's tokens that were recomputed.
        exact: True if the loaded KV equals full prefill's, so that no token has to be recomputed.
        encoded: What preceded the segment while its KV was encoded: nothing ("alone"), the prompt's
            prefix ("prefix") or filler text ("filler"). "" for a miss.
        why: Why the KV was not loaded. "" for a hit.
        goes_on: True if the segment belongs to the same chunk or document as the previous segment.
            A chunk has several segments if the prompt changes or omits some of its words, or if
            only some passages of the chunk are stored.
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
    """The record of what one answer reused, recomputed and computed, and why.

    Times are in seconds, sizes in bytes, shares in 0..1.
    `tokens_reused + tokens_recomputed + tokens_fresh == tokens`.

    Args:
        model: Name of the model.
        policy: The selection policy.
        ratio: The recompute ratio of the load plan.
        tokens: Number of tokens in the prompt.
        tokens_reused: Number of tokens whose KV was loaded and not recomputed.
        tokens_recomputed: Tokens of loaded chunks that were recomputed, on average over the layers.
        tokens_fresh: Number of tokens for which no KV was loaded.
        mean_ratio: The share of candidate tokens that were recomputed, on average over the layers.
            Candidates are the tokens of loaded chunks that are not exact.
        nbytes: Bytes read.
        load_s: Time spent loading. Loading may overlap with computing.
        compute_s: Time spent computing.
        prefill_s: Time that the prefill took: waiting for KV, and computing.
        ttft_s: Time from the question to the first token.
        deadline_s: Deadline for the first token. None means no deadline.
        total_s: Time from the question to the end of the answer.
        fallback_reason: Why nothing was fused. "" if the prompt was fused.
        segments: One `SegmentTrace` per segment that could have come from the store.
        recomputed_rows: Indices in the prompt of the tokens that the policy first chose to
            recompute. They are in loaded chunks. Later layers may recompute fewer tokens.
        predicted_ttft_s: Predicted time to the first logits. None if no prediction was made.
        predicted_load_s: Predicted time spent loading. None if no prediction was made.
        stream: The trace of streaming KV under a deadline. None without streaming.
        session: Id of the conversation that the prompt continues. "" for none.
        truncated: Number of the conversation's tokens that were dropped to fit the context.
        schema: Name of the schema of a PML prompt. "" for other prompts.
        modules: Paths of the schema's modules whose KV was reused. "." is the schema's own text.
        tokens_prefix: Reused tokens of a prefix shared with earlier prompts.
        tokens_chunks: Reused tokens of chunks.
        unsaved: What could not be read from disk or written to disk, and why. Data that could not
            be written is lost when this process ends.
        tokens_to_encode: Tokens of the missed chunks that are encoded after the answer. A repeated
            chunk counts once.
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
        """Number of tokens whose KV was loaded, including recomputed tokens."""
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
            # a miss reason that all chunks share, unless the reason is counted below
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
    """A tool call made by the model. The message with the tool's result refers to `id`."""

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
        """Return the call in OpenAI's form, with the arguments as JSON text."""
        function = {
            "name": self.name,
            "arguments": json.dumps(dict(self.arguments), ensure_ascii=False),
        }
        return {"id": self.id, "type": "function", "function": function}

    @staticmethod
    def read_arguments(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments of a tool call as a dict. Empty or missing arguments give {}.

        Raises:
            InputError: The arguments are neither a mapping nor the JSON text of an object.
        """
        found: Any = given or {}
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError):
                found = None
        if not isinstance(found, Mapping):
            raise InputError(
                "Arguments of a tool call must be a JSON object, or a text that contains one;"
                f" found {given!r:.60}."
            )
        return dict(found)


Ended = Literal["stop", "length", "tool_calls"]
"""Why an answer ended: "stop" is an end token or stop string, "length" is the limit `max_tokens`,
and "tool_calls" means that the model called tools.
"""


@dataclass(frozen=True)
class Answer:
    """The answer of a model and its trace.

    Args:
        text: The text, without reasoning and tool calls.
        token_ids: Ids of all generated tokens, including reasoning and tool calls.
        finish_reason: Why the answer ended.
        trace: The record of what the answer reused, recomputed and computed.
        tool_calls: Tool calls that the model makes.
        reasoning: The model's reasoning. "" if reasoning is not separate from the text.
        end_ids: The end token that ended the answer. Empty if the answer ended for another reason.
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
    """The totals of an ingest. While a schema is encoded, each `SchemaRun` counts as a chunk.

    Args:
        chunks: Number of chunks processed.
        encoded: Number of chunks that this ingest encoded and stored.
        tokens: Total number of tokens in the encoded chunks.
        nbytes: Bytes of the encoded chunks' KV.
        seconds: Seconds since the ingest began.
        of: Number of chunks that the ingest will process in total. None if unknown.
        short: Number of chunks that are too short to be stored.
        left_out: Sources of texts longer than the model's context. These texts are not counted.
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
        """Return the totals after one more chunk. `nbytes` is 0 if the chunk was not encoded."""
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
    """The name and the limits of a model, for programs that call the model.

    Args:
        name: Name of the model.
        max_context: Maximum tokens of prompt and answer together. None if no limit is known.
        has_chat_template: True if messages are rendered by the model's own chat template.
        max_tokens: Default maximum number of tokens in an answer.
        refusal: Why the model's KV is never reused. "" if KV is reused.
    """

    name: str
    max_context: int | None
    has_chat_template: bool
    max_tokens: int
    refusal: str = ""
