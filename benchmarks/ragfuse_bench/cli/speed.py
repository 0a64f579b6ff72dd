"""Benchmarks that are run by their options alone, and `ragfuse bench dropin`."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ragfuse_bench.cli.report import Report
from ragfuse_bench.options import (
    ControllerOptions,
    DecodeOptions,
    DropinOptions,
    KernelOptions,
    LoadOptions,
    MatchingOptions,
    SessionOptions,
    StreamOptions,
    TtftOptions,
)
from ragfuse_bench.ray.options import RayOptions

from ragfuse.cli.options import Json
from ragfuse.errors import InputError


def _command(name: str, module: str, kind: type[Any], help_text: str, is_timed: bool = True) -> Callable[..., None]:
    """Return the command of a benchmark whose function is `run_NAME(options, console)`.

    One that times computing starts again with an allocator that keeps memory.
    """

    def command(options: Any, json: Json = None) -> None:
        from ragfuse.calibration.runner import tune_malloc

        report = Report(name, json)
        if is_timed:
            tune_malloc(report)
        report.write(getattr(import_module(module), f"run_{name}")(options, report))

    command.__name__, command.__doc__ = name, help_text
    command.__annotations__["options"] = kind
    return command


ttft = _command(
    "ttft",
    "ragfuse_bench.ttft",
    TtftOptions,
    "Measure the time to the first token of full prefill, ragfuse, plain reuse and prefix caching, in turns.",
)
kernels = _command(
    "kernels",
    "ragfuse_bench.kernels",
    KernelOptions,
    "Count the torch operations of full prefill and of every policy, on the path of CPUs and on that of GPUs.",
    is_timed=False,
)
decode = _command(
    "decode",
    "ragfuse_bench.decode",
    DecodeOptions,
    "Measure the time a token of an answer: ragfuse, transformers' own generate, and vLLM where it is named.",
)
load = _command(
    "load",
    "ragfuse_bench.load",
    LoadOptions,
    "Measure the time to the first token with KV in memory and on a slow tier, prefetched or read when used.",
)
controller = _command(
    "controller",
    "ragfuse_bench.controller",
    ControllerOptions,
    "Measure how well the loading controller predicts the time to the first token and chooses the ratio.",
)
matching = _command(
    "matching",
    "ragfuse_bench.matching",
    MatchingOptions,
    "Measure how much of known passages is found after they were numbered, escaped, cut or edited, and how fast.",
)
sessions = _command(
    "sessions",
    "ragfuse_bench.sessions.run",
    SessionOptions,
    "Simulate one server over thousands of conversations, to compare the hit rates of eviction policies.",
    is_timed=False,
)
stream = _command(
    "stream",
    "ragfuse_bench.stream.run",
    StreamOptions,
    "Send contexts over a changing link before a deadline: as text, 8-bit KV, one level, adaptive levels.",
)
ray = _command(
    "ray",
    "ragfuse_bench.ray.run",
    RayOptions,
    "Simulate the router of replicas; encode in bulk and serve on a two-node Ray cluster of this machine.",
    is_timed=False,
)


def dropin(options: DropinOptions, json: Json = None) -> None:
    """Compare ragfuse's classes with Hugging Face's in LangChain and LlamaIndex."""
    report = Report("dropin", json)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by the threads in which both classes answer
    try:
        from ragfuse_bench.dropin import run_dropin

        from ragfuse.calibration.plots import require_plotting
        from ragfuse.calibration.runner import tune_malloc
    except ImportError as error:
        raise InputError(
            f"This needs more packages ({error.name}): pip install 'ragfuse-kv[demo,llama-index]'"
        ) from error
    if options.plot is not None:
        require_plotting()
    tune_malloc(report)
    report.write(run_dropin(options, report))
