"""How a benchmark that goes by the settings starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragfuse_bench.cli.report import Report

from ragfuse.cli.options import settings_of
from ragfuse.settings import Settings


def start(benchmark: str, json: Path | None, plot: Path | None, **named: Any) -> tuple[Report, Settings]:
    """Return the report and the settings, in a process with a tuned allocator.

    Args:
        benchmark: Its name.
        json: The target of `--json`.
        plot: The picture to draw; None for none.
        **named: Settings given on the command line: model, dtype, device.

    Raises:
        SettingsError: A picture is wanted and matplotlib is missing, or a setting is invalid.
    """
    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc
    from ragfuse.models.dtypes import resolve_auto

    report, settings = Report(benchmark, json), resolve_auto(settings_of(**named))
    if plot is not None:
        require_plotting()
    tune_malloc(report)
    return report, settings
