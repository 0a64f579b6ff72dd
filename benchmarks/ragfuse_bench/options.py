"""The options of every benchmark, each declared once: its name, type, default, help and limits.

A field with a `typer.Option` is also an option of the command (`cli.parameters.with_options`), and
a dataclass's first line is the command's help; the other fields are for callers in Python. What is
out of bounds is refused on the command line. This module imports no torch, so `ragfuse bench ...
--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

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
    shares_of,
)

from ragfuse.errors import InputError, SettingsError
from ragfuse.settings import Settings
from ragfuse.types.choices import EVICTION_POLICIES

KVPlace = Literal["memory", "pinned", "gpu", "disk"]
HEADLINE_CHUNKS = 6
PASSAGES_OF_A_LONG_PROMPT = 12
"""Passages in a prompt of `bench matching` whose time is taken."""
DROPIN_CHUNKS = 6
"""Chunks that `bench dropin` retrieves for a question."""
USES = ("code", "cooking", "trip")
"""Code generation, personalisation, a trip with parameters: figures 6 to 8 of Prompt Cache, in our
own words.
"""


def _home() -> Path:
    return Settings().home


# the benchmarks of speed


@dataclass(frozen=True)
class MeasuredModel:
    """The model that a benchmark measures, and where."""

    model: Shape = "q05"
    dtype: BenchDtype = "bfloat16"
    device: BenchDevice = "cpu"


@dataclass(frozen=True)
class TtftOptions(MeasuredModel):
    """Measure the time to the first token: full prefill, ragfuse, plain reuse and prefix
    caching.
    """

    chunks: Annotated[
        tuple[int, ...],
        typer.Option(help="Chunks of a prompt; a list such as 2,4,6 measures each number."),
        FromText(integers),
    ] = (HEADLINE_CHUNKS,)
    chunk_tokens: ChunkTokens = 512
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32
    ratio: Share = 0.15
    policy: PolicyName = "hkvd"
    lego_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help=(
                "For --policy lego: first tokens of each chunk to recompute. 0: as many as the"
                " ratio says."
            ),
        ),
    ] = 0
    kv: Annotated[
        KVPlace,
        typer.Option(help="Where the KV is when the measurement starts; pinned and gpu need CUDA."),
    ] = "memory"
    threads: Threads = 1
    rounds: Rounds = 3
    home: Path = field(default_factory=_home)

    def __post_init__(self) -> None:
        if self.lego_tokens and self.policy != "lego":
            raise SettingsError(f"--lego-tokens needs --policy lego, found --policy {self.policy}.")
        if self.kv in ("pinned", "gpu") and not self.device.startswith("cuda"):
            raise SettingsError(
                f"--kv {self.kv} needs --device cuda, found --device {self.device}."
            )

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
    """Count the torch operations of full prefill and of every policy, as they run on
    CPUs and on GPUs.
    """

    model: Annotated[str, typer.Option(help=SHAPE)] = "smollm2-135m-reader"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto"
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 6
    chunk_tokens: ChunkTokens = 160
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class DecodeOptions:
    """Measure the time per token of an answer with ragfuse, transformers' generate and, if named,
    vLLM.
    """

    model: Annotated[str, typer.Option(help=SHAPE)] = "smollm2-135m-reader"
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto"
    contexts: Annotated[
        tuple[int, ...],
        typer.Option(help="Tokens of the prompts, such as 512,3072."),
        FromText(integers),
    ] = (512, 1600, 3072, 8000)
    steps: Annotated[int, typer.Option(min=1, help="Tokens decoded in each round.")] = 32
    vllm: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with vLLM, such as .venv-vllm/bin/python."),
    ] = None
    threads: Threads = 1
    rounds: Rounds = 3
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class LoadOptions(MeasuredModel):
    """Measure the time to the first token with KV in memory and in a slow tier, with and without
    reading layers ahead.
    """

    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: int = 32
    ratio: Share = 0.15
    policy: PolicyName = "hkvd"
    mbps: TierSpeeds = (50.0, 100.0, 200.0, 500.0)
    threads: Threads = 1
    rounds: Rounds = 3
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class ControllerOptions(MeasuredModel):
    """Measure how well the loading controller predicts times and chooses the ratio."""

    mbps: TierSpeeds = (30.0, 100.0, 300.0)
    plans: Annotated[
        int,
        typer.Option(
            min=1,
            help=("Number of load plans whose predicted time is compared with the measured time."),
        ),
    ] = 60
    threads: Threads = 1
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of measurements of each plan; the median is used.")
    ] = 3
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class DropinOptions:
    """Compare ragfuse's classes with Hugging Face's in LangChain and LlamaIndex."""

    model: Annotated[
        str,
        typer.Option(
            help=("Model, as for `ragfuse ask --model`; transformers loads the same weights.")
        ),
    ] = "smollm2-135m-reader"
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16; auto: the faster one on this CPU.")
    ] = "auto"
    article: str = "french-and-indian-war"
    questions: Annotated[
        int, typer.Option(min=1, help="Number of the demo's questions on one article.")
    ] = 4
    splits: Annotated[
        int,
        typer.Option(
            min=DROPIN_CHUNKS,
            help="Number of chunks, from the article's beginning, to retrieve from.",
        ),
    ] = 24
    chunk_tokens: ChunkTokens = 512
    rounds: Rounds = 3
    threads: Threads = 1
    home: Path = field(default_factory=_home)


# quality


@dataclass(frozen=True)
class QualityOptions:
    """What `bench quality` measures."""

    sets: Annotated[
        tuple[str, ...],
        typer.Option(
            "--data",
            help=(
                "Data set: held-out, demo, needle or tracing (all included), or a file. Repeat for"
                " more."
            ),
        ),
    ] = ()
    methods: Annotated[
        tuple[str, ...],
        typer.Option(
            help=(
                "full (prefill); prefix (caching); none (plain reuse, nothing recomputed); auto"
                " (ragfuse's default for the model, whatever a calibration chose); or a policy."
                " NAME@alone, NAME@filler: chunks are encoded alone or after filler."
            )
        ),
        FromText(names),
    ] = ("full", "prefix", "none", "auto")
    ratios: Annotated[
        tuple[float, ...],
        typer.Option(help="Ratios of the policies among the methods."),
        FromText(shares_of),
    ] = (0.15,)
    limit: Annotated[
        int,
        typer.Option(min=0, help="Questions of each set, drawn at random by a fixed seed; 0: all."),
    ] = 0
    chunk_tokens: PackedTokens = 0
    context_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help=(
                "Maximum tokens of all passages together; if they are exceeded, every passage is"
                " cut by the same share."
            ),
        ),
    ] = 2600
    passages: Annotated[int, typer.Option(min=1, help="Passages of a SQuAD or demo prompt.")] = 6
    answers: Annotated[
        bool,
        typer.Option(
            help="Also generate each method's answer; --no-answers: only KL and top-1 agreement."
        ),
    ] = True

    def quick(self) -> QualityOptions:
        """Return the options of `--quick`: 64 held-out questions by three methods.

        Raises:
            InputError: Sets, methods or a limit were named, too.
        """
        usual = QualityOptions()
        if self.sets or self.limit or self.methods != usual.methods:
            raise InputError(
                "--quick has its own questions and methods. Remove --data, --limit and --methods."
            )
        return replace(self, sets=("held-out",), limit=64, methods=("full", "none", "auto"))


# the codec


@dataclass(frozen=True)
class CodecOptions:
    """Measure size, fidelity, answers and speed of every level on real text."""

    contexts: Annotated[int, typer.Option(min=1, help="Contexts of each set.")] = 4
    context_tokens: Annotated[int, typer.Option(min=100, help="Tokens of a context.")] = 6000
    questions: Annotated[int, typer.Option(min=1, help="Number of questions for the F1 score.")] = (
        300
    )
    rounds: Rounds = 3

    def quick(self) -> CodecOptions:
        """Return the options of `--quick`: one short context of each set, 12 questions."""
        return replace(self, contexts=1, context_tokens=1000, questions=12, rounds=1)


@dataclass(frozen=True)
class StreamOptions(MeasuredModel):
    """Send contexts over a link of changing speed under a deadline: as text, as 8-bit KV, at one
    codec level, or at adaptive levels.

    Deadlines and bandwidths are the paper's, scaled to this machine and model.
    """

    model: Shape = "smollm2-135m-reader"
    dtype: BenchDtype = "float32"
    tokens: Annotated[int, typer.Option(min=1, help="Approximate tokens of a context.")] = 6000
    piece_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help=("Approximate tokens of each part that is sent at one level (CacheGen: chunk)."),
        ),
    ] = 1000
    contexts: Annotated[
        int, typer.Option(min=1, help="Number of contexts; requests use them in turn.")
    ] = 2
    questions: Annotated[
        int,
        typer.Option(
            min=1, help="Questions on each context, to measure the quality of the KV that arrived."
        ),
    ] = 15
    traces: Annotated[
        int, typer.Option(min=1, help="Number of bandwidth traces: half random, half recorded.")
    ] = 20
    deadlines: Annotated[
        tuple[float, ...],
        typer.Option(
            help=("Deadlines in seconds on the paper's hardware, scaled to this machine's speed.")
        ),
        FromText(floats),
    ] = (1.0, 2.0)
    levels: tuple[str, ...] = ("int8", "cg1", "cg2", "cg3", "cg4")
    fixed: Annotated[
        str,
        typer.Option(
            help="Level of the method that uses one fixed level; empty: the middle level."
        ),
    ] = ""
    curve: Annotated[
        tuple[float, ...],
        typer.Option(
            "--bandwidths",
            help=("Bandwidths in Gbit/s, as in the paper, at which TTFT is measured."),
        ),
        FromText(floats),
    ] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    threads: Threads = 1
    home: Path = field(default_factory=_home)


# conversations, modules, servers


@dataclass(frozen=True)
class SessionOptions:
    """Simulate a server over thousands of conversations: hit rates of eviction policies."""

    policies: Annotated[
        tuple[str, ...],
        typer.Option(help="Eviction policies to simulate, separated by commas."),
        FromText(names),
    ] = ("look-ahead", "lru", "fifo")
    quick: Annotated[
        bool, typer.Option(help="Use a sixth of the conversations and a sixth of the storage.")
    ] = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        known = ["fifo", *EVICTION_POLICIES]
        if not set(self.policies) <= set(known):
            raise SettingsError(
                f"--policies must be one or more of {', '.join(known)}; found"
                f" '{','.join(self.policies)}'."
            )


@dataclass(frozen=True)
class MatchingOptions:
    """Measure how much of known passages is found after they were numbered, escaped, cut or
    edited.
    """

    model: Shape = "smollm2-135m-reader"
    passages: Annotated[
        int,
        typer.Option(
            min=PASSAGES_OF_A_LONG_PROMPT,
            help="Number of known passages from which the prompts are built.",
        ),
    ] = 200
    least: int = 60
    longest: int = 400
    prompts: Annotated[
        int,
        typer.Option(min=1, help="Prompts for each kind of change (numbered, escaped, cut, ...)."),
    ] = 8
    prompt_tokens: int = 8192
    known: Annotated[
        tuple[int, ...],
        typer.Option(help="Sizes of the index (known spans) at which the search is timed."),
        FromText(integers),
    ] = (1_000, 10_000, 100_000)
    rounds: Annotated[int, typer.Option(min=1, help="Number of searches for each prompt.")] = 30
    threads: Threads = 1
    home: Path = field(default_factory=_home)


@dataclass(frozen=True)
class PrefixOptions:
    """Compare prefix caching with full prefill and transformers' own cache, for equal prompts
    and for a shared system prompt.
    """

    system_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the system prompt.")] = 2048
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the answers that are compared.")
    ] = 16
    rounds: Rounds = 5
    threads: Threads = 1

    def quick(self) -> PrefixOptions:
        """Return the options of `--quick`: a short system prompt, two rounds."""
        return replace(self, system_tokens=256, rounds=2)


@dataclass(frozen=True)
class ThroughputOptions:
    """Load a server with random requests, by full prefill, prefix caching and ragfuse; then measure
    batched decoding.
    """

    sets: Annotated[
        tuple[str, ...],
        typer.Option(
            "--data",
            help=(
                "Questions: held-out or demo (both included), or a file as for `bench quality`."
                " Repeat for more."
            ),
        ),
    ] = ("held-out",)
    cases: Annotated[
        int,
        typer.Option(
            "--questions",
            min=1,
            help="Questions, drawn at random; each question is asked in many wordings.",
        ),
    ] = 12
    chunk_tokens: PackedTokens = 0
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 16
    shares: Annotated[
        tuple[float, ...],
        typer.Option("--rates", help="Request rates, as shares of each method's own highest rate."),
        FromText(floats),
    ] = (0.3, 0.5, 0.7, 0.9)
    seconds: Annotated[
        float, typer.Option(help="Seconds of load at each rate and for each method.")
    ] = 120.0
    together: Annotated[int, typer.Option(min=1, help="Answers decoded in one batch.")] = 8
    together_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer of the batch.")
    ] = 64
    threads: Threads = 1
    seed: Seed = 0

    def quick(self) -> ThroughputOptions:
        """Return the options of `--quick`: two rates for each of three methods."""
        return replace(self, shares=(0.5, 0.9), seconds=50.0)


@dataclass(frozen=True)
class ModuleOptions:
    """Compare cached modules with full prefill: time to first token by length, and answers."""

    uses: tuple[str, ...] = USES
    sets: Annotated[
        tuple[str, ...],
        typer.Option(
            "--data",
            help=(
                "Questions over documents: held-out or demo (both included), or a file as for"
                " `bench quality`. Repeat for more."
            ),
        ),
    ] = ("held-out",)
    limit: Annotated[
        int,
        typer.Option(min=0, help="Questions of each set, drawn at random by a fixed seed; 0: all."),
    ] = 12
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of a question's documents.")
    ] = 2600
    lengths: tuple[int, ...] = (512, 1024, 2048, 3072)
    rounds: Rounds = 3
    threads: Threads = 1

    def quick(self) -> ModuleOptions:
        """Return the options of `--quick`: two questions of each set, two lengths, one round."""
        return replace(self, limit=2, rounds=1, lengths=(512, 2048))


@dataclass(frozen=True)
class RayOptions:
    """Simulate the router of many replicas, compared with round robin and shortest queue."""

    quick: Annotated[bool, typer.Option(help="Short trial run.")] = False
    seed: Seed = 0
    # Replicas of the large simulation.
    replicas: int = 64
    # Chunks of its corpus.
    corpus: int = 1_000_000
    # Questions over it.
    questions: int = 40_000
    # Conversations that two replicas are asked in.
    talks: int = 2000
    # Their first requests that are simulated.
    turns: int = 4000

    def shortened(self) -> RayOptions:
        """Return the options of a trial run where `quick` is set, else these."""
        return replace(self, corpus=20_000, questions=2000, talks=100) if self.quick else self
