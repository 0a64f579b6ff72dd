"""`ragfuse bench engines`: ragfuse and vLLM as servers, apart and together."""

from __future__ import annotations

from ragfuse_bench.cli.start import start
from ragfuse_bench.engines.options import EnginesOptions

from ragfuse.cli.options import Dtype, Json, Model, prepare_model


def engines(options: EnginesOptions, model: Model = None, dtype: Dtype = None, json: Json = None) -> None:
    """Compare servers over recurring chunks: vLLM with prefix caching, ragfuse, and ragfuse with answers by vLLM."""
    from ragfuse_bench.engines.run import run_engines
    from ragfuse_bench.engines.vllm_server import require_vllm
    from ragfuse_bench.throughput.served import require_server

    report, settings = start("engines", json, None, model=model, dtype=dtype)
    require_vllm(options.vllm)
    require_server(settings)
    prepare_model(settings)
    report.write(run_engines(settings, options, report))
