"""The options of every benchmark, each declared once: its name, type, default, help and limits.

A field with a `typer.Option` is also an option of the command (`cli.parameters.with_options`); the other fields are for
callers in Python. This module imports no torch, so `ragfuse bench ... --help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from ragfuse_bench.option_types import (
    SHAPE,
    BenchDevice,
    BenchDtype,
    ChunkTokens,
    FromText,
    PackedTokens,
    PolicyName,
    Rounds,
    Seed,
    Shape,
    Share,
    Threads,
    TierSpeeds,
    floats,
    integers,
    names,
    plot_option,
    shares_of,
)

from ragfuse.errors import InputError, SettingsError
from ragfuse.settings import Settings
from ragfuse.types.eviction import EVICTION_POLICIES

KVPlace = Literal["memory", "pinned", "gpu", "disk"]
HEADLINE_CHUNKS = 6
CONTEXT_TOKENS, QUICK_TOKENS = 6000, 1000
PASSAGES_OF_A_LONG_PROMPT = 12
"""Passages in a prompt of `bench matching` whose time is taken."""
DROPIN_CHUNKS = 6
"""Chunks that `bench dropin` retrieves for a question."""


def _home() -> Path:
    return Settings().home


def _check_policy(name: str) -> None:
    from ragfuse.fuse.select import policy_named

    policy_named(name)


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise SettingsError(f"The recompute ratio is {ratio}; wanted a share above 0, at most 1.")


def _check_speeds(mbps: tuple[float, ...]) -> None:
    if not mbps or min(mbps) <= 0:
        raise SettingsError("The speeds of the slow tier are megabytes a second, each above 0.")


def _check_folder(data: Path | None) -> None:
    if data is not None and not data.is_dir():
        raise InputError(f"--data is '{data}'; wanted a folder of data sets.")


# the benchmarks of speed


@dataclass(frozen=True)
class MeasuredModel:
    """The model that a benchmark measures, and where."""

    model: Shape = "q05"
    dtype: BenchDtype = "bfloat16"
    device: BenchDevice = "cpu"


@dataclass(frozen=True)
class TtftOptions(MeasuredModel):
    """What `bench ttft` measures: one prompt for each number of `chunks`."""

    chunks: Annotated[
        tuple[int, ...],
        typer.Option(help="Chunks of a prompt; a list as in 2,4,6 shows how times grow."),
        FromText(integers),
    ] = (HEADLINE_CHUNKS,)
    chunk_tokens: ChunkTokens = 512
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32
    ratio: Share = 0.15
    policy: PolicyName = "hkvd"
    lego_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="For --policy lego: first tokens of each chunk to recompute; 0: as many as the ratio says."
        ),
    ] = 0
    kv: Annotated[KVPlace, typer.Option(help="Where the KV is when the clock starts; pinned and gpu need CUDA.")] = (
        "memory"
    )
    threads: Threads = 1
    rounds: Rounds = 3
    plot: Annotated[Path | None, plot_option("speedup against context tokens")] = None
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        positive = (*self.chunks, self.chunk_tokens, self.question_tokens, self.threads, self.rounds)
        if not self.chunks or min(positive) < 1 or self.lego_tokens < 0:
            raise SettingsError("Chunks, tokens, threads and rounds are whole numbers from 1 on.")
        _check_ratio(self.ratio)
        if self.lego_tokens and self.policy != "lego":
            raise SettingsError(f"--lego-tokens belongs to --policy lego; found --policy {self.policy}.")
        if self.kv not in get_args(KVPlace):
            raise SettingsError(f"No place '{self.kv}' for KV. It is one of: {', '.join(get_args(KVPlace))}.")
        if self.kv in ("pinned", "gpu") and not self.device.startswith("cuda"):
            raise SettingsError(f"--kv {self.kv} needs --device cuda; found --device {self.device}.")
        _check_policy(self.policy_name)

    @property
    def policy_name(self) -> str:
        """The policy with its count of tokens."""
        return f"lego-{self.lego_tokens}" if self.lego_tokens else self.policy

    @property
    def nominal_ratio(self) -> float:
        """Share of a blended chunk's rows that are asked for."""
        return min(1.0, self.lego_tokens / self.chunk_tokens) if self.lego_tokens else self.ratio


