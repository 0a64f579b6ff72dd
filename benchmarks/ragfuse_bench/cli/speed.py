"""`ragfuse bench ttft`, `load`, `controller`, `store` and `dropin`: the benchmarks of speed."""

from __future__ import annotations

import os

from ragfuse_bench.options import ControllerOptions, DropinOptions, LoadOptions, StoreOptions, TtftOptions

from ragfuse.cli.options import Json, console_for, write_json
from ragfuse.errors import InputError


def ttft(options: TtftOptions, json: Json = None) -> None:
    """Time to the first token: full prefill, ragfuse, plain reuse and prefix caching, in interleaved rounds."""
    from ragfuse_bench.ttft import run_ttft

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_ttft(options, console), json)


def load(options: LoadOptions, json: Json = None) -> None:
    """Time to the first token from a slow tier: read ahead by a thread, read when used, and from memory."""
    from ragfuse_bench.load import run_load

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_load(options, console), json)


def controller(options: ControllerOptions, json: Json = None) -> None:
    """How well the loading controller predicts the time to the first token, and how well it chooses the ratio."""
    from ragfuse_bench.controller import run_controller

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_controller(options, console), json)


def store(options: StoreOptions, json: Json = None) -> None:
    """Bytes a second of each tier beside its device, look-ups among a million entries, what saving costs a request."""
    from ragfuse_bench.store import run_store

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_store(options, console), json)


def dropin(options: DropinOptions, json: Json = None) -> None:
    """The model swapped in chains and query engines, beside Hugging Face's, and what is reused with nothing indexed."""
    console = console_for(json)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by the threads in which both classes answer
    try:
        from ragfuse_bench.dropin import require, run_dropin

        from ragfuse.calibration.plots import require_plotting
        from ragfuse.calibration.runner import tune_malloc
    except ImportError as error:
        raise InputError(
            f"This needs more packages ({error.name}): pip install 'ragfuse-kv[demo,llama-index]'"
        ) from error
    require(options)
    if options.plot is not None:
        require_plotting()
    tune_malloc(console)
    write_json(run_dropin(options, console), json)
