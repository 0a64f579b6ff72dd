"""From wishes to the result of `ragfuse bench quality`: loads the model, measures, draws
the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ragfuse_bench.options import QualityOptions
from ragfuse_bench.presets import fusable_model
from ragfuse_bench.quality.cases import set_name
from ragfuse_bench.quality.methods import default_method, methods_of
from ragfuse_bench.quality.run import Plan, measure
from ragfuse_bench.quality.table import results_of, show_quality
from rich.console import Console

from ragfuse.calibration.runner import circumstances
from ragfuse.models.device import resolve_auto
from ragfuse.settings import Settings


def run_quality(
    settings: Settings, options: QualityOptions, console: Console, rows: Path | None = None
) -> dict[str, Any]:
    """The result as plain JSON types; ModelError for a model that cannot be fused or reads
    no text.
    """
    settings = resolve_auto(settings)
    model = fusable_model(
        settings.model, settings.dtype, settings.device, settings.home, reads=True
    )
    methods = tuple(methods_of(options.methods, options.ratios, model))
    results = results_of(measure(Plan(options, methods, rows), model, console))
    show_quality(results, console)
    default = default_method(model)
    return {
        "results": results,
        "model": Path(settings.model).name if Path(settings.model).exists() else settings.model,
        "default": {"method": default.name, "ratio": default.ratio},
        "dtype": settings.dtype,
        "options": {
            "sets": [set_name(name) for name in options.sets],
            "limit": options.limit,
            "chunk_tokens": options.chunk_tokens,
            "context_tokens": options.context_tokens,
            "passages": options.passages,
        },
        "ttft_is": (
            "full prefill's CPU time over the method's, both summed over the questions, measured"
            " side by side"
        ),
        **circumstances(model.device, torch.get_num_threads()),
    }