@dataclass(frozen=True)
class KernelOptions:
    """What `bench kernels` counts: the operations of one prompt."""

    model: Annotated[str, typer.Option(help=SHAPE)] = "smollm2-135m-reader"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto"
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 6
    chunk_tokens: ChunkTokens = 160
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class DecodeOptions:
    """What `bench decode` measures: answers behind prompts of each of `contexts` tokens."""

    model: Annotated[str, typer.Option(help=SHAPE)] = "smollm2-135m-reader"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto"
    contexts: Annotated[
        tuple[int, ...], typer.Option(help="Tokens of the prompts, as in 512,3072."), FromText(integers)
    ] = (512, 1600, 3072, 8000)
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are decoded in each round.")] = 32
    vllm: Annotated[
        Path | None, typer.Option(help="Python of an environment with vLLM, such as .venv-vllm/bin/python.")
    ] = None
    threads: Threads = 1
    rounds: Rounds = 3
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class LoadOptions(MeasuredModel):
    """What `bench load` measures."""

    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: int = 32
    ratio: Share = 0.15
    policy: PolicyName = "hkvd"
    mbps: TierSpeeds = (50.0, 100.0, 200.0, 500.0)
    threads: Threads = 1
    rounds: Rounds = 3
    plot: Annotated[Path | None, plot_option("the time against the tier's speed")] = None
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        if min(self.chunks, self.chunk_tokens, self.question_tokens, self.threads, self.rounds) < 1:
            raise SettingsError("Chunks, tokens, threads and rounds are whole numbers from 1 on.")
        _check_speeds(self.mbps)
        _check_ratio(self.ratio)
        _check_policy(self.policy)


@dataclass(frozen=True)
class ControllerOptions(MeasuredModel):
    """What `bench controller` measures: `plans` plans, dealt out over the speeds in turn."""

    mbps: TierSpeeds = (30.0, 100.0, 300.0)
    plans: Annotated[
        int, typer.Option(min=1, help="Number of load plans whose predicted time is compared with the measured one.")
    ] = 60
    threads: Threads = 1
    rounds: Annotated[int, typer.Option(min=1, help="How often each plan is measured; the median counts.")] = 3
    plot: Annotated[Path | None, plot_option("predictions and ratios")] = None
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        if min(self.plans, self.threads, self.rounds) < 1:
            raise SettingsError("Plans, threads and rounds are whole numbers from 1 on.")
        _check_speeds(self.mbps)


@dataclass(frozen=True)
class DropinOptions:
    """What `bench dropin` measures: questions of the demo's, all on one article."""

    model: Annotated[
        str, typer.Option(help="Model as for `ragfuse ask --model`; Hugging Face's classes load the same weights.")
    ] = "smollm2-135m-reader"
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16; auto: the faster one on this CPU.")] = "auto"
    article: str = "french-and-indian-war"
    questions: Annotated[int, typer.Option(min=1, help="Number of the demo's questions on one article.")] = 4
    splits: Annotated[
        int, typer.Option(min=DROPIN_CHUNKS, help="Number of chunks, from the article's beginning, to retrieve from.")
    ] = 24
    chunk_tokens: ChunkTokens = 512
    rounds: Rounds = 3
    threads: Threads = 1
    plot: Annotated[Path | None, plot_option("times")] = None
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise SettingsError(f"--dtype is '{self.dtype}'; wanted auto, float32 or bfloat16.")
        if min(self.questions, self.rounds, self.threads) < 1 or self.splits < DROPIN_CHUNKS or self.chunk_tokens < 16:
            raise SettingsError(
                f"Questions and rounds are from 1 on, chunks from {DROPIN_CHUNKS} on, of 16 tokens or more."
            )


