"""The nouns of the house: keys, segments, prompts, KV, plans, answers.

Values only. Nothing here loads a model, opens a file or decides anything.
Letters: L layers, H KV heads, D head dim, n tokens of a run, T tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from ragfuse.arrivals import StreamTrace
from ragfuse.forecast import Forecast

FORMAT_VERSION = 2
"""Version of everything that is written: keys, headers, profiles. A change makes old entries misses."""

Encoded = Literal["alone", "prefix", "amid"]
Kind = Literal["fresh", "chunk", "prefix", "module", "history"]


def digest(*parts: str | bytes) -> str:
    """BLAKE3 over length-prefixed parts, 32 hex digits: the same in every process and on every machine."""
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest(length=16)


def whole_text(text: str) -> str:
    """The text without halves of characters (lone surrogates): U+FFFD stands for each, two that are one become it.

    Readers of PDF and JSON hand such out, and neither UTF-8 nor a tokenizer can take them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def token_digest(tokens: Sequence[int]) -> str:
    """Digest of token ids, written as little-endian int32."""
    return digest("tokens", torch.tensor(list(tokens), dtype=torch.int32).numpy().astype("<i4").tobytes())


def amid(context: str) -> str:
    """The context of a run encoded behind `context` (a token digest, "": nothing) and then other text."""
    return f"~{context}"


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """What counts as the same KV. Digests only: no position, no process-local value.

    `model` covers weights, dtype, rope settings, tokenizer, drift, format version and the tenant's salt; `tokens` the
    ids; `context` what the run attended to before itself: "" nothing, a token digest just those tokens, `amid` of
    either those and then other text. `layout` is "" for positions 0..n-1, else a digest of them.
    """

    model: str
    tokens: str
    context: str = ""
    layout: str = ""

    @property
    def encoded(self) -> Encoded:
        """In what company, in one word."""
        if not self.context:
            return "alone"
        return "amid" if self.context.startswith(amid("")) else "prefix"

    def __str__(self) -> str:
        return ".".join((self.model, self.tokens, self.context or "-", self.layout or "-"))

    @classmethod
    def parse(cls, text: str) -> ChunkKey:
        """The key whose `str()` is `text`; ValueError if it is none."""
        parts = ["" if part == "-" else part for part in text.split(".")]
        if len(parts) != 4 or not parts[0] or not parts[1]:
            raise ValueError(f"Not a chunk key: {text!r} (wanted model.tokens.context.layout)")
        return cls(*parts)


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
    def turn(self) -> int:
        """By how many positions the keys of its stored run are turned."""
        return self.origin if self.origin is not None else self.start - (self.rows or (0, 0))[0]

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)


class Talk(Protocol):
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
    talk: Talk | None = field(default=None, repr=False, compare=False)
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


@dataclass(frozen=True)
class RopeLayout:
    """How one layer's keys carry position: `2 * len(inv_freq)` dims from `lo` on are rotated, the others are not.

    inv_freq: radians per position of every pair. pairing: dim i goes with i + half ("half") or 2i with 2i + 1.
    part: which of the two cached tensors carries it (latent attention caches its rotated part second).
    """

    inv_freq: tuple[float, ...]
    lo: int = 0
    pairing: Literal["half", "interleaved"] = "half"
    part: Literal["keys", "values"] = "keys"


@dataclass(frozen=True)
class LayerKV:
    """One layer of one run. keys: [H, n, D], values: [H, n, Dv], model dtype; keys at positions 0..n-1 of the run."""

    keys: Tensor
    values: Tensor

    @property
    def n_tokens(self) -> int:
        """n."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class ChunkKV:
    """The KV of one run, layer by layer; layers may differ in heads and head dim. Never mutated."""

    layers: tuple[LayerKV, ...]

    @property
    def n_tokens(self) -> int:
        """n."""
        return self.layers[0].n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store knows of one key. May be stale: a read that fails is a miss, never an exception.

    sizes: bytes of each codec level that is kept, in their order; what is said of the entry counts to the first.
    n_layers: layers of the model, which every level has.
    """

    key: ChunkKey
    tier: str
    n_tokens: int
    n_layers: int
    sizes: Mapping[str, int]
    last_used: float
    hits: int = 0
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes over all levels."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Fetch:
    """One segment to be read: which, from which tier, at which codec level, and how many tokens that gives.

    sizes: (level, bytes) of all levels that there are, what loses least first.
    """

    segment: int
    key: ChunkKey
    tier: str
    level: str
    nbytes: int
    n_tokens: int = 0
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class LoadPlan:
    """What will be read and what computed. A value: `load` obeys it, `fuse` does not know that it exists.

    `misses` are (segment, why). `refusal` is the reason for full prefill, "" when the prompt is fused. `unread` are in
    the store and all the same computed anew, because that is sooner. On a machine that was not measured, `forecast` is
    None and `layers_a_read` 0: as `load` sees fit. n_before: tokens of a refused prompt whose state is kept
    from an earlier one (`hf.states`).
    """

    prompt: Prompt
    ratio: float
    policy: str
    fetches: tuple[Fetch, ...] = ()
    misses: tuple[tuple[int, str], ...] = ()
    refusal: str = ""
    unread: tuple[Fetch, ...] = ()
    layers_a_read: int = 0
    forecast: Forecast | None = None
    n_before: int = 0

    def refused(self, why: str) -> LoadPlan:
        """Full prefill instead, and the reason."""
        return replace(self, refusal=why, fetches=(), misses=(), forecast=self.forecast and self.forecast.full())

    def explain(self) -> str:
        """The plan in one line a person can read; `plan.words` tells all of it."""
        if self.refusal:
            known = f", {self.n_before} of them from an earlier prompt's state" if self.n_before else ""
            return f"full prefill of {len(self.prompt)} tokens{known}: {self.refusal}"
        nbytes = sum(fetch.nbytes for fetch in self.fetches)
        found, missing = f"{len(self.fetches)} segments from the store", f"{len(self.misses)} missing"
        return f"{found} ({nbytes / 1e6:.1f} MB), {missing}, ratio {self.ratio:.2f} by {self.policy}"


@dataclass(frozen=True)
class SegmentTrace:
    """What happened to one segment that could have come from the store.

    encoded: its KV was computed alone, right behind the prefix, or amid other text ("" for a miss). goes_on: it is one
    more piece of the chunk that the segment before it is of, as where a prompt leaves out or changes words in a chunk.
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


ENCODING = "still being encoded, for the next question"
"""Why a chunk is not reused that an earlier prompt held a moment ago."""


@dataclass(frozen=True)
class Trace:
    """What one answer reused and why. Times in seconds, sizes in bytes, shares 0..1.

    reused + recomputed + fresh = tokens. `recomputed_rows` are the prompt rows of cached chunks that were computed
    again in the layers after the check; `refusal` is why nothing was fused ("" when the prompt was). prefill_s is the
    time from the prompt to its first logits, predicted_ttft_s and predicted_load_s what the plan foresaw (None: it was
    made without timings of this machine); corrections as in its `Forecast`. promoted: chunks that were copied to a
    faster tier in the background since the trace before this one, because they are used often. dropped: sources of
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
    refusal: str = ""
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
            return f"{self.tokens} tokens: none reused ({self.refusal or 'nothing was found'}), {first}"
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
