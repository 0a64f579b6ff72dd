"""`ragfuse bench ttft`, `kernels`, `decode`, `load`, `controller`, `store` and `dropin`: the benchmarks of speed."""

from __future__ import annotations

import os

from ragfuse_bench.options import (
    ControllerOptions,
    DecodeOptions,
    DropinOptions,
    KernelOptions,
    LoadOptions,
    StoreOptions,
    TtftOptions,
)

from ragfuse.cli.options import Json, console_for, write_json
from ragfuse.errors import InputError


def ttft(options: TtftOptions, json: Json = None) -> None:
    """Measure the time to the first token of full prefill, ragfuse, plain reuse and prefix caching, in turns."""
    from ragfuse_bench.ttft import run_ttft

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_ttft(options, console), json)


def kernels(options: KernelOptions, json: Json = None) -> None:
    """Count the torch operations of full prefill and of every policy, on the path of CPUs and on that of GPUs."""
    from ragfuse_bench.kernels import run_kernels

    write_json(run_kernels(options, console_for(json)), json)


def decode(options: DecodeOptions, json: Json = None) -> None:
    """Measure the time a token of an answer: ragfuse, transformers' own generate, and vLLM where it is named."""
    from ragfuse_bench.decode import run_decode

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_decode(options, console), json)


def load(options: LoadOptions, json: Json = None) -> None:
    """Measure the time to the first token with KV in memory and on a slow tier, prefetched or read when used."""
    from ragfuse_bench.load import run_load

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_load(options, console), json)


def controller(options: ControllerOptions, json: Json = None) -> None:
    """Measure how well the loading controller predicts the time to the first token and chooses the ratio."""
    from ragfuse_bench.controller import run_controller

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_controller(options, console), json)


def store(options: StoreOptions, json: Json = None) -> None:
    """Measure the throughput of tiers and their bare devices, the time of look-ups, and how saving delays requests."""
    from ragfuse_bench.store import run_store

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_store(options, console), json)


def dropin(options: DropinOptions, json: Json = None) -> None:
    """Compare ragfuse's classes with Hugging Face's in LangChain and LlamaIndex."""
    console = console_for(json)
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
    tune_malloc(console)
    write_json(run_dropin(options, console), json)