# quality


@dataclass(frozen=True)
class QualityOptions:
    """What `bench quality` measures."""

    sets: Annotated[
        tuple[str, ...],
        typer.Option(
            "--data", help="Data set: held-out, demo, needle or tracing (all included), or a file. Repeat for more."
        ),
    ] = ()
    methods: Annotated[
        tuple[str, ...],
        typer.Option(
            help="full (prefill); prefix (caching); none (plain reuse, nothing recomputed); auto (ragfuse's default "
            "for the model, whatever a calibration chose); or a policy. "
            "NAME@alone, NAME@filler: chunks are encoded alone or after filler."
        ),
        FromText(names),
    ] = ("full", "prefix", "none", "auto")
    ratios: Annotated[
        tuple[float, ...], typer.Option(help="Ratios of the policies among the methods."), FromText(shares_of)
    ] = (0.15,)
    limit: Annotated[
        int, typer.Option(min=0, help="Questions of each set, drawn at random by a fixed seed; 0: all.")
    ] = 0
    chunk_tokens: PackedTokens = 0
    context_tokens: Annotated[
        int,
        typer.Option(min=1, help="Maximum tokens of all passages together; beyond that each is cut by the same share."),
    ] = 2600
    passages: Annotated[int, typer.Option(min=1, help="Passages of a SQuAD or demo prompt.")] = 6
    answers: Annotated[
        bool, typer.Option(help="Also generate each method's answer; --no-answers: only KL and top-1 agreement.")
    ] = True

    def quick(self) -> QualityOptions:
        """Return the options of `--quick`: 64 held-out questions by three methods.

        Raises:
            InputError: Sets, methods or a limit were named, too.
        """
        usual = QualityOptions()
        if self.sets or self.limit or self.methods != usual.methods:
            raise InputError("--quick has its own questions and methods: leave out --data, --limit and --methods.")
        return replace(self, sets=("held-out",), limit=64, methods=("full", "none", "auto"))


# the codec


@dataclass(frozen=True)
class CodecOptions:
    """What `bench codec` measures."""

    data: Annotated[
        Path | None, typer.Option(help="Folder with musique, SQuAD and LongChat. Default: included texts.")
    ] = None
    contexts: Annotated[int, typer.Option(min=1, help="Contexts of each set.")] = 4
    context_tokens: Annotated[int, typer.Option(min=100, help="Tokens of a context.")] = CONTEXT_TOKENS
    questions: Annotated[int, typer.Option(min=1, help="Number of questions for the F1 score.")] = 300
    keep_kv: Annotated[
        Path | None, typer.Option(help="Keep the contexts' raw KV in this folder, for the next run.")
    ] = None
    plot: Annotated[Path | None, plot_option("size against quality")] = None

    def __post_init__(self) -> None:
        _check_folder(self.data)

    def quick(self) -> CodecOptions:
        """Return the options of `--quick`: one short context of each set, at most 12 questions."""
        tokens = min(self.context_tokens, QUICK_TOKENS)
        return replace(self, contexts=1, context_tokens=tokens, questions=min(self.questions, 12))


