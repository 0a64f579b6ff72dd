"""`ragfuse bench prefix`: what recurs at the beginning of prompts."""

from __future__ import annotations

from dataclasses import replace

from ragfuse_bench.cli.start import start
from ragfuse_bench.options import PrefixOptions

from ragfuse.cli.options import Dtype, Json, Model, prepare_model


def prefix(options: PrefixOptions, model: Model = None, dtype: Dtype = None, json: Json = None) -> None:
    """Compare prefix caching with full prefill and transformers' own cache: an equal prompt, a shared system prompt."""
    from ragfuse_bench.prefix import run_prefix

    report, settings = start("prefix", json, None, model=model, dtype=dtype)
    prepare_model(settings)
    options = replace(options, model=settings.model, dtype=settings.dtype, home=settings.home)
    report.write(run_prefix(options, report))