@dataclass(frozen=True)
class StreamOptions(MeasuredModel):
    """What `bench stream` measures. Deadlines and bandwidths are the paper's; `lines.Scale` scales them."""

    model: Shape = "smollm2-135m-reader"
    dtype: BenchDtype = "float32"
    tokens: Annotated[int, typer.Option(min=1, help="Approximate tokens of a context.")] = 6000
    piece_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Approximate tokens of each part that is sent at one level (a chunk in CacheGen's words)."
        ),
    ] = 1000
    contexts: Annotated[int, typer.Option(min=1, help="Number of contexts; requests use them in turn.")] = 2
    questions: Annotated[
        int, typer.Option(min=1, help="Questions on each context, to measure the quality of the KV that arrived.")
    ] = 15
    traces: Annotated[int, typer.Option(min=1, help="Number of bandwidth traces: half random, half recorded.")] = 20
    deadlines: Annotated[
        tuple[float, ...],
        typer.Option(help="Deadlines in seconds on the CacheGen paper's hardware; scaled to this machine's speed."),
        FromText(floats),
    ] = (1.0, 2.0)
    levels: tuple[str, ...] = ("int8", "cg1", "cg2", "cg3", "cg4")
    fixed: Annotated[
        str, typer.Option(help="Level of the method that always sends one level; empty: the middle one.")
    ] = ""
    curve: Annotated[
        tuple[float, ...],
        typer.Option(
            "--bandwidths", help="Bandwidths, in Gbit/s as in the paper, at which time to first token is measured."
        ),
        FromText(floats),
    ] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    threads: Threads = 1
    data: Annotated[Path | None, typer.Option(help="Folder of data sets: SQuAD, published bandwidths.")] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw time to first token against bandwidth to this file (PNG), and a timeline to a second one."
        ),
    ] = None
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        counts = (self.tokens, self.piece_tokens, self.contexts, self.questions, self.traces, self.threads)
        if min(counts) < 1:
            raise SettingsError("Tokens, contexts, questions, traces and threads are whole numbers from 1 on.")
        if not self.deadlines or min(self.deadlines) <= 0 or not all(gbps > 0 for gbps in self.curve):
            raise SettingsError("Deadlines are seconds above 0, bandwidths Gbit/s above 0.")
        if "int8" not in self.levels or (self.fixed and self.fixed not in self.levels):
            raise SettingsError(f"The levels must hold int8 and the fixed one; found {', '.join(self.levels)}.")


# conversations, modules, servers


@dataclass(frozen=True)
class ConversationOptions(MeasuredModel):
    """What `bench conversation` measures."""

    model: Shape = "smollm2-135m"
    dtype: BenchDtype = "float32"
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 8
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 384
    opening_tokens: Annotated[int, typer.Option(min=1, help="Approximate tokens of the first message.")] = 1400
    window: Annotated[int, typer.Option(min=8, help="For perplexity: tokens after which a text is truncated.")] = 2048
    texts: Annotated[int, typer.Option(min=1, help="For perplexity: number of texts, at most.")] = 4
    rounds: Rounds = 3
    threads: Threads = 1
    data: Annotated[Path | None, typer.Option(help="Folder of multi-turn dialogues. Default: included notes.")] = None
    plot: Annotated[Path | None, plot_option("seconds by turn")] = None

    def __post_init__(self) -> None:
        _check_folder(self.data)

    def quick(self) -> ConversationOptions:
        """Return the options of `--quick`: three short turns, one short text."""
        return replace(self, turns=3, answer_tokens=16, opening_tokens=200, window=256, texts=1, rounds=1)


@dataclass(frozen=True)
class SessionOptions:
    """What `bench sessions` simulates."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of data sets: conversation lengths are taken from them, and Mooncake's trace is replayed."
        ),
    ] = None
    policies: Annotated[
        tuple[str, ...], typer.Option(help="Eviction policies to simulate, with commas."), FromText(names)
    ] = ("look-ahead", "lru", "fifo")
    quick: Annotated[bool, typer.Option(help="A sixth of the conversations, with a sixth of the storage.")] = False
    seed: Seed = 0
    plot: Annotated[Path | None, plot_option("the hit rates")] = None

    def __post_init__(self) -> None:
        known = ["fifo", *EVICTION_POLICIES]
        if not self.policies or not set(self.policies) <= set(known):
            raise SettingsError(f"--policies is '{','.join(self.policies)}'; wanted some of {', '.join(known)}.")
        _check_folder(self.data)


@dataclass(frozen=True)
class MatchingOptions:
    """What `bench matching` measures. least, longest: Bounds of a passage's tokens."""

    model: Shape = "smollm2-135m-reader"
    passages: Annotated[
        int,
        typer.Option(min=PASSAGES_OF_A_LONG_PROMPT, help="Number of known passages, from which the prompts are made."),
    ] = 200
    least: int = 60
    longest: int = 400
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts for each kind of change (numbered, escaped, cut, ...).")
    ] = 8
    prompt_tokens: int = 8192
    known: Annotated[
        tuple[int, ...],
        typer.Option(help="Sizes of the index (known spans) for which the search is timed."),
        FromText(integers),
    ] = (1_000, 10_000, 100_000)
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is searched.")] = 30
    threads: Threads = 1
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        least = PASSAGES_OF_A_LONG_PROMPT
        if min(self.prompts, self.rounds, self.threads) < 1 or self.passages < least or not self.known:
            raise SettingsError(
                f"Prompts, rounds and threads are whole numbers from 1 on, passages from {least} on, and of known "
                "spans at least one number is wanted."
            )
        if min(self.known) < self.passages:
            raise SettingsError(f"known is {min(self.known)}; wanted at least the {self.passages} passages.")


@dataclass(frozen=True)
class PrefixOptions:
    """What `bench prefix` measures. system_tokens: Tokens of the system prompt that all questions share."""

    model: str = "smollm2-135m-reader"
    dtype: str = "auto"
    system_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the system prompt.")] = 2048
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answers that are compared.")] = 16
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of rounds, after one to warm up; each measures every method once.")
    ] = 5
    threads: Threads = 1
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        if min(self.system_tokens, self.answer_tokens, self.rounds, self.threads) < 1:
            raise SettingsError("Tokens, rounds and threads are from 1 on.")


@dataclass(frozen=True)
class ThroughputOptions:
    """What `bench throughput` measures. shares: Rates, as shares of what a method's server can do."""

    sets: Annotated[
        tuple[str, ...],
        typer.Option(
            "--data",
            help="Questions: held-out or demo (both included), a file as for `bench quality`, or a folder with files "
            "of musique and 2wikimqa. Repeat for more.",
        ),
    ] = ("held-out",)
    cases: Annotated[
        int,
        typer.Option("--questions", min=1, help="Questions, drawn at random; each is asked in many wordings."),
    ] = 12
    chunk_tokens: PackedTokens = 0
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 16
    shares: Annotated[
        tuple[float, ...],
        typer.Option("--rates", help="Request rates, as shares of each method's own highest rate."),
        FromText(floats),
    ] = (0.3, 0.5, 0.7, 0.9)
    seconds: Annotated[float, typer.Option(help="Seconds of load at each rate, for each method.")] = 120.0
    minutes: Annotated[
        float, typer.Option(help="Minutes of steady load, to see whether memory or files grow; 0: none.")
    ] = 30.0
    together: Annotated[int, typer.Option(min=1, help="Answers decoded in one batch.")] = 8
    together_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer of the batch.")] = 64
    threads: Threads = 1
    seed: Seed = 0
    plot: Annotated[Path | None, plot_option("time against rate")] = None

    def __post_init__(self) -> None:
        if min(self.cases, self.answer_tokens, self.together, self.together_tokens, self.threads) < 1:
            raise SettingsError("Questions, tokens, answers and threads are whole numbers from 1 on.")
        if not self.shares or not all(0 < share <= 2 for share in self.shares):
            raise SettingsError(
                f"Rates are {self.shares}; wanted shares of what a server can do, above 0 and at most 2."
            )
        if self.seconds <= 0 or self.minutes < 0:
            raise SettingsError("Loads take seconds above 0, and minutes from 0 on.")

    def quick(self) -> ThroughputOptions:
        """Return the options of `--quick`: two rates for each of three methods, five minutes of load."""
        return replace(self, shares=(0.5, 0.9), seconds=50.0, minutes=0.0)
